"""A model that ranks share: sharded by FSDP2, or the same on each under DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from experiments.training.parts.ranks.ranks import Ranks
from zenflow.columns.local import is_sharded

if TYPE_CHECKING:
    from zenflow.optimizer import ZenFlowAdamW


def shard(model: nn.Module, device: torch.device, ranks: Ranks) -> None:
    """Spread a model's weights over the ranks, in place; those on the CPU move to the device.

    Each repeated layer is gathered by itself, so that a device holds one of them whole at a time.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks.count,))
    for layer in repeated_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def repeated_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of a model's outermost lists of modules: a decoder's layers."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from repeated_layers(child)


class ForwardModel:
    """Module of a forward pass: the model, or DDP's wrapper, which averages gradients."""

    def __init__(self, model: nn.Module, ranks: Ranks, optimizer: ZenFlowAdamW) -> None:
        """Wrap the model where ranks have it whole; they start from the first one's weights."""
        self.module = model
        if ranks.parallel == "ddp":
            on_gpu = next(model.parameters()).is_cuda
            ids = [torch.cuda.current_device()] if on_gpu else None
            self.module = nn.parallel.DistributedDataParallel(
                model, device_ids=ids, gradient_as_bucket_view=optimizer.releases_gradients
            )
            if optimizer.releases_gradients:
                optimizer.release_from(self.module)

    def pass_of(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch: ranks average what the last one completes."""
        if isinstance(self.module, nn.parallel.DistributedDataParallel) and not is_last:
            return cast("AbstractContextManager[Any]", self.module.no_sync())
        return nullcontext()


def forget_gathered(model: nn.Module) -> None:
    """Let the next forward gather a sharded model's weights anew.

    FSDP2 keeps what the root module has gathered until a backward, which an evaluation lacks.
    """
    reshard = getattr(model, "reshard", None)
    if reshard is not None:
        reshard()


def whole_weights(model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Return a model's state on the CPU, gathered tensor by tensor; empty but on the first rank.

    Names of a tied parameter share a tensor.
    """
    shared = {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}
    known: dict[int, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = shared.get(name, id(tensor))
        if key not in known:
            full = tensor.full_tensor() if is_sharded(tensor) else tensor
            known[key] = full.cpu() if ranks.is_first else torch.empty(0)
        if ranks.is_first:
            whole[name] = known[key]
    return whole
