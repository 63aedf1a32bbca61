"""One rank of a sharded training that counts what its collectives are given.

``python -m evidence.paper.importance.selection_ranks RANK RANKS MEETING SEED WIDTH STEPS``
prints what it counted as JSON. Every collective is a real one over gloo, counted at its call.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from zenflow import ZenFlowAdamW, ZenFlowConfig

_NAMES = (
    "all_reduce",
    "all_gather_into_tensor",
    "broadcast",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)
"""Collectives that are counted, of those that this torch has."""
_REDUCE_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")


@contextmanager
def _collectives() -> Iterator[Counter[str]]:
    """Count the bytes of collectives: this engine's under ``engine``, others' by their names."""
    num_bytes: Counter[str] = Counter()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
            caller = sys._getframe(1).f_globals["__name__"]
            key = "engine" if caller.startswith("zenflow.") else name
            num_bytes[key] += max(tensor.nbytes for tensor in tensors)
            return call(*args, **kwargs)

        return count

    with ExitStack() as stack:
        for name in filter(partial(hasattr, distributed), _NAMES):
            call = counted(name, getattr(distributed, name))
            stack.enter_context(mock.patch.object(distributed, name, call))
        yield num_bytes


def measure(rank: int, ranks: int, seed: int, width: int, steps: int) -> dict[str, Any]:
    """Train with FSDP2, and count what the optimizer adds up beside what FSDP2 exchanges.

    Weights and gradients are bfloat16, norms float32. The learning rate is 0, so that every step
    has the same gradients: the columns in the end are compared with those that the averaged whole
    gradients choose.

    Args:
        rank: This process's rank.
        ranks: Number of processes.
        seed: Seed of weights and data.
        width: Columns of the smallest matrix.
        steps: Number of steps; bytes are those of one.
    """
    torch.manual_seed(seed)
    shapes = ((width, width), (4 * width, width), (width, 4 * width))
    model = nn.Sequential(*(nn.Linear(i, o, bias=False) for o, i in shapes)).to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    data = torch.Generator().manual_seed(1 + seed + rank)
    # Inputs differ by an order of magnitude, as activations do: columns matter unequally.
    scale = torch.logspace(0, -1.5, width)[torch.randperm(width)]
    x = (torch.randn(64, width, generator=data) * scale).to(torch.bfloat16)
    config = ZenFlowConfig(
        update_interval=2,
        select_interval=2,
        hysteresis=0.0,
        min_split_elements=1,
        block_elements=4 * width * width,  # a matrix is one block, which chooses for itself
    )
    optimizer = ZenFlowAdamW(model.parameters(), lr=0.0, config=config)
    with ExitStack() as stack:
        stack.callback(optimizer.close)
        num_bytes = stack.enter_context(_collectives())
        for _ in range(steps):
            (model(x) - x).float().square().mean().backward()
            whole = [_whole_gradient(weight) for weight in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        alike = _chosen_alike(optimizer, whole)
    return {
        "gradient_bytes": sum(num_bytes[name] for name in _REDUCE_SCATTERS) // steps,
        "norm_bytes": num_bytes["engine"] // steps,
        "chosen_alike": alike,
    }


def _whole_gradient(weight: Tensor) -> Tensor:
    assert isinstance(weight.grad, DTensor)
    whole: Tensor = weight.grad.full_tensor()
    return whole


def _chosen_alike(optimizer: ZenFlowAdamW, gradients: list[Tensor]) -> float:
    """Return the share of the important columns that whole gradients choose too."""
    alike = chosen = 0
    states = optimizer.state_dict()["state"].values()
    for state, gradient in zip(states, gradients, strict=True):
        columns = set(state["important_columns"].tolist())
        best = gradient.float().square().sum(dim=0).topk(len(columns)).indices.tolist()
        alike += len(columns & set(best))
        chosen += len(columns)
    return alike / chosen


def main(arguments: list[str]) -> None:
    """Join the other ranks, measure and print."""
    rank, ranks, meeting, seed, width, steps = arguments
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(ranks)
    )
    found = measure(int(rank), int(ranks), int(seed), int(width), int(steps))
    distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
