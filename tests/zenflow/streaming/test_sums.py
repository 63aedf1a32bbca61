"""Sums of micro-batches' gradients that wait on the host: the same bits, in less memory."""

from dataclasses import replace

import pytest
import torch
from torch import distributed

from tests.zenflow.streaming.test_equality import CASES, drawn
from tests.zenflow.streaming.training import Case, train
from zenflow import PacedLink, ZenFlowAdamW
from zenflow.columns.layout import SplitParam
from zenflow.step.gradients.released import ReleasedGradient
from zenflow.surface import gradient_sums

ACCUMULATED = [name for name, case in CASES.items() if case.accumulation > 1]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("streamed", [None, {"slots": 2, "resident_layers": 2}], ids=str)
@pytest.mark.parametrize("name", ACCUMULATED)
def test_a_kind_of_training(name, streamed):
    assert train(CASES[name], streamed, offload_sums=True).differs_from(train(CASES[name])) == []


@pytest.mark.parametrize(
    "seed", [*range(300, 304), *(pytest.param(s, marks=pytest.mark.slow) for s in range(304, 400))]
)
def test_random_trainings(seed):
    case, streamed = drawn(seed)
    case = replace(case, accumulation=2 + seed % 2, drops={})
    for where in (None, streamed):
        assert train(case, where, offload_sums=True).differs_from(train(case)) == []


def test_a_slow_link_and_a_short_way_ahead(monkeypatch):
    case = Case(accumulation=3)
    for ahead in (1, 3000):
        monkeypatch.setattr(gradient_sums, "SUMS_AHEAD_BYTES", ahead)
        link = PacedLink(2e7, 2e7)
        assert train(case, offload_sums=True, link=link).differs_from(train(case)) == []


@pytest.fixture
def sums():
    """Return a model and an optimizer of three micro-batches, whose sums go home."""
    case = Case(accumulation=3, config={"topk_ratio": 0.0})
    model = case.model()
    optimizer = case.optimizer(model, offload_sums=True)
    yield model, optimizer
    optimizer.close()


def test_no_sum_stays_on_the_device(sums):
    model, optimizer = sums
    split = [p.param for p in optimizer._source._places if isinstance(p, SplitParam)]
    num_bytes = sum(param.nbytes for param in split)
    for step in range(3):
        for micro in range(2):
            model.loss(step, micro).backward()
            assert all(isinstance(param.grad, ReleasedGradient) for param in split)
        model.loss(step, 2).backward()
        optimizer.step()
        report = optimizer.report
        assert report.weights_d2h_bytes == report.weights_h2d_bytes == 2 * num_bytes
    assert optimizer.memory.home_bytes == num_bytes


def test_few_sums_are_on_their_way_at_a_time(sums, monkeypatch):
    model, optimizer = sums
    largest = max(param.nbytes for param in model.parameters())
    most, on_their_way = largest + 1, []
    monkeypatch.setattr(gradient_sums, "SUMS_AHEAD_BYTES", most)
    found, fetch = optimizer._source.sums, gradient_sums.GradientSums._fetch

    def watched(self, split):
        result = fetch(self, split)
        on_their_way.append(self._coming_bytes)
        return result

    monkeypatch.setattr(gradient_sums.GradientSums, "_fetch", watched)
    for micro in range(3):
        model.loss(0, micro).backward()
    assert largest < max(on_their_way) < most + 2 * largest
    assert found._coming_bytes == 0


def test_a_batch_is_dropped_in_the_middle(sums):
    model, optimizer = sums
    case = Case(accumulation=3, config={"topk_ratio": 0.0})
    plain = case.model()
    other = case.optimizer(plain)
    for each, its in ((model, optimizer), (plain, other)):
        each.loss(0, 0).backward()
        each.loss(0, 1).backward()
        its.zero_grad()
        for micro in range(3):
            each.loss(1, micro).backward()
        its.step()
        for param in each.parameters():
            assert param.grad is None
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    other.close()


def test_keep_mode_is_refused():
    with pytest.raises(ValueError, match="offload_sums is for release mode"):
        ZenFlowAdamW(torch.nn.Linear(64, 64).parameters(), offload_sums=True)


def test_ranks_are_refused():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="offload_sums is for one process"):
            ZenFlowAdamW(
                torch.nn.Linear(64, 64).parameters(),
                offload_gradients="release",
                offload_sums=True,
                process_group=distributed.group.WORLD,
            )
    finally:
        distributed.destroy_process_group()
