"""Benchmarks of states on a drive, on runs too small to time anything."""

import multiprocessing
import os

import pytest
import torch

from evidence.benchmarks.drives import infinity, memory
from evidence.benchmarks.drives.cap import MemoryCap
from evidence.benchmarks.drives.small import Rates, Small, slowed_drive
from zenflow.drive import disk

TINY = Small(layers=3, width=256, seconds=0.0)


@pytest.fixture
def cap():
    try:
        made = MemoryCap()
    except OSError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def fill(there):
    there.send("all is imported")
    there.recv()
    memory = bytearray(1 << 26)
    for first in range(0, len(memory), 1 << 12):
        memory[first] = 1
    there.send(len(memory))


@pytest.mark.parametrize(("allowed", "code"), [(1 << 25, -9), (1 << 28, 0)])
def test_a_process_that_takes_more_than_its_cap_is_killed(cap, allowed, code):
    fresh = multiprocessing.get_context("spawn")
    here, there = fresh.Pipe()
    process = fresh.Process(target=fill, args=(there,))
    process.start()
    here.recv()
    cap.take(process.pid)
    cap.limit(cap.used + allowed)
    here.send("begin")
    process.join(60)
    assert process.exitcode == code
    assert (cap.peak >= 1 << 26) == (code == 0)


def test_a_cap_leaves_a_share_of_the_states_and_what_a_gpu_would_hold():
    plan = memory.plan_of(TINY)
    none, half = (memory.allowed(TINY, share) for share in (0.0, 0.5))
    assert half - none == 12 * TINY.num_params // 2
    gradient = 2 * TINY.width**2
    assert none == plan.device_extra_bytes + plan.device_ring_bytes + gradient


def test_the_hosts_plan_fits_into_the_share():
    small = memory.SMALL
    room = memory.SHARE * memory.STATE_BYTES * small.num_params
    assert 0.8 * room < memory.plan_of(small).host_bytes < 0.9 * room


def test_a_slowed_drive_takes_its_time(state_dir):
    import time

    file, _ = disk.open_states(state_dir / "states")
    bytes_ = torch.zeros(1 << 16, dtype=torch.uint8).numpy()
    plain = disk.write
    with slowed_drive(Rates(read=1e12, write=1e6)):
        begun = time.perf_counter()
        disk.write(file, _aligned(bytes_), 0)
        assert time.perf_counter() - begun >= bytes_.nbytes / 1e6
    os.close(file)
    assert disk.write is plain


def _aligned(memory):
    from zenflow.host import memory as host_memory

    whole = host_memory.zeroed(memory.nbytes, torch.uint8, forks=False).numpy()
    whole[:] = memory
    return whole


def test_an_imitation_keeps_the_proportions():
    small, rates = infinity.imitation((7e9, 1.5e9), shorter=10)
    like = infinity.LIKE
    assert 3 * small.layers * small.seconds == pytest.approx(like["compute"] / 10)
    for own, its in ((rates.write, 1.5e9), (rates.read, 7e9), (rates.link, like["link"])):
        assert small.num_params / own == pytest.approx(like["params"] / its / 10)


def test_both_rules_run_and_are_predicted(state_dir):
    small, rates = Small(layers=3, width=256, seconds=0.001), Rates(read=1e9, write=1e9, link=1e9)
    row = infinity.measure(small, rates, state_dir, 1)
    assert row["speed_up"]["count"] == 1
    assert set(row["step_seconds"]) == set(row["predicted"]["step_seconds"])
    text = infinity.table({"a drive": row})
    assert "times as fast" in text
