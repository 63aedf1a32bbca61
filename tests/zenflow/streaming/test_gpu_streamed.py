"""Streamed weights on a GPU: the same bits, and no more memory step by step."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zenflow import ZenFlowAdamW, ZenFlowConfig, stream_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Layers(nn.Module):
    """Layers of a few megabytes, of which a GPU holds a part at a time."""

    def __init__(self, num_layers=6, width=1024):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))
        self.to(torch.bfloat16)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def visiting_run(streamed, *, steps=12, accumulation=1, offload_sums=False, **changes):
    """Return losses, true weights, and the largest memory of the later steps' begins."""
    model = Layers()
    stream = stream_weights(model, "cuda", **streamed) if streamed is not None else None
    if stream is None:
        model.to("cuda")
    config = ZenFlowConfig(**{"topk_ratio": 0.1, "update_interval": 3, "select_interval": 4,
                              **changes})  # fmt: skip
    optimizer = ZenFlowAdamW(
        model.parameters(), lr=1e-3, config=config, offload_gradients="release",
        max_grad_norm=1.0, accumulation_steps=accumulation, offload_sums=offload_sums,
    )  # fmt: skip
    losses, memory = [], []
    for step in range(steps):
        for micro in range(accumulation):
            generator = torch.Generator("cuda").manual_seed(10 * step + micro)
            x = torch.randn(64, 1024, generator=generator, device="cuda", dtype=torch.bfloat16)
            loss = (model(x) - x).float().square().mean() / accumulation
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        memory.append(torch.cuda.memory_reserved())
    with optimizer.true_weights():
        true = [value.cpu().clone() for value in model.state_dict().values()]
    optimizer.close()
    if stream is not None:
        assert stream.most_here <= stream.slots
        stream.close()
    return losses, true, memory


@pytest.mark.parametrize(
    "changes",
    [{}, {"topk_ratio": 0.0}, {"overlap_step": False}, {"host_state": "compact"}],
    ids=str,
)
@pytest.mark.parametrize("slots", [2, 3])
def test_streamed_weights_train_the_same_bits(slots, changes):
    plain = visiting_run(None, **changes)
    streamed = visiting_run({"slots": slots, "resident_layers": 1}, **changes)
    assert streamed[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(streamed[1], plain[1], strict=True))


def test_sums_of_streamed_weights_are_the_same_bits():
    plain, streamed = (visiting_run(s, accumulation=3) for s in (None, {"slots": 2}))
    assert streamed[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(streamed[1], plain[1], strict=True))


def test_visiting_weights_take_no_more_memory_step_by_step():
    memory = visiting_run({"slots": 2, "resident_layers": 0}, steps=60, topk_ratio=0.0)[2]
    assert len(set(memory[10:])) == 1


@pytest.mark.parametrize("streamed", [None, {"slots": 2}], ids=str)
def test_sums_that_wait_on_the_host_are_the_same_bits(streamed):
    plain = visiting_run(None, accumulation=3)
    found = visiting_run(streamed, accumulation=3, offload_sums=True)
    assert found[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], plain[1], strict=True))


def test_layers_stay_where_there_is_room_and_train_the_same_bits():
    plain, streamed = (visiting_run(s, topk_ratio=0.0) for s in (None, {"slots": 2}))
    assert streamed[0] == plain[0]  # a GPU of any size has room for all of these layers


class Recomputed(nn.Module):
    """Layers of which autograd keeps the input alone."""

    def __init__(self, num_layers=8, width=1024):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_inputs_wait_on_the_host_with_the_same_gradients_in_less_memory():
    x, found = torch.randn(1 << 14, 1024, device="cuda"), {}
    for offloads in (False, True):
        model = Recomputed()
        stream = stream_weights(model, "cuda", resident_layers=8, offload_activations=offloads)
        model(x).square().mean().backward()  # lanes and buffers are there
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = model(x).square().mean()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        loss.backward()
        found[offloads] = held, [p.grad.clone() for p in model.parameters()]
        stream.close()
    one = x.nbytes
    assert found[False][0] - found[True][0] >= 5 * one
    assert all(map(torch.equal, found[False][1], found[True][1]))
