"""An emulated link carries copies as the simulator's link does: those under way share equally."""

import threading
import time

import pytest
import simpy

from sim.fluid import FlowKind, FluidNetwork, Resource
from zenflow.lanes.copies import PacedDirection

RATE = 1000.0

CASES = {
    "alone": [(0.0, 100)],
    "one behind the other": [(0.0, 50), (0.1, 50)],
    "two from the start": [(0.0, 50), (0.0, 150)],
    "one joins, and one more": [(0.0, 150), (0.05, 40), (0.11, 30)],
    "nothing to carry": [(0.0, 100), (0.02, 0)],
}


def ends(copies):
    """Return the simulated end of each copy of (begin, bytes)."""
    env, link, found = simpy.Environment(), Resource("link", RATE), {}
    network = FluidNetwork(env)

    def begin(index, after, size):
        yield env.timeout(after)
        network.send(FlowKind("copy", {link: 1.0}), size, lambda: found.update({index: env.now}))

    for index, (after, size) in enumerate(copies):
        env.process(begin(index, after, size))
    env.run()
    return [found[index] for index in range(len(copies))]


def measured(copies):
    direction, found, started = PacedDirection(RATE), {}, time.perf_counter() + 0.02

    def carry(index, after, size):
        time.sleep(max(0.0, started + after - time.perf_counter()))
        with direction.carrying(size):
            pass
        found[index] = time.perf_counter() - started

    threads = [
        threading.Thread(target=carry, args=(index, *copy)) for index, copy in enumerate(copies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(copies))]


@pytest.mark.parametrize("name", CASES)
def test_copies_end_when_a_fair_link_would_end_them(name):
    expected = ends(CASES[name])
    alone = [after + size / RATE for after, size in CASES[name]]
    for _ in range(4):  # a busy machine wakes threads late, and leaves the link to the others
        found = measured(CASES[name])
        assert all(end > least - 1e-3 for end, least in zip(found, alone, strict=True))
        if found == pytest.approx(expected, abs=0.01):
            return
    pytest.fail(f"copies end at {found}, a fair link ends them at {expected}")


def seconds(direction, size, work=0.0):
    started = time.perf_counter()
    with direction.carrying(size):
        time.sleep(work)
    return time.perf_counter() - started


def test_a_copys_own_work_is_part_of_its_time():
    direction = PacedDirection(RATE)
    fastest = min(seconds(direction, 60, work=0.04) for _ in range(4))
    assert 0.06 <= fastest < 0.09


def test_a_copy_that_fails_holds_nobody_up():
    def taken():
        direction = PacedDirection(RATE)
        with pytest.raises(RuntimeError, match="broken"), direction.carrying(10):
            raise RuntimeError("broken")
        time.sleep(0.02)
        return seconds(direction, 20)

    assert min(taken() for _ in range(4)) < 0.04
