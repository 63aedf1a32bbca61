"""The host's work on the rows of one block, as parts that worker threads run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from zenflow.columns.host_rows import HostRows, MovingColumns
from zenflow.drive.loan import Loan, Urgency
from zenflow.host import kernel
from zenflow.host.compact import CompactState
from zenflow.host.jobs import AdamStep, CatchUpJob, CompactJob, HostJob, SumJob, Upload
from zenflow.host.pool import HostPool

PART_ELEMENTS = 1 << 20
"""Number of elements of a part for one thread, where there is no pool."""
POOL_ELEMENTS = 1 << 23
"""Number of elements of a part that a pool's threads share. A more urgent task has to wait until
the part has ended."""

Part = Callable[[], None]


@dataclass(frozen=True, slots=True)
class RowWork:
    """Work on the rows of one block, which may be cut anywhere."""

    shape: tuple[int, int]
    """Shape (D, O) of the block's host rows."""
    make: Callable[[], HostJob]
    """Function that returns the job on all rows; called when the work begins, since a clip factor
    may still be on its way to the host before."""
    on_drive: HostRows | None = None
    """The rows, where their state is on a drive; None in memory."""


def catch_up(
    host: HostRows, active: torch.Tensor, steps: Sequence[AdamStep], upload: Upload | None
) -> HostJob:
    """Return the catch-up pass in which rows take all steps that wait, and may be uploaded."""
    state = host.state
    if isinstance(state, CompactState):
        return CompactJob(
            state, host.step, active, steps, upload, host.first, host.stride, host.seed
        )
    return CatchUpJob(*state.tensors(), host.step, active, steps, upload)


def stepped(
    columns: MovingColumns, steps: Sequence[AdamStep], pool: HostPool | None
) -> torch.Tensor:
    """Take steps on columns that leave the host, in place; return how many each has taken.

    The device waits for them, so that the pool's threads help.
    """
    numbers = columns.master, columns.exp_avg, columns.exp_avg_sq
    active = torch.ones(len(columns.step), dtype=torch.uint8, device="cpu")
    _run(CatchUpJob(*numbers, columns.step, active, steps), pool)
    return columns.step


def parts_of(works: Sequence[RowWork], pool: HostPool | None) -> list[Part]:
    """Return the work as parts for the worker's threads.

    With a pool a part is the work of some whole blocks, which the pool's threads share; without, a
    piece of about PART_ELEMENTS elements for one thread.
    """
    enough = PART_ELEMENTS // 2 if pool is None else POOL_ELEMENTS
    parts: list[Part] = []
    pieces: list[tuple[RowWork, int, int]] = []
    filled = 0
    for work in works:
        num_columns, num_rows = work.shape
        step = num_columns if pool is not None else max(1, PART_ELEMENTS // max(1, num_rows))
        for low in range(0, num_columns, step):
            high = min(low + step, num_columns)
            pieces.append((work, low, high))
            filled += (high - low) * num_rows
            if filled >= enough:
                parts.append(partial(_run_part, pieces, pool))
                pieces, filled = [], 0
    if pieces:
        parts.append(partial(_run_part, pieces, pool))
    return parts


def extent_parts(
    works: Sequence[RowWork], pool: HostPool | None, urgency: Urgency, step: int
) -> tuple[list[Part], list[Loan]]:
    """Return work on states of a drive: a part for each extent, and the loan that it needs."""
    parts: list[Part] = []
    loans = []
    for work in works:
        rows = work.on_drive
        assert rows is not None
        assert rows.drive is not None
        for extent in rows.extents:
            loan = rows.drive.loan(extent, urgency, step)
            loans.append(loan)
            parts.append(partial(_run_extent, work, rows.slice_of(extent), loan, pool))
    return parts, loans


def _run_extent(work: RowWork, part: slice, loan: Loan, pool: HostPool | None) -> None:
    with torch.no_grad(), loan.used(changes=True) as state:
        job = work.make().rows(part.start, part.stop)
        assert not isinstance(job, SumJob)
        _run(job.on(state), pool)  # type: ignore[arg-type]  # both are of the rows' format


def _run(job: HostJob, pool: HostPool | None) -> None:
    if pool is None:
        kernel.run(job)
    else:
        pool.run([job.encode()])


def _run_part(pieces: list[tuple[RowWork, int, int]], pool: HostPool | None) -> None:
    if pool is not None:
        pool.run([work.make().encode() for work, _, _ in pieces])
        return
    with torch.no_grad():
        for work, low, high in pieces:
            job = work.make()
            # Views cost a worker thread as much as small blocks do.
            kernel.run(job if high - low == work.shape[0] else job.rows(low, high))
