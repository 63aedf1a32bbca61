"""The arithmetic of the host side: gradient accumulation and AdamW in one pass over memory.

Compiled C where the package was installed with a compiler, torch operations elsewhere. Both follow
`torch.optim.AdamW` operation by operation in float32, but for one division by a constant that is a
multiplication, and agree bit for bit, except that the C kernel takes subnormal float32 values
(below 1.2e-38 in size) for zero. Every operation is elementwise: any cut of the rows into calls,
on any threads, gives the same bits. Calls into C give up the interpreter lock and start no
threads; the fallback's threads are torch's.

Shapes: R = rows (columns of the model's matrix), O = elements per row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from zenflow.host import torch_kernel
from zenflow.host.library import c_library

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The C kernel's number of each dtype."""
_FLOAT32 = (torch.float32,)
_UINT8 = (torch.uint8,)


def active_kernel() -> Literal["c", "torch"]:
    """Return what runs the host updates in this process.

    The environment variable `ZENFLOW_KERNEL`, read once, forces the fallback by the value `torch`.
    A fallback is logged once, as a warning with its reason.

    Raises:
        ValueError: `ZENFLOW_KERNEL` is neither `c` nor `torch`.
    """
    return "torch" if c_library() is None else "c"


def accumulate(acc: Tensor, grad: Tensor, scale: float, *, first: bool) -> None:
    """Set `acc = scale * grad` if `first`, else add: `acc += scale * grad`, rounded in between.

    Args:
        acc: Accumulator, float32 (R, O), changed in place; what it held is ignored if `first`.
        grad: Gradient, float32, bfloat16 or float16 (R, O), not overlapping `acc`.
        scale: Factor on this gradient (the step's clip factor), taken as a float32.
        first: Whether the gradient opens its window.

    Raises:
        ValueError: A tensor's shape, dtype, layout or device is none of these.
    """
    _check_matrix("acc", acc)
    _check("grad", grad, acc.shape, DTYPE_CODES)
    library = c_library()
    if library is None:
        torch_kernel.accumulate(acc, grad, scale, first=first)
        return
    code = DTYPE_CODES[grad.dtype]
    library.zenflow_accumulate(acc.data_ptr(), grad.data_ptr(), code, acc.numel(), scale, first)


def moments(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    scale: float,
    *,
    beta1: float,
    beta2: float,
) -> None:
    """Move both moments by `g = scale * grad`, as `adamw` does, and no weight.

    Args:
        exp_avg: First moment, float32 (R, O), changed in place.
        exp_avg_sq: Second moment, float32 (R, O), changed in place.
        grad: Gradient, float32, bfloat16 or float16 (R, O), overlapping neither.
        scale: Factor on this gradient (the step's clip factor), taken as a float32.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.

    Raises:
        ValueError: A tensor's shape, dtype, layout or device is none of these.
    """
    _check_matrix("exp_avg", exp_avg)
    _check("exp_avg_sq", exp_avg_sq, exp_avg.shape, _FLOAT32)
    _check("grad", grad, exp_avg.shape, DTYPE_CODES)
    library = c_library()
    if library is None:
        scaled = torch_kernel.mean_gradient(grad, scale, None, 1)
        torch_kernel.moments(exp_avg, exp_avg_sq, scaled, beta1, beta2)
        return
    library.zenflow_moments(
        *(exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr()),
        *(DTYPE_CODES[grad.dtype], exp_avg.numel(), scale),
        *(beta2, 1.0 - beta1, 1.0 - beta2),
    )


def adamw(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor,
    *,
    grad: Tensor | None,
    grad_scale: float,
    acc: Tensor | None,
    count: int,
    step_size: Tensor,
    denom_scale: Tensor,
    active: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    prediction: float,
) -> None:
    """Update active rows by AdamW on a window's mean gradient; write every row's upload.

    With `g = (acc + grad_scale * grad) / count`, or the one of the two that is given, the update
    is torch.optim.AdamW's: `m = lerp(m, g, 1 - beta1)`, `v = beta2 * v + (1 - beta2) * g^2`;
    with neither, the moments have seen every gradient and stay. Then
    `delta = step_size * m / (sqrt(v) * (1 / denom_scale) + eps)`, `w = decay * w - delta`, and
    `out = cast(w - prediction * delta)`. An inactive row keeps its state and has `out = cast(w)`.

    All tensors are contiguous and on the CPU. None may overlap another, but `out` may be `grad`.

    Args:
        master: Weights, float32 (R, O), changed in place; so are the moments.
        exp_avg: First moment, float32 (R, O).
        exp_avg_sq: Second moment, float32 (R, O).
        out: Weights to upload, float32, bfloat16 or float16 (R, O), rounded to nearest even.
        grad: The window's last gradient, float32, bfloat16 or float16 (R, O), or None.
        grad_scale: Factor on `grad`.
        acc: Sum of the window's earlier gradients, float32 (R, O), or None. It is consumed: what
            it holds afterwards is undefined; the next window's first gradient overwrites it.
        count: Gradients in the window, at least 1.
        step_size: `lr / (1 - beta1^step)` by row, float32 (R,).
        denom_scale: `sqrt(1 - beta2^step)` by row, float32 (R,).
        active: Nonzero where a row is updated, uint8 (R,).
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        decay: Factor on the weights, `1 - lr * weight_decay`.
        prediction: Share of the displacement just applied by which `out` runs ahead of `master`.

    Raises:
        ValueError: A shape, dtype, layout or device is none of these, or `count` is below 1.
    """
    shape = master.shape
    _check_matrix("master", master)
    for name, tensor in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq), ("acc", acc)):
        if tensor is not None:
            _check(name, tensor, shape, _FLOAT32)
    _check("step_size", step_size, shape[:1], _FLOAT32)
    _check("denom_scale", denom_scale, shape[:1], _FLOAT32)
    _check("active", active, shape[:1], _UINT8)
    if grad is not None:
        _check("grad", grad, shape, DTYPE_CODES)
    _check("out", out, shape, DTYPE_CODES)
    if count < 1:
        raise ValueError(f"count ({count}) must be at least 1: the window's number of gradients")
    library = c_library()
    if library is None:
        has_gradient = grad is not None or acc is not None
        mean = torch_kernel.mean_gradient(grad, grad_scale, acc, count) if has_gradient else None
        state, by_row = (master, exp_avg, exp_avg_sq), (step_size, denom_scale, active)
        torch_kernel.adamw(state, out, mean, by_row, (beta1, beta2, eps, decay, prediction))
        return
    grad_code = 0 if grad is None else DTYPE_CODES[grad.dtype]
    library.zenflow_adamw(
        *(master.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr()),
        *(out.data_ptr(), DTYPE_CODES[out.dtype]),
        *(None if grad is None else grad.data_ptr(), grad_code, grad_scale),
        *(None if acc is None else acc.data_ptr(), count, *shape),
        *(step_size.data_ptr(), denom_scale.data_ptr(), active.data_ptr()),
        # 1 - beta is rounded once, from double, as torch does.
        *(beta2, 1.0 - beta1, 1.0 - beta2, eps, decay, prediction),
    )


def _check_matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise ValueError(
            f"{name} must be a matrix (R, O), but has shape {tuple(tensor.shape)}: "
            "pass a view of columns as rows"
        )
    _check(name, tensor, tensor.shape, _FLOAT32)


def _check(
    name: str, tensor: Tensor, shape: Sequence[int], dtypes: Collection[torch.dtype]
) -> None:
    is_plain = tensor.shape == shape and tensor.is_contiguous() and tensor.is_cpu
    if is_plain and tensor.dtype in dtypes:
        return
    *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    wanted = f"{', '.join(others)} or {last}" if others else last
    layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
    raise ValueError(
        f"{name} must be {wanted}, of shape {tuple(shape)}, contiguous and on the CPU, "
        f"but is {tensor.dtype}, {tuple(tensor.shape)}, {layout}, on {tensor.device}: "
        "pass whole rows of a tensor that is"
    )
