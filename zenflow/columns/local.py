"""This rank's part of a tensor, asked without loading torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


@torch.no_grad()
def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor, without autograd: all of it where it is not sharded."""
    return tensor.to_local().data if is_sharded(tensor) else tensor.data
