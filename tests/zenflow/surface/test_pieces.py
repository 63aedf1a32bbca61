"""True weights come and go in pieces: a card that training fills has no room for matrices."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models import assert_equal, closing, weights_of
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device.cpu import CpuDevice
from zenflow.rule import sizes

MOST = 1 << 14


class Largest(TorchDispatchMode):
    """Counts the bytes of the largest tensor that operations make, views aside."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        there = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs or {})) if _is(t)}
        for tensor in filter(_is, tree_leaves(made)):
            if tensor.untyped_storage()._cdata not in there:
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return made


def _is(leaf):
    return isinstance(leaf, torch.Tensor)


def trained(dtype, host_state, steps=5, block_elements=4_000):
    """Return a model with a large matrix, one that stays on the device, and its optimizer."""
    torch.manual_seed(0)
    model = nn.ParameterList(
        [nn.Parameter(torch.randn(96, 900)), nn.Parameter(torch.randn(90, 90))]
    )
    model = model.to(dtype)
    config = ZenFlowConfig(
        topk_ratio=0.3,
        min_split_elements=10_000,
        block_elements=block_elements,
        host_state=host_state,
    )
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)
    for _ in range(steps):
        sum((param * torch.randn_like(param)).sum() for param in model).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("host_state", ["float32", "compact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_is_as_large_as_a_matrix(monkeypatch, dtype, host_state):
    monkeypatch.setattr(sizes, "PASSING_BYTES", MOST)
    model, optimizer = trained(dtype, host_state)
    assert all(param.nbytes > 0.9 * MOST for param in model)
    with closing(optimizer), Largest() as largest:
        optimizer.eval()
        optimizer.train()
        optimizer.eval()
        optimizer.adopt_weights()
    # Masters are up to twice as wide as weights, and a CPU packs the columns between, too.
    assert 0 < largest.num_bytes <= 3 * MOST < model[0].nbytes


@pytest.mark.parametrize("host_state", ["float32", "compact"])
def test_pieces_change_no_bit(monkeypatch, host_state):
    seen = []
    for most in (sizes.PASSING_BYTES, MOST, 1):
        monkeypatch.setattr(sizes, "PASSING_BYTES", most)
        model, optimizer = trained(torch.bfloat16, host_state)
        with closing(optimizer):
            training = weights_of(model)
            optimizer.eval()
            true = weights_of(model)
            optimizer.train()
            assert_equal(weights_of(model), training)
            optimizer.eval()
            optimizer.adopt_weights()
            assert_equal(weights_of(model), true)
        seen.append([*training, *true])
    assert_equal(seen[1], seen[0])
    assert_equal(seen[2], seen[0])


def test_updates_land_in_pieces(monkeypatch):
    landed, unpack = [], CpuDevice.unpack

    def watched(self, arrivals, *rest):
        landed.extend(arrival.values.nbytes for arrival in arrivals)
        return unpack(self, arrivals, *rest)

    monkeypatch.setattr(CpuDevice, "unpack", watched)
    seen = []
    for most in (sizes.PASSING_BYTES, MOST):
        monkeypatch.setattr(sizes, "PASSING_BYTES", most)
        landed.clear()
        model, optimizer = trained(torch.bfloat16, "float32", 9, block_elements=40_000)
        with closing(optimizer):
            seen.append((weights_of(model), max(landed)))
    (whole, largest), (in_pieces, least) = seen
    assert least <= MOST < largest
    assert_equal(in_pieces, whole)
