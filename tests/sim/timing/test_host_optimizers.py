"""AdamW of frameworks on the host: its bytes, its arithmetic, and the pages of its temporaries."""

from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine
from sim.machine import Machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from sim.timing.host_optimizers import (
    CLIP_BYTES,
    HOST_OPTIMIZERS,
    KEPT_BYTES,
    fresh_bytes,
    optimizer_works,
)
from zenflow.errors import ConfigError

NAMES = ("fused", "foreach", "loop")


def costs(devices=1, model="llama-3.2-1b", machine="dgx-a100-80"):
    named = find_model(model)
    workload = Workload.of_config(*named, batch_size=1, sequence=512, dtype="float16")
    return costs_of(workload, find_machine(machine, devices))


def seconds(found, name, width=4, threads=None, **options):
    """Return the seconds of the host's works, which nothing competes with."""
    machine = Machine(replace(found.hardware, host_threads=threads))
    for work_name, work in optimizer_works(machine, found, name, width, **options):
        machine.env.run(machine.host.submit(work_name, 1, work))
    return machine.env.now


def matrices(found):
    return [rows * columns for segment in found.segments for rows, columns in segment.matrices]


def test_pages_are_new_for_large_temporaries_of_a_loop_alone():
    found = costs()
    large = sum(size for size in matrices(found) if 4 * size > KEPT_BYTES)
    assert 0 < large < found.num_params
    assert fresh_bytes(found, "loop", 1, 4) == pytest.approx(8 * large)
    # In 16 bits fewer are large, and each is half as large.
    narrow = sum(size for size in matrices(found) if 2 * size > KEPT_BYTES)
    assert fresh_bytes(found, "loop", 1, 2) == pytest.approx(4 * narrow)
    # A part of a matrix is kept where it is small; a list has all roots at once.
    assert fresh_bytes(found, "loop", 64, 4) == 0
    assert fresh_bytes(found, "foreach", 64, 4) == pytest.approx(4 * found.num_params / 64)
    assert fresh_bytes(found, "fused", 1, 4) == 0


@pytest.mark.parametrize(("threads", "at_once"), [(1, 1), (2, 2), (64, 4)])
def test_fresh_pages_take_a_few_threads_of_a_process(threads, at_once):
    hardware = replace(find_machine("dgx-a100-80", 1), host_threads=threads)
    machine = Machine(hardware)
    machine.env.run(machine.host.submit("pages", 1, machine.fresh_pages(1e9)))
    rate = at_once * hardware.host.page_bandwidth.value
    assert machine.env.now == pytest.approx(1e9 / rate)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("devices", [1, 8])
def test_a_kernel_is_faster_than_torch_operations(devices, width):
    found = costs(devices)
    fused, foreach, loop = (seconds(found, name, width) for name in NAMES)
    assert 2 * fused < foreach
    assert 2 * fused < loop


@pytest.mark.parametrize("name", NAMES)
def test_more_threads_are_never_slower(name):
    found = costs()
    taken = [seconds(found, name, threads=threads) for threads in (1, 2, 4, 8, 16, 32)]
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > 3 * taken[-1]


def test_a_loop_is_slower_than_its_bytes_say_by_what_others_have_measured():
    # Two Xeon 8168, 1 billion parameters: 1.39 s by PyTorch, 14.76 s for ten (ZeRO-Offload,
    # table 4). The share of them that pages take is from the second.
    found = costs(machine="dgx-2", model="gpt2-xl")
    unbound = replace(found, hardware=replace(found.hardware, binds_cores=False))
    measured = 1.39 * found.num_params / 1e9
    assert seconds(unbound, "loop") == pytest.approx(measured, rel=0.2)


def test_clipping_is_a_pass_of_its_own():
    found = costs()
    more = seconds(found, "fused", clips=True) - seconds(found, "fused")
    moved = HOST_OPTIMIZERS["fused"].moved
    task = found.hardware.overheads.host_task.value
    assert more - task == pytest.approx(
        (seconds(found, "fused") - task) * CLIP_BYTES / moved, rel=1e-6
    )
    steps = [
        simulate(found, Strategy.of("fsdp2_offload", clipping=clips)).step_seconds
        for clips in (False, True)
    ]
    assert steps[1] - steps[0] == pytest.approx(more, rel=1e-6)


def test_an_implementation_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="optimizer"):
        fresh_bytes(costs(), "compiled", 1, 4)
