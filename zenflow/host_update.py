"""The host's work on one block, as parts that worker threads run: sums, moments, and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zenflow import kernel
from zenflow.adamw import Hyper, host_row_scales
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
    """Gradients whose sum Adam sees the mean of; 1 where it sees each."""
    accumulator: int | None
    """Accumulator to read, if there is something in it."""
    reads_staging: bool
    """Whether the last gradient is still in staging, to be taken in the same pass."""
    prediction: float
    """Share of its displacement by which the upload runs ahead."""

    def apply(self, host: HostRows, factor: float, active: Tensor, out: Tensor) -> None:
        """Step the active rows in place and write the weights to upload to `out`, (R, O)."""
        step = host.step.numpy()
        if self.reads_staging or self.accumulator is not None:
            step += active.numpy()
        step_size, denom_scale = host_row_scales(step, self.hyper, self.lr_scale)
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


class Job(Protocol):
    """Work on the rows of one block, which may be cut anywhere."""

    @property
    def shape(self) -> tuple[int, int]:
        """(D, O) of the block."""

    def run(self, low: int, high: int, factor: float) -> None:
        """Do rows low..high-1, the last gradient times the clip factor."""


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A block's staged gradient on its way into an accumulator."""

    host: HostRows
    shape: tuple[int, int]
    """(D, O) of the block."""
    accumulator: int
    first: bool
    """Whether it opens the window."""

    def run(self, low: int, high: int, factor: float) -> None:
        """Add rows low..high-1, times the clip factor."""
        kernel.accumulate(
            self.host.accumulators[self.accumulator][low:high],
            self.host.staging[low:high],
            factor,
            first=self.first,
        )


@dataclass(frozen=True, slots=True)
class Moments:
    """A block's staged gradient on its way into the moments, in mid-window."""

    host: HostRows
    shape: tuple[int, int]
    """(D, O) of the block."""
    hyper: Hyper

    def run(self, low: int, high: int, factor: float) -> None:
        """Move the moments of rows low..high-1 and count the step."""
        self.host.step.numpy()[low:high] += 1
        kernel.moments(
            self.host.exp_avg[low:high],
            self.host.exp_avg_sq[low:high],
            self.host.staging[low:high],
            factor,
            beta1=self.hyper.beta1,
            beta2=self.hyper.beta2,
        )


@dataclass(frozen=True, slots=True)
class Update:
    """A block's window that ends."""

    host: HostRows
    shape: tuple[int, int]
    """(D, O) of the block."""
    window: WindowUpdate
    active: Tensor
    """Which rows take part, (D,), uint8."""
    out: Tensor
    """What is uploaded, (D, O)."""

    def run(self, low: int, high: int, factor: float) -> None:
        """Step rows low..high-1 and fill their upload."""
        if high - low == self.shape[0]:  # views cost a worker thread as much as small blocks do
            self.window.apply(self.host, factor, self.active, self.out)
            return
        self.window.apply(
            self.host.rows(low, high), factor, self.active[low:high], self.out[low:high]
        )


def parts_of(jobs: Sequence[Job], factor: HostValues) -> list[Part]:
    """Return the jobs cut, or put together, to parts of about PART_ELEMENTS elements."""
    parts: list[Part] = []
    pieces: list[tuple[Job, int, int]] = []
    filled = 0
    for job in jobs:
        num_columns, num_rows = job.shape
        step = max(1, PART_ELEMENTS // max(1, num_rows))
        for low in range(0, num_columns, step):
            high = min(low + step, num_columns)
            pieces.append((job, low, high))
            filled += (high - low) * num_rows
            if filled >= PART_ELEMENTS // 2:
                parts.append(_part(pieces, factor))
                pieces, filled = [], 0
    if pieces:
        parts.append(_part(pieces, factor))
    return parts


def _part(pieces: list[tuple[Job, int, int]], factor: HostValues) -> Part:
    def run() -> None:
        with torch.no_grad():
            for job, low, high in pieces:
                job.run(low, high, factor.get()[0])

    return run
