"""Operations that PyTorch dispatches, as a GPU would have them: launches, and bytes of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

VIEWS = frozenset({
    "view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select",
    "unbind", "split", "detach", "alias", "_unsafe_view", "as_strided", "split_with_sizes",
    "_reshape_alias", "lift_fresh", "chunk",
})  # fmt: skip
"""Operations that launch nothing, as their outputs are inputs."""
_IDLE = frozenset({
    *VIEWS, "empty", "new_empty", "empty_like", "empty_strided", "_record_function_enter_new",
    "_record_function_exit",
})  # fmt: skip
"""Views, and what takes memory or times of its own."""
_OVERWRITING = frozenset({"copy_", "_foreach_copy_", "fill_", "zero_", "index_copy_"})
"""Operations in place that do not read what they write to."""


def name_of(operation: Any) -> str:
    """Return an operation's name without its overload."""
    return str(operation.overloadpacket.__name__)


def num_launches(operation: Any, args: Sequence[Any]) -> int:
    """Return the kernels and copies that an operation launches on a GPU.

    Several tensors at a time (`torch._foreach_mul_`) count as one, though a GPU takes one launch
    for some hundred of them. Where two lists differ in shapes torch takes them one by one.
    """
    name = name_of(operation)
    if name in _IDLE:
        return 0
    lists = [value for value in args if isinstance(value, list | tuple)]
    if name.startswith("_foreach_") and len(lists) > 1:
        pairs = zip(*lists[:2], strict=True)
        if any(one.shape != other.shape for one, other in pairs):
            return len(lists[0])
    return 1


def bytes_of(operation: Any, args: Any, kwargs: Any, returned: Any) -> int:
    """Return the bytes that an operation has to read and write, each element once.

    Memory has to move more where an access uses a part of a line.
    """
    name, total = name_of(operation), 0
    # Of a tensor that is indexed, as many elements count as come out or go in.
    touched = {"index_select": returned, "index_copy_": args[-1]}.get(name) if args else None
    for place, argument in enumerate(operation._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if place == 0 and touched is not None:
            value = touched
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (is_written and (argument.kwarg_only or name in _OVERWRITING))
        total += (is_read + is_written) * _size(value)
    made = returned if isinstance(returned, tuple) else (returned,)
    new = zip(operation._schema.returns, made, strict=False)
    return total + sum(_size(value) for kind, value in new if kind.alias_info is None)


def _size(value: Any) -> int:
    """Return the bytes of the elements of all tensors in a value, a repeated one once."""
    if isinstance(value, list | tuple):
        return sum(_size(item) for item in value)
    if not isinstance(value, Tensor):
        return 0
    sizes = zip(value.shape, value.stride(), strict=True)
    return torch.Size([size for size, stride in sizes if stride]).numel() * value.element_size()
