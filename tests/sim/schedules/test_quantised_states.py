"""AdamW with moments in 8 and 4 bits: bytes by hand and as published, and what an update takes."""

import pytest

from sim.hardware.catalog import find_machine
from sim.memory.need import memory_of
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.schedules.systems.quantised_states import EIGHT_BITS, FOUR_BITS
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of

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
