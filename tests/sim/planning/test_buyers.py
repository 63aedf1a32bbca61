"""Twelve questions of people who buy a machine: properties of the answers, not their words."""

import functools
from dataclasses import replace

import pytest

from sim.hardware.catalog import clustered, find_device, find_machine, most_memory
from sim.memory.chance import LIKELY
from sim.memory.need import memory_of
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.plan import plan
from sim.planning.rules import BASELINES
from sim.simulate import busiest_lane
from zenflow.config import PRESETS

pytestmark = pytest.mark.usefixtures("simulated_once")
GIB = 1 << 30


def machine(name, count=1, ram=None):
    found = find_machine(name, count)
    return found if ram is None else found.with_values({"host.dram_bytes": ram * GIB})


def laptop():
    """Return a desktop with the memory of a laptop's RTX 4080."""
    return machine("rtx4080-desktop", ram=32).with_values({"device.memory": 12 * GIB})


HOSTS = clustered(machine("hgx-h100", 8), 2, "8x-infiniband-ndr")
QUESTIONS = {
    "7B on a 3090, 64 GiB": ("llama-2-7b", machine("rtx3090-desktop", ram=64), (1, 2048)),
    "13B on two 4090": ("llama-2-13b", machine("rtx4090-server", 2, ram=256), (1, 512)),
    "8B on a 4090, 64 GiB": ("llama-3.1-8b", machine("rtx4090-desktop", ram=64), (4, 1024)),
    "14B on 24 GB": ("qwen2.5-14b", machine("rtx4090-desktop", ram=128), (4, 1024)),
    "70B on eight H100": ("llama-3.1-70b", machine("hgx-h100", 8), (1, 2048)),
    "70B on two hosts": ("llama-3.1-70b", HOSTS, (1, 2048)),
    "3B on a laptop": ("llama-3.2-3b", laptop(), (1, 1024)),
    "30B-A3B on 80 GB": ("qwen3-30b-a3b", machine("hgx-h100"), (1, 1024)),
    "small and fast": ("gpt2", machine("hgx-h100"), (4, 1024)),
    "70B on a 3060": ("llama-3.1-70b", machine("rtx3060-desktop"), (1, 1024)),
    "1B on four T4": ("llama-3.2-1b", machine("t4-server", 4), (1, 1024)),
    "8B on eight V100": ("llama-3.1-8b", machine("dgx-1", 8), (1, 1024)),
}
NOTHING, MIXTURE = "70B on a 3060", "30B-A3B on 80 GB"
OURS = [name for name in PRESETS if name not in BASELINES]


@functools.cache
def answer(name):
    model, hardware, (batch, sequence) = QUESTIONS[name]
    usable = find_device(hardware.device.name).flops
    work = Workload.of_config(
        *find_model(model), batch_size=batch, sequence=sequence,
        dtype="bfloat16" if "bfloat16" in usable else "float16",
    )  # fmt: skip
    return plan(work, hardware, strategies=OURS, draws=0)


def asked(*without):
    """Return the questions; a mixture has eighteen thousand tensors, and takes its time."""
    slow = {MIXTURE: pytest.mark.slow}
    return [
        pytest.param(name, marks=slow.get(name, ())) for name in QUESTIONS if name not in without
    ]


@pytest.mark.parametrize("name", asked(NOTHING))
def test_there_is_a_setting_that_fits_with_nine_tenths_and_leaves_the_reserve(name):
    found = answer(name)
    chosen, hardware = found.recommended, found.hardware
    assert chosen.fits
    assert chosen.chance >= LIKELY
    assert found.shown is chosen
    count = chosen.need.num_devices
    hosts = max(1, count // hardware.num_devices)
    used = replace(
        hardware, num_hosts=hosts, num_devices=count // hosts,
        network=hardware.network if hosts > 1 else None,
    )  # fmt: skip
    need = memory_of(chosen.need.workload, chosen.strategy, used)
    assert need.host_bytes <= hardware.host.dram_bytes.value - found.reserve
    assert need.device_bytes == pytest.approx(chosen.need.device_bytes)


@pytest.mark.parametrize("name", asked())
def test_no_change_of_the_machine_is_slower_than_the_answer_or_impossible(name):
    found = answer(name)
    most = most_memory(found.hardware.host)
    for item in found.improvements:
        assert item.host_memory is None or item.host_memory <= most
        if found.likeliest is not None:
            assert item.tokens_per_second >= found.likeliest.tokens_per_second


def test_where_nothing_fits_a_smaller_model_is_named_that_does():
    found = answer(NOTHING)
    assert found.shown is None
    assert found.needs_sharding
    assert find_model(found.largest)
    smaller = Workload.of_config(*find_model(found.largest), sequence=1024, checkpointing=True)
    assert smaller.num_params < found.workload.num_params
    need = memory_of(smaller, "zero_offload", found.hardware)
    assert not need.fits(found.hardware)
    assert not found.improvements, "a desktop does not take the memory that 70B needs"


def test_several_devices_are_sharded_without_being_asked_where_whole_weights_do_not_fit():
    for name in ("13B on two 4090", "70B on eight H100", "8B on eight V100"):
        found = answer(name)
        assert found.parallel == "fsdp"
        assert found.recommended.need.num_devices == found.hardware.total_devices
        assert found.other_way is None or not found.other_way.fits
    # Nothing has to be offloaded where each device has a part of AdamW's states.
    chosen = answer("1B on four T4").recommended
    assert chosen.strategy.name == "on_device"
    assert chosen.strategy.parallel == "fsdp"
    assert chosen.worth > answer("1B on four T4").other_way.worth


def test_two_hosts_are_compared_with_one():
    found, one = answer("70B on two hosts"), answer("70B on eight H100")
    counts = [option.need.num_devices for option in found.per_devices]
    assert counts[:2] == [16, 8]
    alone = found.per_devices[1]
    assert alone.label == one.recommended.label
    assert alone.tokens_per_second == pytest.approx(one.recommended.tokens_per_second)
    assert found.recommended.tokens_per_second > 1.5 * alone.tokens_per_second


def test_the_lane_that_waits_is_the_busiest_one():
    slow = answer("13B on two 4090").recommended.prediction
    assert slow.stall_fraction > 0.25
    assert busiest_lane(slow) == "fabric", "cards without a bridge share the host's sockets"
    host = answer("8B on a 4090, 64 GiB").recommended.prediction
    assert busiest_lane(host) == "host"


def test_a_model_of_more_than_the_card_streams_its_layers():
    found = answer("14B on 24 GB")
    assert found.recommended is found.streamed
    assert found.recommended.need.workload.tokens_per_step == found.workload.tokens_per_step


def test_a_small_model_is_told_not_to_offload():
    found = answer("small and fast")
    assert found.recommended.strategy.name == "on_device"
    offloaded = found.option("zenflow")
    assert offloaded.tokens_per_second < found.recommended.tokens_per_second
    assert found.instead == ()


def test_adapters_are_named_where_the_answer_rounds_waits_or_has_fewer_tokens():
    for name in ("7B on a 3090, 64 GiB", "14B on 24 GB", "13B on two 4090"):
        found = answer(name)
        adapters = [o for o in found.instead if o.strategy.name in ("lora", "qlora")]
        assert len(adapters) == 1, name
        assert adapters[0].fits
        assert adapters[0].need.num_devices == 1


@pytest.mark.slow
def test_a_mixture_is_planned_with_all_of_its_experts():
    found = answer(MIXTURE)
    assert found.workload.num_params == 30_532_122_624
    assert found.recommended.need.device_bytes > found.workload.num_params * 2


def test_old_cards_train_in_float16_and_keep_gradients_until_all_are_there():
    for name in ("1B on four T4", "8B on eight V100"):
        chosen = answer(name).recommended
        assert chosen.need.workload.dtype == "float16"
        assert not chosen.strategy.releases
