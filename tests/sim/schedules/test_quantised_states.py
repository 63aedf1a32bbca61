"""AdamW with moments in 8 and 4 bits: bytes by hand and as published, and what an update takes."""

import pytest

from sim.hardware.catalog import find_machine
from sim.memory.need import memory_of
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.schedules.systems.quantised_states import EIGHT_BITS, FOUR_BITS
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from zenflow.errors import ConfigError

GIB = 2**30
MACHINE = find_machine("dgx-a100-80", 1)
LLAMA_7B = Workload.of_config(*find_model("llama-2-7b"))
PARAMS = LLAMA_7B.num_params


def state(name, **options):
    need = memory_of(LLAMA_7B, Strategy.of(name, **options), MACHINE)
    return sum(p.num_bytes for p in need.parts if p.name in ("optimizer state", "masters"))


def test_bytes_of_a_tensor():
    assert EIGHT_BITS.bytes_of(4096) == 2 * (4096 + 4 * 16)
    assert FOUR_BITS.bytes_of(4096) == 2 * (2048 + 4 * 32)
    assert EIGHT_BITS.bytes_of(4097) == 2 * (4097 + 4 * 17)  # a block that is not full
    assert EIGHT_BITS.bytes_of(4095) == FOUR_BITS.bytes_of(4095) == 8 * 4095


def test_states_of_llama_2_7b():
    # All of its tensors have 4096 elements or more, in whole blocks.
    assert state("adamw_8bit") == pytest.approx(PARAMS * (2 + 8 / 256))
    assert state("adamw_4bit") == pytest.approx(PARAMS * (1 + 8 / 128))
    assert state("adamw_8bit", float32_master=True) == pytest.approx(PARAMS * (2 + 8 / 256 + 4))
    table = 32000 * 4096
    more = state("adamw_8bit", float_embeddings=True) - state("adamw_8bit")
    assert more == pytest.approx(table * (8 - 2 - 8 / 256))


def test_savings_are_those_that_torchao_measured():
    """Of torchao/optim/README.md, Llama-2-7B in bfloat16 on an A100; its GB are 2**30 bytes."""
    in_16_bits = 4.0 * PARAMS  # torch's AdamW has moments of the weights' type
    eight, four = state("adamw_8bit"), state("adamw_4bit")
    assert (in_16_bits - eight) / GIB == pytest.approx(51.6 - 39.3, abs=0.2)  # bitsandbytes
    assert (eight - four) / GIB == pytest.approx(39.1 - 33.2, abs=0.2)


def update_seconds(name, **options):
    return simulate(costs_of(LLAMA_7B, MACHINE), Strategy.of(name, **options)).update_seconds


def test_an_update_takes_its_bytes():
    rate = costs_of(LLAMA_7B, MACHINE).elementwise_bandwidth
    step = MACHINE.overheads.step.value
    for name, moments in (("adamw_8bit", 2 + 8 / 256), ("adamw_4bit", 1 + 8 / 128)):
        assert update_seconds(name) == pytest.approx(
            step + PARAMS * (2 + 4 + 2 * moments) / rate, rel=1e-4
        )
        with_master = step + PARAMS * (2 + 10 + 2 * moments) / rate
        assert update_seconds(name, float32_master=True) == pytest.approx(with_master, rel=1e-4)


def test_devices_share_the_states():
    four = find_machine("dgx-a100-80", 4)
    own = {p.name: p.num_bytes for p in memory_of(LLAMA_7B, "adamw_8bit", four).parts}
    assert own["optimizer state"] == pytest.approx(state("adamw_8bit") / 4)


LLAMA_8B = Workload.of_config(
    *find_model("llama-3.1-8b"),
    batch_size=2, sequence=2048, checkpointing=True, kernels="compiled", loss="parts",
)  # fmt: skip
CARD = find_machine("rtx4090-server", 1)


def test_paged_moments_take_the_hosts_memory_and_cross_the_link_twice_a_step():
    own, paged = Strategy.of("adamw_8bit"), Strategy.of("adamw_8bit", paged=True)
    before, after = (memory_of(LLAMA_8B, each, CARD) for each in (own, paged))
    moments = state("adamw_8bit") / PARAMS * LLAMA_8B.num_params
    assert after.host_bytes - before.host_bytes == pytest.approx(moments, rel=1e-3)
    saved = before.allocated_bytes - after.allocated_bytes
    assert saved == pytest.approx(moments, rel=1e-3)
    costs = costs_of(LLAMA_8B, CARD)
    more = simulate(costs, paged).step_seconds - simulate(costs, own).step_seconds
    link = CARD.link
    copies = moments / link.h2d.value + moments / link.d2h.value
    assert more == pytest.approx(copies, rel=1e-3)


def test_gradients_that_are_freed_in_backward_leave_the_largest_alone():
    kept, freed = Strategy.of("adamw_8bit"), Strategy.of("adamw_8bit", in_backward=True)
    before, after = (memory_of(LLAMA_7B, each, MACHINE) for each in (kept, freed))
    assert after.allocated_bytes < before.allocated_bytes - PARAMS
    small = Workload.of_config(*find_model("llama-2-7b"), sequence=512, checkpointing=True)
    held = {p.name: p.num_bytes for p in memory_of(small, freed, MACHINE).parts}
    assert held["gradients"] == 2 * max(parameter.numel for parameter in small.parameters)
    costs = costs_of(LLAMA_7B, MACHINE)
    assert simulate(costs, kept).step_seconds == simulate(costs, freed).step_seconds


@pytest.mark.parametrize(("devices", "accumulation"), [(2, 1), (1, 2)])
def test_updates_in_backward_are_of_one_device_and_one_micro_batch(devices, accumulation):
    work = Workload.of_config(*find_model("llama-2-7b"), accumulation=accumulation)
    costs = costs_of(work, find_machine("dgx-a100-80", devices))
    with pytest.raises(ConfigError, match="in_backward updates by the gradients of one"):
        simulate(costs, Strategy.of("adamw_8bit", in_backward=True))


def test_a_card_of_24_gb_trains_8b_parameters_in_8_bits_as_torchtune_measured():
    """18.9 GiB of an RTX 4090 (pytorch/torchtune, README), of its allocator's blocks."""
    both = Strategy.of("adamw_8bit", paged=True, in_backward=True)
    need = memory_of(LLAMA_8B, both, CARD)
    assert not need.fits(CARD)
    assert need.reserved_bytes / GIB == pytest.approx(18.9, rel=0.15)
    for alone in ({"paged": True}, {"in_backward": True}, {}):
        assert memory_of(LLAMA_8B, Strategy.of("adamw_8bit", **alone), CARD).fits(CARD)
