"""The placeholder that stands in `.grad` for a gradient that has left for the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from zenflow.errors import GradientError


class ReleasedGradient(Tensor):
    """A tensor without data: every use is an error with the remedy.

    Code that skips parameters whose `.grad` is None would go wrong in silence: `torch.nn.utils`'
    clipping, `GradScaler.unscale_`, gradient logging, a second backward. The placeholder raises.
    """

    _name: str

    @staticmethod
    def __new__(cls: type[ReleasedGradient], param: Tensor, name: str) -> ReleasedGradient:
        """Make a placeholder of the parameter's shape, dtype and device; it takes no memory."""
        placeholder: ReleasedGradient = Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device
        )
        placeholder._name = name
        return placeholder

    def __init__(self, param: Tensor, name: str) -> None:
        """Nothing is left to do; `__new__` makes the tensor."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe the placeholder, so that a debugger can show it."""
        return f"ReleasedGradient({getattr(self, '_name', '?')}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Refuse every operation.

        Raises:
            GradientError: Always.
        """
        name = next((a._name for a in _flatten(args) if isinstance(a, ReleasedGradient)), "?")
        raise GradientError(
            f"the gradient of {name} was released: it left for the host during backward, so "
            f"{func} can't use it. Clip with the optimizer's max_grad_norm or "
            "optimizer.clip_grad_norm_(); accumulate over micro-batches with accumulation_steps; "
            "drop a batch with optimizer.zero_grad(); to keep gradients until step() (for "
            'GradScaler or hooks) make the optimizer with offload_gradients="keep"'
        )


def is_released(grad: Tensor | None, *, is_sharded: bool) -> bool:
    """Whether a parameter's gradient is a placeholder, of any optimizer, or a DTensor of one."""
    found = getattr(grad, "_local_tensor", None) if is_sharded else grad
    return isinstance(found, ReleasedGradient)


def _flatten(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return [leaf for value in values for leaf in _flatten(value)]
    return [values]


def matches(grad: Tensor, param: Tensor) -> bool:
    """Whether a gradient can be used as the parameter's.

    It is dense, of the same shape, dtype and device, and sharded in the same way.
    """
    return (
        getattr(grad, "placements", None) == getattr(param, "placements", None)
        and grad.layout == torch.strided
        and grad.shape == param.shape
        and grad.dtype == param.dtype
        and grad.device == param.device
    )
