"""Ownership of a gradient's memory: memory that others may write to must be copied first."""

from __future__ import annotations

import sys
from functools import cache

import torch
from torch import Tensor


def is_own(param: Tensor, *, is_sharded: bool) -> bool:
    """Whether nobody but the parameter can reach its gradient's memory.

    The host's copy of a gradient is made while the program goes on. A tensor that the program has
    a name for, a view of it, or a part of a larger buffer may be written again before that copy
    has ended. Each of these is a reference, either to the gradient or to its memory.

    Args:
        param: Parameter with a gradient. The caller has no other reference to that.
        is_sharded: Whether the gradient is a DTensor. FSDP2 makes a larger buffer in every
            backward, and gives each gradient a part: only references to the tensors count there.
    """
    if is_sharded:
        return _references_to_shard(param) <= _of_nobody_else()
    return _has_whole_memory(param) and _references(param) <= _of_nobody_else()


def _has_whole_memory(param: Tensor) -> bool:
    grad = param.grad
    assert grad is not None
    # A sparse gradient has no memory to ask for; whoever takes gradients refuses it.
    return grad.layout == torch.strided and grad.untyped_storage().nbytes() == grad.nbytes


def _references(param: Tensor) -> int:
    """Count the references to a gradient from Python and C++, and those to its memory."""
    grad = param.grad
    assert grad is not None
    of_memory = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    of_tensor: int = grad._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(grad) + of_tensor + of_memory


def _references_to_shard(param: Tensor) -> int:
    """Count the references to a DTensor; Python's to its local part stand for those to memory."""
    grad = param.grad
    assert grad is not None
    of_tensor: int = grad._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(grad) + of_tensor + sys.getrefcount(grad._local_tensor)  # type: ignore[attr-defined]


@cache
def _of_nobody_else() -> int:
    """Return the references to a gradient that only its parameter has.

    The number is measured once, because counts differ by version of Python and torch. A
    DTensor's local part has as many from Python as a tensor's memory has.
    """
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    param.grad = torch.zeros_like(param)
    return _references(param)
