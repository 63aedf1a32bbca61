"""AdamW on the device's rows, with a step count each. Formulas as torch.optim.AdamW.

The host's AdamW is `zenflow.host.kernel`; both follow Loshchilov and Hutter (arXiv 1711.05101)
with torch's order of operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Hyper:
    """One parameter group's settings at one step."""

    lr: float
    """Learning rate of the group."""
    beta1: float
    """Decay of the first moment."""
    beta2: float
    """Decay of the second moment."""
    eps: float
    """Addend of the denominator."""
    weight_decay: float
    """Decoupled weight decay: a step shrinks weights by lr * weight_decay."""

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Hyper:
        """Return the settings of a torch parameter group."""
        beta1, beta2 = group["betas"]
        return cls(
            float(group["lr"]), float(beta1), float(beta2), group["eps"], group["weight_decay"]
        )


def row_scales(step: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """Return (step_size, denom_scale), float32, shape (R,), for rows that have taken `step` steps.

    step_size = lr / (1 - beta1^step), denom_scale = sqrt(1 - beta2^step), in float64 until the
    end, as torch computes them in Python floats.
    """
    exact = step.double()
    step_size = hyper.lr / (1.0 - hyper.beta1**exact)
    denom_scale = (1.0 - hyper.beta2**exact).sqrt()
    return step_size.float(), denom_scale.float()


@torch.no_grad()
def update_rows(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    grad: Tensor,
    hyper: Hyper,
) -> None:
    """Apply one AdamW step in place to rows (R, O) that have step counts of their own.

    Args:
        master: Weights, (R, O), float32.
        exp_avg: First moments, (R, O), float32.
        exp_avg_sq: Second moments, (R, O), float32; (R, 0) where gradients have been divided by
            their roots.
        step: Steps taken before, (R,), int64; counted up here.
        grad: Gradients, (R, O), float32; overwritten.
        hyper: Settings of this step.
    """
    step.add_(1)
    step_size, denom_scale = row_scales(step, hyper)
    master.mul_(1.0 - hyper.lr * hyper.weight_decay)
    exp_avg.lerp_(grad, 1.0 - hyper.beta1)
    if exp_avg_sq.shape != master.shape:
        master.sub_(exp_avg * step_size[:, None])
        return
    exp_avg_sq.mul_(hyper.beta2).addcmul_(grad, grad, value=1.0 - hyper.beta2)
    torch.sqrt(exp_avg_sq, out=grad)
    denom = grad.div_(denom_scale[:, None]).add_(hyper.eps)
    master.sub_((exp_avg * step_size[:, None]).div_(denom))
