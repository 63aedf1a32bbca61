"""Layers that stay on the device where steps have shown it to have room."""

import pytest
import torch

from tests.zenflow.streaming.test_equality import drawn
from tests.zenflow.streaming.test_usage import take_steps
from tests.zenflow.streaming.training import LEAST, Case, train
from zenflow import stream_weights
from zenflow.device.cpu import CpuDevice
from zenflow.streaming.stream import FILLED

CASE = Case()


@pytest.fixture
def used(monkeypatch):
    """Return the device's memory: most bytes that tensors have had, and those they may have."""
    use = {"most": 5000, "limit": 10**9}
    monkeypatch.setattr(CpuDevice, "memory_use", lambda _: (use["most"], use["limit"]))
    return use


def room_for(pages, page, most):
    return int((most + (pages + 0.5) * page.num_bytes) / FILLED) + 1


def test_as_many_layers_stay_as_there_is_room_for(used):
    case = Case(config={"topk_ratio": 0.0})
    model, plain = case.model(), case.model()
    stream = stream_weights(model, "cpu", slots=2, **LEAST)
    optimizer, other = case.optimizer(model), case.optimizer(plain)
    page = stream.pages[0]
    bytes_of_page = sum(p.nbytes for p in page.params)

    def steps(count, first):
        take_steps(model, optimizer, range(first, first + count))
        take_steps(plain, other, range(first, first + count))
        return optimizer.report

    used["limit"] = room_for(2, page, used["most"])
    steps(4, 0)
    report = steps(1, 4)
    assert [p.index for p in stream.pages if p.stays] == [1, 3]
    assert stream.most_here == 2
    assert report.weights_d2h_bytes == 3 * bytes_of_page
    assert report.weights_h2d_bytes <= 2 * bytes_of_page
    used["most"] += 3 * page.num_bytes  # with the two that stay: one page more than before
    steps(2, 5)
    assert [p.index for p in stream.pages if p.stays] == [2]
    used["most"] += 10 * page.num_bytes
    report = steps(3, 7)
    assert not any(p.stays for p in stream.pages)
    assert report.weights_d2h_bytes == 5 * bytes_of_page
    for its in (optimizer, other):
        its.close()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    stream.close()


@pytest.mark.parametrize("resident", [0, 2])
def test_no_other_layer_stays_where_a_number_is_given(used, resident):
    model = CASE.model()
    stream = stream_weights(model, "cpu", resident_layers=resident, slots=2, **LEAST)
    optimizer = CASE.optimizer(model)
    take_steps(model, optimizer, range(4))
    assert not any(page.stays for page in stream.pages)
    optimizer.close()
    stream.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_trainings_in_which_layers_stay(used, seed):
    case, streamed = drawn(seed)
    streamed["resident_layers"] = None
    used["most"], used["limit"] = 0, int(3000 * (2 + seed))
    outcome = train(case, streamed)
    assert outcome.differs_from(train(case)) == []
