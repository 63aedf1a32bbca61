"""A shared controller's decisions come into force a step after they are taken, and repeat."""

from dataclasses import replace

import pytest
import torch

from tests.models import TINY, TinyStack, assert_equal, closing, weights_of
from zenflow import (
    AbstractController,
    CheckpointError,
    Knobs,
    LoggedDecisions,
    SharedController,
    ZenFlowAdamW,
    ZenFlowConfig,
)

CONFIG = ZenFlowConfig(**{**TINY, "topk_ratio": 0.3, "update_interval": 2})


class Restless(AbstractController):
    """Another S at every call, and notes of what it was told."""

    follows_clock = True
    largest_interval = 8
    least_topk_ratio = 0.1
    timeline_steps = 5

    def __init__(self):
        self.decided = []
        self.seen = []

    @property
    def looks_at_windows(self):
        return len(self.decided) % 2 == 0

    def next_knobs(self, step, report, knobs):
        self.seen.append((step, report.step, knobs))
        ratio = 0.1 + 0.1 * (step % 4)
        new = replace(knobs, update_interval=1 + len(self.decided) % 5, topk_ratio=ratio)
        self.decided.append((step, new))
        return new

    def state_dict(self):
        return {"count": len(self.decided)}

    def load_state_dict(self, state):
        self.decided = [(0, None)] * state["count"]


def made(controller):
    torch.manual_seed(0)
    model = TinyStack(width=8)
    return model, ZenFlowAdamW(
        model.parameters(), lr=1e-2, config=CONFIG, controller=controller, host_threads=1
    )


def take_steps(model, optimizer, steps):
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        optimizer.step()


def test_what_is_decided_is_carried_out_a_step_later_and_repeats_the_run():
    inner = Restless()
    model, optimizer = made(SharedController(inner))
    with closing(optimizer):
        take_steps(model, optimizer, range(12))
        log = optimizer.decision_log
        weights = weights_of(model)
    assert log == inner.decided[: len(log)]  # the controller knows after which step
    assert [step for step, _ in log] == list(range(2, 13))
    first = Knobs.of(CONFIG)
    assert inner.seen == [
        (step + 1, step, knobs)
        for step, knobs in zip(range(1, 13), [first, *(new for _, new in log)], strict=True)
    ]
    repeated = LoggedDecisions(log, largest_interval=inner.largest_interval)
    model, optimizer = made(repeated)
    with closing(optimizer):
        take_steps(model, optimizer, range(12))
        assert_equal(weights_of(model), weights)


def test_a_resumed_run_carries_out_the_decision_to_come():
    model, optimizer = made(SharedController(Restless()))
    with closing(optimizer):
        take_steps(model, optimizer, range(5))
        saved = optimizer.state_dict()
        again, resumed = made(SharedController(Restless()))
        with closing(resumed):
            again.load_state_dict(model.state_dict())
            resumed.load_state_dict(saved)
            for one, its in ((model, optimizer), (again, resumed)):
                take_steps(one, its, range(5, 10))
            assert resumed.decision_log == optimizer.decision_log
            assert_equal(weights_of(again), weights_of(model))


def test_a_controller_that_was_not_shared_goes_on_as_a_shared_one():
    inner = Restless()
    shared = SharedController(inner)
    shared.load_state_dict({"count": 3})
    assert len(inner.decided) == 3
    with pytest.raises(CheckpointError, match="lacks 'decided'"):
        shared.load_state_dict({"shared": {"count": 3}})


def test_nothing_is_decided_for_steps_that_will_not_be():
    inner = Restless()
    model, optimizer = made(SharedController(inner, last_step=4))
    with closing(optimizer):
        take_steps(model, optimizer, range(4))
        assert [step for step, _ in inner.decided] == [2, 3, 4]
        assert optimizer.decision_log == inner.decided


def test_the_optimizer_goes_by_what_the_controller_asks_for():
    shared = SharedController(Restless())
    assert (shared.largest_interval, shared.least_topk_ratio, shared.timeline_steps) == (8, 0.1, 5)
    assert shared.looks_at_windows
    assert not shared.follows_clock
