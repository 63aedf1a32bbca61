"""How many gradients wait on the host changes its memory and traffic, and no bit of the result."""

import copy
import dataclasses
import time
from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.models import (
    TINY,
    GivenGradients,
    OddShapes,
    TinyStack,
    assert_equal,
    closing,
    weights_of,
)
from tests.zenflow.host_work import host_work
from tests.zenflow.step import test_timing as timing
from tests.zenflow.test_reference import run_engine, scenarios
from tests.zenflow.test_resume import Run, config_of, uninterrupted
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.columns.gradient_queue import RoomPool
from zenflow.device.cpu import CpuDevice
from zenflow.lanes.completion import Completion
from zenflow.lanes.copies import CopyLane
from zenflow.lanes.host_worker import HostWorker
from zenflow.lanes.lease import take
from zenflow.rule.sizes import pool_bytes, queue_depth
from zenflow.step.host import exact as exact_tasks
from zenflow.step.host import rules


def runs_of(scenario, mode, depths, dtype=torch.float32):
    for depth in depths:
        config = dataclasses.replace(scenario.config, update_rule="exact", queue_depth=depth)
        yield [*run_engine(dataclasses.replace(scenario, config=config), mode, dtype)]


@settings(max_examples=12, deadline=None)
@given(
    scenario=scenarios(),
    mode=st.sampled_from(["keep", "release"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    depth=st.integers(2, 6),
    room=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_any_depth_and_any_memory_give_the_same_bits(scenario, mode, dtype, depth, room):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "pool_bytes", lambda size, depth: int(room * pool_bytes(size, depth)))
        expected, actual = runs_of(scenario, mode, (1, depth), dtype)
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True), start=1):
        assert_equal(ours, theirs, f"step {step}")


@pytest.mark.parametrize(
    ("depths", "steps"),
    [((1, 4), range(1, 9, 2)), ((4, 1), range(2, 9, 2)), ((3, 2), range(1, 9, 3))],
)
def test_a_run_resumes_bit_for_bit_with_another_depth(depths, steps):
    first, then = (dataclasses.replace(config_of("exact"), queue_depth=q) for q in depths)
    weights, saved = uninterrupted(saves=steps, config=first, mode="release")
    for start in steps:
        with closing(Run(then, "release", seed=7)) as run:
            run.load(saved[start])
            for step in range(start, len(weights)):
                assert_equal(run.step(step), weights[step], f"resumed at {start}, step {step}")


class Watched:
    """How the queues of an optimizer's blocks are used."""

    def __init__(self, monkeypatch):
        self.longest, self.passes, self.forced = 0, 0, 0
        stage, apply = exact_tasks.ExactTasks.stage, exact_tasks.ExactTasks._apply

        def noting_stage(tasks, block):
            waited = len(tasks.queues[block.index])
            self.longest = max(self.longest, waited)
            staged = stage(tasks, block)
            self.forced += len(tasks.queues[block.index]) < waited
            return staged

        def noting_apply(tasks, blocks, step):
            self.passes += len(blocks)
            return apply(tasks, blocks, step)

        monkeypatch.setattr(exact_tasks.ExactTasks, "stage", noting_stage)
        monkeypatch.setattr(exact_tasks.ExactTasks, "_apply", noting_apply)


@pytest.mark.parametrize(("interval", "depth"), [(4, 4), (8, 4), (8, 2), (6, 3), (5, 1)])
def test_memory_is_enough_for_the_depth_in_a_long_run(monkeypatch, interval, depth):
    """No block has to apply its gradients before it has as many as the depth allows."""
    watched = Watched(monkeypatch)
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(12)))
    config = ZenFlowConfig(update_interval=interval, queue_depth=depth, select_interval=0)
    optimizer = ZenFlowAdamW(
        model.parameters(), config=config, offload_gradients="release", max_grad_norm=1.0
    )
    with closing(optimizer):
        for step in range(4 * interval):
            if step == 2 * interval:
                watched.longest = watched.passes = watched.forced = 0
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
        num_blocks = len(optimizer._engine.layout.blocks)
        assert optimizer.memory.queue_depth == depth
    assert watched.forced == 0
    assert watched.longest == depth - 1
    # A window of S gradients takes S / q passes, the last of which ends it.
    assert watched.passes == num_blocks * 2 * (-(-interval // depth) - 1)


def test_a_pool_without_room_lets_blocks_apply_what_waits(monkeypatch):
    watched = Watched(monkeypatch)
    monkeypatch.setattr(rules, "pool_bytes", lambda size, depth: 0)
    timing.train(TinyStack, timing.config_of("S 3"), "release", 12)
    assert watched.forced > 0
    assert watched.longest == 1


def train_matrices(num_steps):
    """Train matrices of a bucket each; return the weights after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(6)))
    optimizer = ZenFlowAdamW(
        model.parameters(),
        config=ZenFlowConfig(update_interval=3),
        offload_gradients="release",
        max_grad_norm=1.0,
    )
    weights = []
    with closing(optimizer):
        for step in range(num_steps):
            x = torch.randn(4, 300, generator=torch.Generator().manual_seed(step))
            (model(x) - x).square().mean().backward()
            optimizer.step()
            weights.append(weights_of(model))
    return weights


def test_a_room_is_not_written_while_a_late_pass_still_reads_it(monkeypatch):
    expected = train_matrices(10)
    for owner, name in host_work("catch_up"):
        original = getattr(owner, name)

        def late(*args, original=original):
            time.sleep(0.05)  # by then the next step's copies are on their way
            return original(*args)

        monkeypatch.setattr(owner, name, late)
    for step, (ours, theirs) in enumerate(zip(train_matrices(10), expected, strict=True), start=1):
        assert_equal(ours, theirs, f"step {step}")


DEVICE = CpuDevice(torch.device("cpu"))


STATES = pytest.mark.parametrize("host_state", ["float32", "compact"])


def waiting_run(shapes, host_state):
    """Return a model whose gradients wait on the host, and its optimizer."""
    model = GivenGradients(shapes)
    config = ZenFlowConfig(
        topk_ratio=0.0, update_interval=4, queue_depth=4, min_split_elements=1, block_elements=256,
        host_state=host_state,
    )  # fmt: skip
    options = {"offload_gradients": "release", "max_grad_norm": 1.0}
    return model, ZenFlowAdamW(model.parameters(), config=config, **options)


def break_off(max_norm):
    raise ZeroDivisionError


def assert_all_free(optimizer):
    optimizer.state_dict()  # what waits is applied
    rooms = optimizer._engine.schedule.tasks.rooms
    free = sum(gap[-1].last - gap[0].first for gap in rooms._gaps)
    assert free == rooms.num_bytes > 0


@STATES
def test_batches_that_are_dropped_leave_no_room_taken(host_state):
    model, optimizer = waiting_run([(16, 64)], host_state)
    with closing(optimizer):
        for step in range(12):
            model.backward(model.draw_gradients(step))
            optimizer.step()
            model.backward(model.draw_gradients(100 + step))
            optimizer.zero_grad()
        assert_all_free(optimizer)


@STATES
def test_gradients_that_are_missing_leave_no_room_taken(host_state):
    model, optimizer = waiting_run([(16, 64), (16, 32), (8, 40)], host_state)
    with closing(optimizer):
        for step in range(14):
            model.backward(model.draw_gradients(step, absent=0.4))
            optimizer.step()
        assert_all_free(optimizer)


@STATES
def test_a_step_that_was_broken_off_leaves_no_room_taken_once_a_state_is_loaded(
    host_state, monkeypatch
):
    model, optimizer = waiting_run([(16, 64)], host_state)
    with closing(optimizer):
        state = copy.deepcopy(optimizer.state_dict())
        for step in range(3):
            model.backward(model.draw_gradients(step))
            with monkeypatch.context() as patch:
                if step == 2:
                    patch.setattr(optimizer._engine, "finish_step", break_off)
                    with pytest.raises(ZeroDivisionError):
                        optimizer.step()
                else:
                    optimizer.step()
        optimizer.load_state_dict(state)
        assert_all_free(optimizer)


@STATES
def test_a_first_gradient_does_not_wait_for_all_of_the_host_s_work(host_state, monkeypatch):
    """Backward and the host go through the layers in one order, the one behind the other."""
    done, queued, left = [], Counter(), {}
    submit_work, submit_copy = HostWorker.submit, CopyLane.submit

    def slow_work(self, name, parts, *, step, **named):
        queued[step] += len(parts)
        submit_work(self, name, [slow(part, done) for part in parts], step=step, **named)

    def noted_copy(self, copy):
        def run():
            before = sum(queued[step] for step in queued if step < copy.step)
            left.setdefault(copy.step, before - len(done))
            return copy.run()

        submit_copy(self, dataclasses.replace(copy, run=run))

    monkeypatch.setattr(HostWorker, "submit", slow_work)
    model = GivenGradients([(256, 256)] * 16)
    config = ZenFlowConfig(
        topk_ratio=0.0, update_interval=4, queue_depth=2, min_split_elements=1,
        host_state=host_state,
    )  # fmt: skip
    options = {"offload_gradients": "release", "max_grad_norm": 1.0, "host_threads": 1}
    with closing(ZenFlowAdamW(model.parameters(), config=config, **options)) as optimizer:
        lane = optimizer._engine.d2h
        monkeypatch.setattr(lane, "submit", partial(noted_copy, lane))
        for step in range(12):
            model.backward(model.draw_gradients(step))
            optimizer.step()
    for step in range(8, 13):
        assert left[step] > 0, f"parts left of step {step - 1}, of {queued[step - 1]}"


def slow(part, done):
    """Return a part of the host's work that takes its time, and is noted when it ends."""

    def run():
        time.sleep(0.02)  # a busy machine's threads come late by less than all of them
        part()
        done.append(part)

    return run


@settings(max_examples=40, deadline=None)
@given(
    calls=st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=40),
    size=st.integers(0, 60),
)
def test_rooms_never_overlap_and_tell_what_still_uses_their_bytes_and_no_others(calls, size):
    pool, like = RoomPool(DEVICE, 64 * size), torch.empty(0, dtype=torch.bfloat16)
    live, users = [], [set() for _ in range(64 * size)]  # of each byte
    for takes, number in calls:
        taken = pool.take((number, 8), like) if takes else None
        if takes and taken is not None:
            values, room = taken
            assert values.shape == (number, 8)
            assert 0 <= room.first < room.last <= 64 * size
            assert all(room.last <= r.first or r.last <= room.first for r in live)
            assert set(room.lease.users) == set().union(*users[room.first : room.last])
            live.append(room)
        elif not takes and live:
            room, user = live.pop(number % len(live)), Completion("a reader")
            take(user, reads=[room.lease])
            users[room.first : room.last] = [set(room.lease.users)] * (room.last - room.first)
            pool.give(room)
    for room in live:
        pool.give(room)
    whole = pool.take((size * 4, 8), like)
    assert whole is not None or size == 0


def test_the_depth_follows_the_memory_and_never_passes_the_window():
    assert queue_depth(None, 1, 100.0) == 1
    assert queue_depth(None, 64, 100.0) == 4
    assert [queue_depth(None, 8, spare) for spare in (0.5, 0.53, 1.04, 1.06, 1.58)] == [
        1,
        2,
        2,
        3,
        4,
    ]
    assert queue_depth(7, 8, 0.0) == 7
    assert queue_depth(9, 8, 0.0) == 8


def test_a_host_without_memory_to_spare_lets_no_gradient_wait(monkeypatch):
    plans = []
    for free in (0.0, 1e12):
        monkeypatch.setattr(rules, "free_bytes", lambda free=free: (free, "a test"))
        config = ZenFlowConfig(**TINY)
        with closing(ZenFlowAdamW(OddShapes().parameters(), config=config)) as optimizer:
            plans.append(optimizer.memory)
        config = dataclasses.replace(config, host_state="compact")
        with closing(ZenFlowAdamW(OddShapes().parameters(), config=config)) as optimizer:
            assert optimizer.memory.queue_depth == 4, "where it is a part of the result"
    assert [plan.queue_depth for plan in plans] == [1, 4]
    assert plans[0].host_bytes < plans[1].host_bytes


@pytest.mark.parametrize("rule", ["exact", "published"])
@pytest.mark.parametrize("mode", ["keep", "release"])
def test_once_all_work_has_ended_no_memory_lists_any_user(mode, rule):
    """Lists that kept what has ended would grow from step to step."""
    model, config = TinyStack(), dataclasses.replace(timing.config_of("S 3"), update_rule=rule)
    settings = {"config": config, "offload_gradients": mode}
    with closing(ZenFlowAdamW(model.parameters(), **settings)) as optimizer:
        for step in range(12):
            model.loss(step).backward()
            optimizer.step()
        optimizer.synchronize()
        engine = optimizer._engine
        assert engine.schedule.tasks.users_of(engine.layout.blocks) == []
        assert [buffer.users for buffer in engine.uploads._buffers] == [[]]
