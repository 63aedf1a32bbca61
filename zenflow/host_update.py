"""The host's work on one block, as parts that worker threads run: accumulate, and AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow import kernel
from zenflow.adamw import Hyper, row_scales
from zenflow.device import HostValues
from zenflow.host_store import HostRows

PART_ELEMENTS = 1 << 20
"""Elements of a part: large enough that starting it costs nothing, small enough to share out."""

Part = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowUpdate:
    """What one host update does: AdamW on the mean of a window's gradients."""

    hyper: Hyper
    lr_scale: float
    """Factor on the learning rate, and so on the decoupled decay."""
    count: int
    """Gradients in the window, n."""
    accumulator: int | None
    """Accumulator to read; None if the window is its last gradient alone."""
    reads_staging: bool
    """Whether the last gradient is still in staging, to be added in the same pass."""
    prediction: float

    def apply(self, host: HostRows, factor: float, active: Tensor, out: Tensor) -> None:
        """Step the active rows in place and write the weights to upload to `out`, (R, O)."""
        host.step.add_(active)
        step_size, denom_scale = row_scales(host.step, self.hyper, self.lr_scale)
        kernel.adamw(
            host.master,
            host.exp_avg,
            host.exp_avg_sq,
            out,
            grad=host.staging if self.reads_staging else None,
            grad_scale=factor,
            acc=None if self.accumulator is None else host.accumulators[self.accumulator],
            count=self.count,
            step_size=step_size,
            denom_scale=denom_scale,
            active=active,
            beta1=self.hyper.beta1,
            beta2=self.hyper.beta2,
            eps=self.hyper.eps,
            decay=1.0 - self.hyper.lr * self.lr_scale * self.hyper.weight_decay,
            prediction=self.prediction,
        )


def _row_ranges(num_columns: int, num_rows: int) -> list[tuple[int, int]]:
    """Cut (D, O) into runs of rows of about PART_ELEMENTS elements."""
    step = max(1, PART_ELEMENTS // max(1, num_rows))
    return [(first, min(first + step, num_columns)) for first in range(0, num_columns, step)]


def accumulate_parts(
    host: HostRows, accumulator: int, factor: HostValues, *, first: bool
) -> list[Part]:
    """Return the parts that add the staged gradient, times the clip factor, to an accumulator."""

    def part(low: int, high: int) -> Part:
        def run() -> None:
            with torch.no_grad():
                kernel.accumulate(
                    host.accumulators[accumulator][low:high],
                    host.staging[low:high],
                    factor.get()[0],
                    first=first,
                )

        return run

    return [part(low, high) for low, high in _row_ranges(*host.master.shape)]


def update_parts(
    host: HostRows, update: WindowUpdate, factor: HostValues, active: Tensor, out: Tensor
) -> list[Part]:
    """Return the parts that step a block's rows and fill its upload, (D, O)."""

    def part(low: int, high: int) -> Part:
        def run() -> None:
            with torch.no_grad():
                update.apply(
                    host.rows(low, high), factor.get()[0], active[low:high], out[low:high]
                )

        return run

    return [part(low, high) for low, high in _row_ranges(*host.master.shape)]
