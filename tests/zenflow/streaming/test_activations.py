"""Layers' inputs that wait on the host: the same bits, and little left on the device."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.zenflow.streaming.training import LEAST, Case, train
from zenflow import stream_weights
from zenflow.streaming.activations import LayerInputs


@pytest.mark.parametrize("recomputes", ["non-reentrant", "reentrant", None])
@pytest.mark.parametrize("changes", [{}, {"accumulation": 2}, {"dtype": torch.bfloat16}], ids=str)
def test_training_has_the_same_bits(recomputes, changes):
    case = Case(recomputes=recomputes, **changes)
    streamed = train(case, {"slots": 2, "offload_activations": True})
    assert streamed.differs_from(train(case)) == []


class Chain(nn.Module):
    """Checkpointed layers, one after another, which note the tensors that autograd keeps."""

    def __init__(self, layers=6, size=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        self.between = lambda hidden: hidden

    def forward(self, hidden, **kwargs):
        for layer in self.layers:
            hidden = self.between(checkpoint(layer, hidden, use_reentrant=False))
        return hidden


@pytest.fixture
def inputs(monkeypatch):
    made = []
    old = LayerInputs.__init__

    def init(self, transfers):
        old(self, transfers)
        made.append(self)

    monkeypatch.setattr(LayerInputs, "__init__", init)
    return made


def chain(**changes):
    torch.manual_seed(0)
    model = Chain(**changes)
    stream = stream_weights(
        model, "cpu", resident_layers=len(model.layers), offload_activations=True, **LEAST
    )
    return model, stream


def plain_gradients(length):
    torch.manual_seed(0)
    model = Chain()
    model(torch.ones(length, 8)).square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_all_inputs_but_the_first_and_the_last_go(inputs):
    model, stream = chain()
    model(torch.ones(3, 8)).square().sum().backward()
    assert inputs[0].num_sent == 4
    assert stream.transfers.down_bytes == stream.transfers.up_bytes == 4 * 3 * 8 * 4
    assert all(map(torch.equal, [p.grad for p in model.parameters()], plain_gradients(3)))
    stream.close()


def test_memory_is_used_again_and_grows_with_the_longest(inputs):
    model, stream = chain()
    for length in (3, 2, 5, 4, 5):
        model.zero_grad()
        model(torch.ones(length, 8)).square().sum().backward()
        assert all(map(torch.equal, [p.grad for p in model.parameters()], plain_gradients(length)))
    sizes = [buffer.slab.nbytes for buffer in inputs[0]._buffers._free]
    assert sizes == [5 * 8 * 4] * 4
    stream.close()


def test_two_forwards_may_come_before_their_backwards(inputs):
    model, stream = chain()
    first, second = (model(torch.full((2, 8), x)).square().sum() for x in (1.0, 2.0))
    (first + 3 * second).backward()
    torch.manual_seed(0)
    plain = Chain()
    first, second = (plain(torch.full((2, 8), x)).square().sum() for x in (1.0, 2.0))
    (first + 3 * second).backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
    assert inputs[0].num_sent == 8
    stream.close()


def test_a_graph_may_be_used_again_or_thrown_away(inputs):
    model, stream = chain()
    model(torch.ones(3, 8))
    loss = model(torch.ones(3, 8)).square().sum()
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert all(map(torch.equal, [p.grad for p in model.parameters()], plain_gradients(3)))
    del loss
    assert len(inputs[0]._buffers._free) == 4
    stream.close()


def test_a_forward_that_fails_or_needs_no_gradient_leaves_nothing(inputs):
    model, stream = chain()
    with torch.no_grad():
        model(torch.ones(3, 8))
    assert inputs[0].num_sent == 0
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(3, 7))
    weight = torch.ones(3, requires_grad=True)
    (weight * weight).sum().backward()  # outside of the model nothing is kept elsewhere
    model(torch.ones(3, 8)).square().sum().backward()
    assert all(map(torch.equal, [p.grad for p in model.parameters()], plain_gradients(3)))
    stream.close()


def test_a_model_that_changes_inputs_in_place_is_refused():
    model, stream = chain()
    model.between = lambda hidden: hidden.mul_(2)

    class Halving(nn.Linear):
        def forward(self, hidden):
            result = super().forward(hidden)
            with torch.no_grad():
                hidden.mul_(0.5)
            return result

    for layer in model.layers:
        layer.__class__ = Halving
    with pytest.raises(RuntimeError, match="changed in place"):
        model(torch.ones(3, 8, requires_grad=True) * 1.0)
    stream.close()
