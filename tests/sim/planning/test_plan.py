"""Plans: what is recommended for a machine, for whom, and what another machine would bring."""

import json
from dataclasses import replace

import pytest

from sim.fitting.left_out import TABLE
from sim.fitting.uncertainty import interval_of
from sim.hardware.catalog import find_link, find_machine
from sim.memory.chance import LIKELY, chance_to_fit
from sim.memory.need import memory_of
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.options import Planner, default_reserve
from sim.planning.plan import plan
from sim.planning.rules import BASELINES, PRESET_RULES, distance
from sim.simulate import STRATEGIES, Strategy, simulate
from sim.timing.costs import costs_of
from zenflow.config import PRESETS
from zenflow.errors import ConfigError
from zenflow.presets import PRESET_CHANGES
from zenflow.rule.sizes import AUTOMATIC_DEPTH

pytestmark = pytest.mark.usefixtures("simulated_once")
GIB = 1 << 30
OURS = tuple(PRESETS)


def workload(name="llama-2-7b", **settings):
    return Workload.of_config(*find_model(name), **{"batch_size": 4, **settings})


def desktop(ram):
    return find_machine("rtx5090-desktop").with_values({"host.dram_bytes": ram * GIB})


@pytest.fixture(scope="module")
def plans(simulated_once):
    """Return the plans of people who ask: by model, machine and what it holds."""
    h100 = find_machine("hgx-h100")
    asked = {
        "8b, 128": ("llama-3.1-8b", desktop(128)),
        "8b, 64": ("qwen3-8b", desktop(64)),
        "1.5b, 3090": ("qwen2.5-1.5b", find_machine("rtx3090-desktop")),
        "70b on eight": ("meta-llama/Llama-3.3-70B-Instruct", h100),
        "14b on eight": ("qwen2.5-14b", h100),
    }
    return {
        name: plan(
            workload(model, batch_size=6 if "3090" in name else 4),
            machine,
            strategies=OURS,
            parallel="ddp",
        )
        for name, (model, machine) in asked.items()
    }


@pytest.fixture(scope="module")
def with_whole_logits(simulated_once):
    """Return the plan of an 8B model on a host of 128 GB, its loss in chunks refused."""
    return plan(workload("qwen3-8b"), desktop(128), strategies=OURS, chunked_loss=False)


WITH_AN_ANSWER = ("8b, 128", "1.5b, 3090", "14b on eight")


@pytest.mark.parametrize("name", WITH_AN_ANSWER)
def test_what_is_recommended_runs_here_and_fits_with_the_reserve_by_hand(plans, name):
    found = plans[name]
    chosen = found.recommended
    assert chosen.is_ours
    assert chosen.fits
    machine = replace(found.hardware, num_devices=chosen.need.num_devices)
    need = memory_of(chosen.need.workload, chosen.strategy, machine)
    assert need.device_bytes <= machine.device.memory.value - default_reserve(machine)
    assert need.host_bytes <= machine.host.dram_bytes.value - default_reserve(machine)
    done = simulate(costs_of(chosen.need.workload, machine), chosen.strategy, keeps_spans=False)
    assert chosen.step_seconds == pytest.approx(done.step_seconds, rel=0.01)
    tokens = machine.num_devices * chosen.need.workload.tokens_per_step
    assert chosen.tokens_per_second == pytest.approx(tokens / chosen.step_seconds)
    assert chosen.strategy.config.is_exact, "the other rule is asked for"


@pytest.mark.parametrize("name", WITH_AN_ANSWER)
def test_the_interval_holds_the_answer_and_is_that_of_simulated_draws(plans, name):
    found = plans[name]
    chosen, told = found.recommended, found.interval
    assert told.low < chosen.tokens_per_second < told.high
    if name != "1.5b, 3090":
        return
    work = chosen.need.workload

    def tokens_per_second(drawn):
        done = simulate(costs_of(work, drawn), chosen.strategy, keeps_spans=False, num_steps=2)
        return work.tokens_per_step / done.step_seconds

    slow = interval_of(found.hardware, tokens_per_second, count=12, left_out=TABLE)
    fast = plan(found.workload, found.hardware, strategies=OURS, draws=12).interval
    assert fast.low == pytest.approx(slow.low, rel=0.07)
    assert fast.high == pytest.approx(slow.high, rel=0.07)


def test_the_most_tokens_that_are_likely_to_fit_are_taken_and_more_are_named_as_riskier(
    with_whole_logits,
):
    found = with_whole_logits
    chosen, riskier = found.recommended, found.tight
    assert found.has_fewer_tokens
    assert chosen.need.workload.tokens_per_step == 3 * 1024
    assert chosen.need.workload.checkpointing
    assert chosen.chance >= LIKELY > riskier.chance
    assert riskier.may_fit
    assert riskier.need.workload.tokens_per_step == 4 * 1024
    assert riskier.tokens_per_second > chosen.tokens_per_second


@pytest.mark.parametrize("name", ["8b, 128", "1.5b, 3090", "14b on eight"])
def test_what_is_recommended_fits_with_a_chance_of_ninety_percent(plans, name):
    chosen = plans[name].recommended
    memory = plans[name].hardware.device.memory.value
    assert chosen.chance == pytest.approx(chance_to_fit(chosen.need.device_bytes, memory))
    assert chosen.chance >= 0.9
    assert plans[name].likeliest is None


def test_the_likeliest_is_shown_and_not_recommended_where_nothing_is_likely_to_fit():
    machine = find_machine("rtx3090-desktop").with_values({"host.dram_bytes": 128 * GIB})
    found = plan(workload("qwen3-8b"), machine, strategies=OURS, draws=0, chunked_loss=False,
                 streams=False)  # fmt: skip
    assert found.recommended is None
    shown = found.likeliest
    assert found.shown is shown
    assert 0.5 < shown.chance < LIKELY
    assert not shown.fits
    assert shown.need.workload.sequence == 1024, "sequences stay whole where they may fit"
    assert found.tight.chance < shown.chance
    assert found.tight.tokens_per_second > shown.tokens_per_second
    own = [option for option in found.options if option.strategy.name not in BASELINES]
    others = [option.chance for option in own if option.may_fit]
    assert shown.chance == max(others)


def test_checkpointing_is_looked_at_where_it_is_not_said():
    found = plan(workload("qwen3-8b"), find_machine("rtx-a6000-server", 1), draws=0,
                 strategies=OURS)  # fmt: skip
    chosen, riskier = found.recommended, found.tight
    assert chosen.need.workload.checkpointing
    assert not riskier.need.workload.checkpointing
    assert riskier.tokens_per_second > chosen.tokens_per_second
    assert riskier.chance < LIKELY <= chosen.chance


def test_more_of_the_hosts_memory_comes_before_another_device(with_whole_logits):
    found = plan(workload("qwen3-8b"), desktop(64), strategies=OURS, host_state="float32",
                 state_on_drive=False)  # fmt: skip
    assert found.recommended is found.without_compact is None
    first = found.improvements[0]
    assert first.change == "128 GiB of host memory"
    assert first.host_memory == 128 * GIB
    # With it the plan is what was offered.
    offered = with_whole_logits.recommended
    assert first.setting == offered.label
    assert first.step_seconds == offered.step_seconds


def test_compact_state_is_taken_where_nothing_fits_with_float32_and_nowhere_else(
    plans, with_whole_logits
):
    found = plans["8b, 64"]
    chosen = found.recommended
    config = chosen.strategy.config
    assert config.host_state == "compact"
    assert "host_state=compact" in chosen.label
    assert "within rounding of AdamW" in chosen.rule
    need = memory_of(chosen.need.workload, chosen.strategy, found.hardware)
    room = found.hardware.host.dram_bytes.value - found.reserve
    assert need.queue_depth == chosen.need.queue_depth
    assert need.host_bytes <= room
    if need.queue_depth < min(AUTOMATIC_DEPTH, config.update_interval):  # no more would fit
        deeper = replace(config, queue_depth=need.queue_depth + 1)
        larger = memory_of(chosen.need.workload, replace(chosen.strategy, config=deeper),
                           found.hardware)  # fmt: skip
        assert larger.host_bytes > room
    first = found.without_compact[0]
    assert first.setting == with_whole_logits.recommended.label
    others = [option for option in found.options if option is not chosen]
    assert not any(option.strategy.config.is_compact or option.fits for option in others)
    assert plans["8b, 128"].without_compact is None
    assert not any(o.strategy.config.is_compact for o in plans["8b, 128"].options)


def test_compact_state_may_be_asked_for_and_is_farther_from_adamw(plans):
    work, machine = workload("llama-3.1-8b"), desktop(128)
    found = plan(work, machine, strategies=OURS, draws=0, host_state="compact")
    assert found.recommended.strategy.config.is_compact
    assert found.without_compact is None
    with_float32 = plans["8b, 128"].recommended
    assert found.recommended.tokens_per_second > with_float32.tokens_per_second, "memory binds"
    ours = Strategy.of("zenflow", host_state="compact")
    assert distance(ours) == distance(Strategy.of("zenflow")) + 1
    whole = Strategy.of("on_device", host_state="compact")
    assert distance(whole) == 0, "nothing is on the host"


def test_devices_that_compact_state_can_not_be_divided_by_are_left_out():
    """Llama 3 has 128,256 rows of embeddings: 2004 groups of 64, which eight do not share."""
    machine = find_machine("hgx-h100")
    found = plan(workload("llama-3.1-8b"), machine, strategies=("zenflow",), draws=0,
                 parallel="fsdp", host_state="compact")  # fmt: skip
    assert found.recommended.strategy.config.is_compact
    assert found.recommended.need.num_devices == 4


def test_the_same_step_is_cut_into_micro_batches_where_that_is_faster(plans):
    found = plans["1.5b, 3090"]
    work = found.recommended.need.workload
    assert (work.batch_size, work.accumulation, work.checkpointing) == (2, 3, False)
    assert found.recommended.tokens_per_second > 4500
    assert found.exact.strategy.name == "zero_offload"
    assert distance(found.exact.strategy) == 0


def test_weights_beyond_a_device_need_sharding(plans):
    found = plans["70b on eight"]
    assert found.needs_sharding
    assert found.recommended is None
    assert found.largest == "gemma-2-27b"
    (offer,) = found.improvements
    assert offer.change == "a device with 288 GiB"
    assert not plans["14b on eight"].needs_sharding


def test_one_device_is_recommended_where_all_are_not_likely_to_fit(plans):
    found = plans["14b on eight"]
    assert found.recommended.need.num_devices == 1
    assert [option.need.num_devices for option in found.per_devices] == [1]
    assert found.tight.need.num_devices == 8
    assert found.tight.tokens_per_second > found.recommended.tokens_per_second
    one = plan(
        workload("qwen2.5-14b"), find_machine("hgx-h100", 1), strategies=OURS, draws=0
    ).recommended
    assert found.recommended.label == one.label
    assert found.recommended.tokens_per_second == pytest.approx(one.tokens_per_second)
    # Where nothing is likely to fit the likeliest is of one device, too.
    names = ("zero_offload",)
    larger = plan(workload("qwen2.5-32b"), find_machine("hgx-h100"), strategies=names, draws=0,
                  parallel="ddp")  # fmt: skip
    assert larger.likeliest.need.num_devices == 1


def test_all_devices_are_compared_with_one_where_both_fit():
    found = plan(
        workload("qwen2.5-0.5b", batch_size=1),
        find_machine("rtx4090-server", 4),
        strategies=OURS,
        draws=0,
    )
    counts = [option.need.num_devices for option in found.per_devices]
    assert counts == [4, 1]
    rates = [option.tokens_per_second for option in found.per_devices]
    assert found.recommended.tokens_per_second == max(rates)


@pytest.mark.parametrize("name", WITH_AN_ANSWER)
def test_the_plan_says_how_many_gradients_wait_on_the_host(plans, name):
    chosen = plans[name].recommended
    config, depth = chosen.strategy.config, chosen.need.queue_depth
    assert chosen.to_dict()["queue_depth"] == depth
    assert 1 <= depth <= min(AUTOMATIC_DEPTH, config.update_interval)
    parts = {part.name: part.num_bytes for part in chosen.need.parts}
    assert (depth > 1) == ("waiting gradients" in parts)


def test_adamw_itself_is_recommended_unless_another_rule_is_faster_by_enough():
    found = plan(workload("tinyllama-1.1b"), find_machine("hgx-h100", 1), strategies=OURS)
    assert found.recommended.strategy.name == "on_device"
    assert found.exact is None


def test_longer_windows_fewer_columns_and_the_published_rule_are_farther_from_adamw():
    def far(name, **knobs):
        return distance(Strategy.of(name, **knobs))

    assert far("zero_offload") == far("on_device") == 0
    assert far("zenflow") == far("zenflow", update_interval=3) == 1
    assert far("zenflow", topk_ratio=0.0) == 2
    assert far("zenflow", update_interval=8) == 2
    assert far("zenflow", update_interval=16) == 3
    assert far("zenflow_paper") == far("zenflow", update_rule="published") == 4


def test_other_systems_stand_behind_and_are_never_recommended():
    found = plan(workload("qwen2.5-0.5b"), desktop(64), draws=0)
    names = [option.strategy.name for option in found.options]
    assert names == [*PRESETS, *(n for n in STRATEGIES if n not in PRESETS)]
    assert set(PRESET_RULES) == set(PRESET_CHANGES)
    assert all(option.rule for option in found.options)
    assert [option.is_ours for option in found.options] == [n in PRESET_CHANGES for n in names]
    theirs = [name for name in STRATEGIES if name not in PRESETS]
    alone = plan(workload("qwen2.5-0.5b"), desktop(64), strategies=theirs, draws=0)
    assert alone.recommended is None
    unfit = [option for option in found.options if option.shortfalls]
    assert all(option.prediction is None for option in unfit)


def test_a_faster_part_is_predicted_anew():
    machine = find_machine("rtx3090-desktop").with_values(
        {"host.dram_bytes": 1e12, "device.memory": 10 * GIB}
    )
    found = plan(workload("qwen2.5-1.5b"), machine, strategies=["zero_offload"], draws=0,
                 chunked_loss=False)  # fmt: skip
    now = found.recommended
    by_change = {item.change: item for item in found.improvements}
    item = by_change["pcie5-x16 in place of pcie4-x16"]
    faster = replace(machine, link=find_link("pcie5-x16"))
    again = Planner(faster).option(now.need.workload, now.strategy)
    assert item.step_seconds == again.step_seconds < now.step_seconds
    assert item.saved_share == pytest.approx(1 - again.step_seconds / now.step_seconds)
    shares = [item.saved_share for item in found.improvements]
    assert shares == sorted(shares, reverse=True)
    assert "16 cores in place of 8" not in by_change, "DRAM binds, not its cores"


def test_a_larger_device_is_offered_where_it_saves_enough(plans):
    found = plans["14b on eight"]
    sizes = [item for item in found.improvements if "a device with" in item.change]
    assert sizes
    assert all(item.saved_share >= 0.1 for item in sizes)


def test_checkpointing_and_the_reserve_are_held_where_they_are_given():
    work, machine = workload("qwen2.5-1.5b"), find_machine("rtx3090-desktop")
    always = plan(work, machine, strategies=OURS, checkpointing=True, draws=0)
    assert always.recommended.need.workload.checkpointing
    most = 12 * GIB
    less = plan(work, machine, strategies=OURS, reserve=most, draws=0)
    need = less.recommended.need
    assert need.device_bytes <= machine.device.memory.value - most
    assert less.interval is None


def test_a_plan_is_json(plans):
    for found in plans.values():
        again = json.loads(json.dumps(found.to_dict(), allow_nan=True))
        assert (again["recommended"] is None) == (found.recommended is None)
        assert [o["strategy"] for o in again["options"]] == list(OURS)


def test_unknown_strategies_and_dtypes_without_a_peak_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'zenflow'"):
        plan(workload(), desktop(64), strategies=["zenflwo"])
    with pytest.raises(ConfigError, match="no peak for bfloat16"):
        plan(workload("gpt2"), find_machine("v100-server", 1))
