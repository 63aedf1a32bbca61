"""The host's threads in C: jobs are handed over whole, and none of the rows is Python's work.

A Python thread for each core would ask for the interpreter a thousand times a step, and keep it
from the thread that launches the device's work. See `_host_pool.c`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from zenflow import kernel
from zenflow.adamw import Hyper

PIECE_ELEMENTS = 1 << 17
"""Elements that a thread takes at once: half a millisecond's work, so that all end together."""

_ACCUMULATE, _MOMENTS, _ADAMW = range(3)


class HostJob(ctypes.Structure):
    """One block's work, as `_host_pool.c` declares it. It holds addresses and no references."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("is_first", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("master", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("acc", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("active", ctypes.c_void_p),
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("prediction", ctypes.c_float),
        ("count", ctypes.c_float),
    )


def accumulation(acc: Tensor, grad: Tensor, shape: tuple[int, int], *, first: bool) -> HostJob:
    """Return what `kernel.accumulate` does to rows, shape (R, O); the scale comes with `run`."""
    return HostJob(
        kind=_ACCUMULATE,
        grad_dtype=kernel.DTYPE_CODES[grad.dtype],
        is_first=first,
        rows=shape[0],
        cols=shape[1],
        acc=acc.data_ptr(),
        grad=grad.data_ptr(),
    )


def moments(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    grad: Tensor,
    shape: tuple[int, int],
    hyper: Hyper,
) -> HostJob:
    """Return what `kernel.moments` does to all rows, shape (R, O), each a step on: (R,), int64."""
    return HostJob(
        kind=_MOMENTS,
        grad_dtype=kernel.DTYPE_CODES[grad.dtype],
        rows=shape[0],
        cols=shape[1],
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
        step=step.data_ptr(),
        grad=grad.data_ptr(),
        beta1=hyper.beta1,
        beta2=hyper.beta2,
    )


def adamw(
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    shape: tuple[int, int],
    *,
    grad: Tensor | None,
    acc: Tensor | None,
    count: int,
    active: Tensor,
    hyper: Hyper,
    lr: float,
    decay: float,
    prediction: float,
) -> HostJob:
    """Return what `kernel.adamw` does to all rows, shape (R, O).

    Args:
        state: master, exp_avg, exp_avg_sq, and the steps taken by each row, (R,), int64: active
            rows count one on if there is a gradient.
        out: As in `kernel.adamw`.
        shape: (R, O).
        grad: As in `kernel.adamw`; its scale comes with `run`.
        acc: As in `kernel.adamw`.
        count: As in `kernel.adamw`.
        active: As in `kernel.adamw`.
        hyper: Betas and eps.
        lr: Learning rate before the bias correction.
        decay: As in `kernel.adamw`.
        prediction: As in `kernel.adamw`.
    """
    master, exp_avg, exp_avg_sq, step = state
    return HostJob(
        kind=_ADAMW,
        grad_dtype=0 if grad is None else kernel.DTYPE_CODES[grad.dtype],
        out_dtype=kernel.DTYPE_CODES[out.dtype],
        rows=shape[0],
        cols=shape[1],
        master=master.data_ptr(),
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
        acc=None if acc is None else acc.data_ptr(),
        grad=None if grad is None else grad.data_ptr(),
        out=out.data_ptr(),
        step=step.data_ptr(),
        active=active.data_ptr(),
        lr=lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        decay=decay,
        prediction=prediction,
        count=count,
    )


class HostPool:
    """C threads that help their callers with jobs. Owned by the optimizer; `close` ends them."""

    def __init__(self, library: ctypes.CDLL, num_helpers: int) -> None:
        """Start the threads, of which there may be none: callers work themselves.

        Raises:
            RuntimeError: The system gives no more.
        """
        self._run = library.zenflow_pool_run
        self._run.argtypes = (
            *(ctypes.c_void_p, ctypes.c_void_p),
            *(ctypes.c_int64, ctypes.c_float, ctypes.c_int64),
        )
        self._run.restype = None
        self._close = library.zenflow_pool_close
        self._close.argtypes, self._close.restype = (ctypes.c_void_p,), None
        library.zenflow_pool_open.argtypes = (ctypes.c_int,)
        library.zenflow_pool_open.restype = ctypes.c_void_p
        self._pool = library.zenflow_pool_open(num_helpers)
        if not self._pool:
            raise RuntimeError(
                f"the system gives no {num_helpers} threads for the host's update: choose fewer "
                "host_threads, or raise the limit on processes (ulimit -u)"
            )

    @classmethod
    def open(cls, num_helpers: int) -> HostPool | None:
        """Return a pool, or None where the host's updates run on torch operations."""
        library = kernel.library()
        return None if library is None else cls(library, num_helpers)

    def run(self, jobs: Sequence[HostJob], factor: float) -> None:
        """Do all rows of all jobs, gradients times the clip factor; any thread may call it.

        What the jobs point to must stay alive until then.
        """
        array = (HostJob * len(jobs))(*jobs)
        self._run(self._pool, array, len(jobs), factor, PIECE_ELEMENTS)

    def close(self) -> None:
        """End the threads; no call may be under way."""
        if self._pool:
            self._close(self._pool)
            self._pool = None
