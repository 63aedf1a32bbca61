"""The host's work on one block, as parts that worker threads run: sums, moments, and AdamW."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zenflow.columns.host_rows import HostRows
from zenflow.device.base import HostValues
from zenflow.host import kernel
from zenflow.host import pool as host_pool
from zenflow.host.pool import HostJob, HostPool
from zenflow.rule.adamw import Hyper, host_row_scales

PART_ELEMENTS = 1 << 20
"""Number of elements of a part for one thread, where there is no pool."""
POOL_ELEMENTS = 1 << 23
"""Number of elements of a part that a pool's threads share. Nothing more urgent starts before it
has ended."""

Part = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowUpdate:
    """What one host update does: AdamW on the mean of a window's gradients."""

    hyper: Hyper
    """AdamW's settings."""
    lr_scale: float
    """Factor on the learning rate, and so on the decoupled decay."""
    count: int
    """Number of gradients whose mean Adam sees; 1 where it sees each."""
    accumulator: int | None
    """Index of the accumulator to read, if there is something in it."""
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


def _moments(host: HostRows, hyper: Hyper) -> dict[str, Any]:
    """Return the fields of a job that moves or reads the moments."""
    return {
        "exp_avg": host.exp_avg.data_ptr(),
        "exp_avg_sq": host.exp_avg_sq.data_ptr(),
        "step": host.step.data_ptr(),
        "beta1": hyper.beta1,
        "beta2": hyper.beta2,
    }


def _staged(host: HostRows, shape: tuple[int, int]) -> dict[str, Any]:
    """Return the fields of a job that takes the staged gradient in."""
    return {
        "rows": shape[0],
        "cols": shape[1],
        "grad": host.staging.data_ptr(),
        "grad_dtype": kernel.DTYPE_CODES[host.staging.dtype],
    }


@dataclass(frozen=True, slots=True)
class Job(ABC):
    """Work on the rows of one block, which may be cut anywhere."""

    host: HostRows
    """Rows of the block."""
    shape: tuple[int, int]
    """(D, O) of the block."""

    @abstractmethod
    def encode(self) -> HostJob:
        """Return the work on all rows as a job of a pool."""

    @abstractmethod
    def run(self, low: int, high: int, factor: float) -> None:
        """Do rows low..high-1, the last gradient times the clip factor."""


@dataclass(frozen=True, slots=True)
class Accumulation(Job):
    """A block's staged gradient on its way into an accumulator."""

    accumulator: int
    """Index of the accumulator."""
    first: bool
    """Whether it opens the window."""

    def encode(self) -> HostJob:
        """Return the work on all rows as a job of a pool."""
        return HostJob(
            kind=host_pool.ACCUMULATE,
            is_first=self.first,
            acc=self.host.accumulators[self.accumulator].data_ptr(),
            **_staged(self.host, self.shape),
        )

    def run(self, low: int, high: int, factor: float) -> None:
        """Add rows low..high-1, times the clip factor."""
        kernel.accumulate(
            self.host.accumulators[self.accumulator][low:high],
            self.host.staging[low:high],
            factor,
            first=self.first,
        )


@dataclass(frozen=True, slots=True)
class Moments(Job):
    """A block's staged gradient on its way into the moments, in mid-window."""

    hyper: Hyper
    """AdamW's settings."""

    def encode(self) -> HostJob:
        """Return the work on all rows as a job of a pool."""
        return HostJob(
            kind=host_pool.MOMENTS,
            **_staged(self.host, self.shape),
            **_moments(self.host, self.hyper),
        )

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
class Update(Job):
    """A block's window that ends."""

    window: WindowUpdate
    """What is done to each row."""
    active: Tensor
    """Flags of the rows that take part, (D,), uint8."""
    out: Tensor
    """Weights to upload, (D, O)."""

    def encode(self) -> HostJob:
        """Return the work on all rows as a job of a pool."""
        host, window, hyper = self.host, self.window, self.window.hyper
        lr = hyper.lr * window.lr_scale
        job = HostJob(
            kind=host_pool.ADAMW,
            rows=self.shape[0],
            cols=self.shape[1],
            master=host.master.data_ptr(),
            out=self.out.data_ptr(),
            out_dtype=kernel.DTYPE_CODES[self.out.dtype],
            active=self.active.data_ptr(),
            lr=lr,
            eps=hyper.eps,
            decay=1.0 - lr * hyper.weight_decay,
            prediction=window.prediction,
            count=window.count,
            **_moments(host, hyper),
        )
        if window.accumulator is not None:
            job.acc = host.accumulators[window.accumulator].data_ptr()
        if window.reads_staging:
            job.grad = host.staging.data_ptr()
            job.grad_dtype = kernel.DTYPE_CODES[host.staging.dtype]
        return job

    def run(self, low: int, high: int, factor: float) -> None:
        """Step rows low..high-1 and fill their upload."""
        if high - low == self.shape[0]:  # views cost a worker thread as much as small blocks do
            self.window.apply(self.host, factor, self.active, self.out)
            return
        part = slice(low, high)
        self.window.apply(self.host.rows(part), factor, self.active[part], self.out[part])


def parts_of(jobs: Sequence[Job], factor: HostValues, pool: HostPool | None) -> list[Part]:
    """Return the jobs as parts for the worker's threads.

    With a pool a part is some whole jobs, which the pool's threads share; without, a piece of
    about PART_ELEMENTS elements for one thread.
    """
    enough = PART_ELEMENTS // 2 if pool is None else POOL_ELEMENTS
    parts: list[Part] = []
    pieces: list[tuple[Job, int, int]] = []
    filled = 0
    for job in jobs:
        num_columns, num_rows = job.shape
        step = num_columns if pool is not None else max(1, PART_ELEMENTS // max(1, num_rows))
        for low in range(0, num_columns, step):
            high = min(low + step, num_columns)
            pieces.append((job, low, high))
            filled += (high - low) * num_rows
            if filled >= enough:
                parts.append(partial(_run_part, pieces, factor, pool))
                pieces, filled = [], 0
    if pieces:
        parts.append(partial(_run_part, pieces, factor, pool))
    return parts


def _run_part(
    pieces: list[tuple[Job, int, int]], factor: HostValues, pool: HostPool | None
) -> None:
    if pool is not None:
        pool.run([job.encode() for job, _, _ in pieces], factor.get()[0])
        return
    with torch.no_grad():
        for job, low, high in pieces:
            job.run(low, high, factor.get()[0])
