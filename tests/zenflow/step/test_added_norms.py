"""Norms that ranks add up behind backward: when they are waited for, and that they always are."""

import pytest
import torch

from tests.models import assert_equal, closing, weights_of
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.columns.shards import Shards
from zenflow.step.gradients.collector import GradientCollector

BUCKETS = 3


class Work:
    """A sum on its way, which notes that it is waited for."""

    def __init__(self, events, number):
        self._events, self._number = events, number

    def wait(self):
        self._events.append(f"wait {self._number}")


@pytest.fixture
def events(monkeypatch):
    """Return what happens, in order, where sums of several ranks are played by one."""
    found = []
    measure = GradientCollector._measure

    def begin(shards, values):
        number = sum(event.startswith("begin") for event in found)
        found.append(f"begin {number}")
        return Work(found, number)

    def measured(collector, step, waiting):
        found.append("measure")
        measure(collector, step, waiting)

    monkeypatch.setattr(Shards, "begin_adding", begin)
    monkeypatch.setattr(GradientCollector, "_measure", measured)
    return found


def made():
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(BUCKETS)))
    config = ZenFlowConfig(min_split_elements=1, topk_ratio=0.25, select_interval=1000)
    return model, ZenFlowAdamW(
        model.parameters(), config=config, offload_gradients="release", max_grad_norm=None
    )


def backward(model):
    model(torch.ones(2, 256)).square().sum().backward()


def test_backward_goes_on_while_norms_are_added_up(events):
    model, optimizer = made()
    with closing(optimizer):
        assert len(optimizer._engine.layout.buckets) == BUCKETS
        backward(model)
        assert events == [
            "measure", "begin 0",
            "measure", "wait 0", "begin 1",
            "measure", "wait 1", "begin 2",
        ]  # fmt: skip
        optimizer.step()
        assert [event for event in events[8:] if event != "measure"] == ["wait 2"]


def test_norms_of_a_step_that_is_dropped_are_waited_for(events):
    """They are written to where the next step's will be."""
    model, optimizer = made()
    with closing(optimizer):
        backward(model)
        optimizer.zero_grad()
        assert events[-1] == "wait 2"


def test_a_batch_that_is_dropped_leaves_the_true_weights_in_every_full_bucket(events):
    """In the last one too, whose norms may still be on their way."""
    model, optimizer = made()
    with closing(optimizer):
        for _ in range(6):
            backward(model)
            optimizer.step()
        for _ in range(2):
            backward(model)
            optimizer.zero_grad()
            left = weights_of(model)
            with optimizer.true_weights():
                assert_equal(left, weights_of(model))


def test_an_optimizer_that_has_failed_waits_for_no_other_rank(events):
    model, optimizer = made()
    with closing(optimizer):
        backward(model)
        optimizer._source.abandon()
        assert events[-1] == "begin 2"
