"""One rank of a data-parallel run that counts what a selection of columns has to exchange.

``python -m experiments.paper.importance.selection_ranks RANK RANKS MEETING SEED WIDTH STEPS``
prints what it counted as JSON. Every collective is a real one over gloo, counted at its call.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn

_TOPK = 0.1


class _Counter:
    """Sums tensors over ranks and counts their bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks."""
        self.num_bytes += tensor.nbytes
        total = tensor.clone()
        distributed.all_reduce(total)
        return total


def measure(rank: int, seed: int, width: int, steps: int) -> dict[str, Any]:
    """Select columns once by whole gradients and once by their norms, and count both.

    The gradients are of this rank's own half of a batch, in bfloat16; norms are float32. Norms of
    ranks' own gradients, summed, are not the norm of the sum: how many columns both ways choose
    alike is said as well. Then the engine takes so many steps under DistributedDataParallel, and
    its own collectives are counted; None without steps.
    """
    torch.manual_seed(seed)
    shapes = ((width, width), (4 * width, width), (width, 4 * width))
    model = nn.Sequential(*(nn.Linear(i, o, bias=False) for o, i in shapes)).to(torch.bfloat16)
    data = torch.Generator().manual_seed(1 + seed + rank)
    # Inputs differ by an order of magnitude, as activations do: columns matter unequally.
    scale = torch.logspace(0, -1.5, width)[torch.randperm(width)]
    x = (torch.randn(64, width, generator=data) * scale).to(torch.bfloat16)
    (model(x) - x).float().square().mean().backward()
    whole, norms = _Counter(), _Counter()
    same = chosen = 0
    for weight in model.parameters():
        gradient = weight.grad
        assert isinstance(gradient, Tensor)
        exact = whole.summed(gradient).float().square().sum(dim=0)
        cheap = norms.summed(gradient.float().square().sum(dim=0))
        count = max(1, round(_TOPK * exact.numel()))
        by_both = [set(scores.topk(count).indices.tolist()) for scores in (exact, cheap)]
        same += len(by_both[0] & by_both[1])
        chosen += count
    return {
        "gradient_bytes": whole.num_bytes,
        "norm_bytes": norms.num_bytes,
        "chosen_alike": same / chosen,
        "engine_collectives": _engine_collectives(model, x, steps) if steps else None,
    }


def _engine_collectives(model: nn.Module, x: Tensor, steps: int) -> int:
    """Return how many collectives the optimizer itself calls in steps with selections."""
    from torch.nn.parallel import DistributedDataParallel

    from zenflow import ZenFlowAdamW, ZenFlowConfig

    parallel = DistributedDataParallel(model)
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter")
    config = ZenFlowConfig(update_interval=2, select_interval=2)
    optimizer = ZenFlowAdamW(model.parameters(), config=config)
    with ExitStack() as stack:
        stack.callback(optimizer.close)
        watched = []
        for name in names:
            patch = mock.patch.object(distributed, name, wraps=getattr(distributed, name))
            watched.append(stack.enter_context(patch))
        for _ in range(steps):
            (parallel(x) - x).float().square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
    return sum(collective.call_count for collective in watched)


def main(arguments: list[str]) -> None:
    """Join the other ranks, measure and print."""
    rank, ranks, meeting, seed, width, steps = arguments
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(ranks)
    )
    found = measure(int(rank), int(seed), int(width), int(steps))
    distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
