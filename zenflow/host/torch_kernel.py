"""The host kernel's arithmetic on torch operations: what runs where there is no compiled one.

Operation by operation the C kernel's order of roundings; `zenflow.host.kernel` documents the
functions and checks their arguments.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


@torch.no_grad()
def accumulate(acc: Tensor, grad: Tensor, scale: float, *, first: bool) -> None:
    """Add a scaled gradient to a sum, or begin one."""
    if first:
        acc.copy_(grad).mul_(scale)
    else:
        acc.add_(grad.to(torch.float32) * scale)  # not add_(alpha=...): that may fuse the rounding


@torch.no_grad()
def moments(exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, beta1: float, beta2: float) -> None:
    """Move both moments by a float32 gradient, which is overwritten."""
    rate = ctypes.c_float(1.0 - beta1).value  # rounded first, as C and torch.lerp see it
    if rate < 0.5:
        exp_avg.add_((grad - exp_avg) * rate)
    else:
        exp_avg.copy_(grad + (grad - exp_avg) * (rate - 1.0))
    exp_avg_sq.mul_(beta2).add_((grad * (1.0 - beta2)).mul_(grad))


@torch.no_grad()
def mean_gradient(grad: Tensor | None, scale: float, acc: Tensor | None, count: int) -> Tensor:
    """Return the mean gradient of a window in memory of its own."""
    terms = [] if acc is None else [acc]
    if grad is not None:
        terms.append(grad.to(torch.float32) * scale)
    total = terms[0] + terms[1] if len(terms) > 1 else terms[0]
    return total / count


@torch.no_grad()
def adamw(
    state: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    mean: Tensor | None,
    by_row: tuple[Tensor, Tensor, Tensor],
    factors: tuple[float, float, float, float, float],
) -> None:
    """Update the active rows of (master, exp_avg, exp_avg_sq) and write every row's upload.

    Args:
        state: The three, changed in place.
        out: The uploads.
        mean: Mean gradient; None leaves the moments alone.
        by_row: (step_size, denom_scale, active).
        factors: (beta1, beta2, eps, decay, prediction).
    """
    step_size, denom_scale, active = by_row
    beta1, beta2, eps, decay, prediction = factors
    rows = active.nonzero().squeeze(1)
    w, m, v = (tensor[rows] for tensor in state)
    if mean is not None:
        moments(m, v, mean[rows], beta1, beta2)
    root = v.double().sqrt().float()  # correctly rounded, which torch's float32 root is not always
    denom = root.mul_(denom_scale[rows].reciprocal().unsqueeze(1)).add_(eps)
    delta = (m * step_size[rows].unsqueeze(1)).div_(denom)
    w.mul_(decay).sub_(delta)
    out.copy_(state[0])  # the inactive rows' part
    out[rows] = (w - delta * prediction).to(out.dtype)
    for tensor, values in zip(state, (w, m, v), strict=True):
        tensor[rows] = values
