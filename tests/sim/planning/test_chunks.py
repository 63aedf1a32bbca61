"""Plans with a loss in chunks: where it is found, where whole logits stay, and who is refused."""

import json
from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine
from sim.memory.chance import LIKELY, chance_to_fit
from sim.memory.need import memory_of
from sim.models.activations import CHUNK_LOGITS
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.choice import Chooser
from sim.planning.chunks import AS_LIKELY, FASTER
from sim.planning.options import default_reserve
from sim.planning.plan import plan
from sim.planning.rules import WORTH
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from zenflow.config import PRESETS
from zenflow.errors import ConfigError

pytestmark = pytest.mark.usefixtures("simulated_once")
GIB = 1 << 30
OURS = tuple(PRESETS)


def workload(name="llama-3.1-8b", **settings):
    return Workload.of_config(*find_model(name), **{"batch_size": 4, **settings})


def machine(name, ram=128):
    return find_machine(name).with_values({"host.dram_bytes": ram * GIB})


def planned(work, hardware, **how):
    """Return the plan of weights that stay on the device."""
    return plan(work, hardware, **{"strategies": OURS, "draws": 0, "streams": False, **how})


@pytest.fixture(scope="module")
def on_24_gb(simulated_once):
    return planned(workload(), machine("rtx4090-desktop"))


@pytest.fixture(scope="module")
def on_32_gb(simulated_once):
    return planned(workload(batch_size=5), machine("rtx5090-desktop"))


def test_an_8b_model_on_24_gb_is_as_likely_to_fit_in_chunks_and_twice_as_fast(on_24_gb):
    shown, before = on_24_gb.shown, on_24_gb.without_chunks
    assert shown.need.workload.loss == "chunks"
    assert "chunked loss" in shown.changes
    assert before.need.workload.loss == "tokens"
    assert shown.tokens_per_second > 1.9 * before.tokens_per_second
    assert shown.chance > before.chance - AS_LIKELY
    without = planned(workload(), machine("rtx4090-desktop"), chunked_loss=False)
    assert without.shown.to_dict() == before.to_dict()
    assert without.without_chunks is None


def test_the_step_as_asked_for_is_recommended_in_chunks_where_less_of_it_fits_whole(on_32_gb):
    chosen, before = on_32_gb.recommended, on_32_gb.without_chunks
    assert chosen.need.workload.tokens_per_step == 5 * 1024
    assert chosen.need.workload.loss == "chunks"
    assert before.need.workload.tokens_per_step == 3 * 1024
    assert chosen.tokens_per_second > FASTER * before.tokens_per_second
    assert before.fits


@pytest.mark.parametrize("name", ["on_24_gb", "on_32_gb"])
def test_what_is_shown_in_chunks_fits_by_hand(name, request):
    found = request.getfixturevalue(name)
    chosen = found.shown
    hardware, work = found.hardware, chosen.need.workload
    room = hardware.device.memory.value - default_reserve(hardware)
    assert chosen.need.device_bytes <= room
    assert memory_of(work, chosen.strategy, hardware).device_bytes == chosen.need.device_bytes
    # Weights, a layer's input each, a chunk in float32 twice, and the output layer's gradients.
    width, depth = 4096, 32
    least = 2 * work.num_params + 2 * depth * work.tokens * width
    loss = 8 * CHUNK_LOGITS + 2 * width * (work.tokens + work.vocabulary)
    assert least + loss < chosen.need.device_bytes
    whole = replace(work, loss="tokens")
    more = memory_of(whole, chosen.strategy, hardware).device_bytes
    assert more - chosen.need.device_bytes < 12 * work.tokens * work.vocabulary
    assert chance_to_fit(more, hardware.device.memory.value) < min(LIKELY, chosen.chance)


def test_a_rule_nearer_to_adamw_that_fits_in_chunks_alone_is_worth_them():
    found = planned(workload("qwen2.5-0.5b"), find_machine("rtx4090-desktop"))
    assert found.recommended.strategy.name == "on_device"
    assert found.without_chunks.strategy.name == "zenflow"
    assert found.recommended.tokens_per_second * WORTH > FASTER * (
        found.without_chunks.tokens_per_second
    )


@pytest.mark.parametrize(
    ("name", "card"),
    [("mistral-7b", "rtx4090-desktop"), ("qwen2.5-1.5b", "rtx3090-desktop"),
     ("gpt2", "rtx3090-desktop")],
)  # fmt: skip
def test_whole_logits_stay_where_chunks_gain_little(name, card):
    work = workload(name)
    found = planned(work, machine(card))
    assert found.without_chunks is None
    assert found.recommended.need.workload.loss == "tokens"
    forced = planned(work, machine(card), chunked_loss=True).recommended
    assert forced.need.workload.loss == "chunks"
    assert forced.tokens_per_second <= FASTER * found.recommended.tokens_per_second


def test_no_setting_is_chosen_in_chunks_where_none_that_fits_promises_more(monkeypatch):
    choose, chosen = Chooser.choose, []

    def counted(self):
        chosen.append(self)
        return choose(self)

    monkeypatch.setattr(Chooser, "choose", counted)
    planned(workload("qwen2.5-1.5b"), machine("rtx3090-desktop"))
    assert len(chosen) == 1, "whole logits alone"


@pytest.mark.parametrize(
    ("name", "card"), [("tinyllama-1.1b", "hgx-h100"), ("llama-3.3-70b", "rtx4090-desktop")]
)
def test_nothing_is_searched_where_logits_are_few_or_nothing_fits(name, card, monkeypatch):
    monkeypatch.delattr(Chooser, "chunked")
    hardware = replace(find_machine(card), num_devices=1)
    assert planned(workload(name), hardware).without_chunks is None


@pytest.mark.parametrize(
    "other",
    [
        {"scales_logits": True}, {"dtype": "float16"}, {"is_causal": False},
        {"kernels": "compiled"}, {"loss": "sum"},
    ],
    ids=str,
)  # fmt: skip
def test_chunks_are_never_found_where_train_has_none_or_the_loss_is_another(
    other, monkeypatch, on_32_gb
):
    monkeypatch.delattr(Chooser, "chunked")
    work = replace(on_32_gb.workload, **other)
    assert planned(work, on_32_gb.hardware, strategies=["zenflow"]).without_chunks is None


def test_models_that_change_their_logits_are_known_by_family_and_by_field():
    family, config = find_model("gemma-2-9b")
    assert Workload.of_config(family, config).scales_logits
    assert not Workload.of_config(
        family, {**config, "final_logit_softcapping": None}
    ).scales_logits
    assert not workload().scales_logits
    name, config = find_model("llama-3.1-8b")
    assert Workload.of_config(name, {**config, "logits_scaling": 8.0}).scales_logits
    with pytest.raises(ConfigError, match=r"gemma.* changes its logits .*--chunked-loss"):
        plan(workload("gemma-2-9b"), machine("rtx4090-desktop"), chunked_loss=True)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2"])
def test_a_loss_in_chunks_is_predicted_to_take_as_long(name):
    hardware, strategy = machine("rtx4090-desktop"), Strategy.of("zenflow")
    seconds = [
        simulate(costs_of(workload(name, loss=loss), hardware), strategy, keeps_spans=False)
        for loss in ("tokens", "chunks")
    ]
    assert seconds[0].step_seconds == seconds[1].step_seconds


def test_presets_to_compare_with_are_not_recommended_for_being_in_chunks():
    found = planned(workload("qwen3-8b"), machine("rtx3090-desktop"))
    assert found.without_chunks.strategy.name == found.shown.strategy.name == "zenflow"


def test_memory_that_would_make_a_step_fit_is_named_for_whole_logits(on_24_gb):
    assert on_24_gb.recommended is None
    assert on_24_gb.improvements
    assert not any("chunked" in item.setting for item in on_24_gb.improvements)


def test_a_plan_in_chunks_is_json(on_24_gb):
    record = json.loads(json.dumps(on_24_gb.to_dict()))
    assert record["likeliest"]["chunked_loss"] is True
    assert record["without_chunks"]["chunked_loss"] is False
    assert record["without_chunks"]["strategy"] == on_24_gb.without_chunks.strategy.name
