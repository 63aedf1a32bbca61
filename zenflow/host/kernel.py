"""The arithmetic of the host side: AdamW steps in one pass over memory, and sums of gradients.

Compiled C where the package was installed with a compiler, torch operations elsewhere. Both follow
`torch.optim.AdamW` operation by operation in float32, but for one division by a constant that is a
multiplication, and agree bit for bit, except that the C kernel takes subnormal float32 values
(below 1.2e-38 in size) for zero. Every operation is elementwise: any cut of the rows, or of the
steps, into calls gives the same bits. Calls into C give up the interpreter lock and start no
threads; the fallback's threads are torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from zenflow.host import torch_kernel
from zenflow.host.compact import CompactState
from zenflow.host.jobs import (
    DTYPE_CODES,
    GRADIENT_CODES,
    AdamStep,
    CompactJob,
    HostJob,
    SumJob,
    Upload,
)
from zenflow.host.library import c_library
from zenflow.host_state import MOST_WAITING, gradient_width, mark_bytes, num_groups

_FLOAT32 = (torch.float32,)
_HALF = (torch.bfloat16, torch.float16)


def active_kernel() -> Literal["c", "torch"]:
    """Return the name of the kernel that runs host updates in this process: "c" or "torch".

    The environment variable `ZENFLOW_KERNEL`, read once, forces the fallback by the value `torch`.
    A fallback is logged once, as a warning with its reason.

    Raises:
        ValueError: `ZENFLOW_KERNEL` is neither `c` nor `torch`.
    """
    return "torch" if c_library() is None else "c"


def run(job: HostJob) -> None:
    """Do a job on the calling thread.

    Raises:
        ValueError: A tensor's shape, dtype, layout or device does not fit the job.
    """
    _check_job(job)
    library = c_library()
    if library is None:
        torch_kernel.run(job)
    else:
        encoded = job.encode()
        library.zenflow_run(ctypes.byref(encoded), 0, encoded.rows)


def _check_job(job: HostJob) -> None:
    if isinstance(job, SumJob):
        _check_matrix("total", job.total)
        _check("grad", job.grad, job.total.shape, DTYPE_CODES)
        return
    if isinstance(job, CompactJob):
        shape = job.state.high.shape
        _check_compact(job.state)
        if len(job.steps) > MOST_WAITING:
            raise ValueError(
                f"a pass takes {MOST_WAITING} steps at most, but has {len(job.steps)}"
            )
    else:
        shape = job.master.shape
        _check_matrix("master", job.master)
        _check("exp_avg", job.exp_avg, shape, _FLOAT32)
        _check("exp_avg_sq", job.exp_avg_sq, (shape[0], 0) if job.is_factored else shape, _FLOAT32)
    _check("step", job.step, shape[:1], (torch.int64,))
    _check("active", job.active, shape[:1], (torch.uint8,))
    _check_gradients(job.steps, job.upload, shape)


def _check_gradients(
    steps: Sequence[AdamStep], upload: Upload | None, shape: Sequence[int]
) -> None:
    dtypes: Collection[torch.dtype] = GRADIENT_CODES
    num_rows, num_elements = shape
    for index, step in enumerate(steps):
        if step.grad is None:
            raise ValueError(f"step {index} has no gradient: leave it out")
        is_short = step.grad.dtype == torch.uint8
        width = gradient_width("e4m3" if is_short else "model", num_elements)
        _check(f"the gradient of step {index}", step.grad, (num_rows, width), dtypes)
        dtypes = (step.grad.dtype,)
    if upload is not None:
        _check("out", upload.out, shape, _HALF if upload.is_repeatable else DTYPE_CODES)
        if upload.changes is not None:
            marks = (num_rows, mark_bytes(num_elements))
            _check("marks", upload.changes.marks, marks, (torch.uint8,))


def _check_compact(state: CompactState) -> None:
    shape: tuple[int, ...] = state.high.shape
    _check_matrix("high", state.high, (torch.bfloat16,))
    _check("low", state.low, shape, (torch.int8,))
    _check("exp_avg", state.exp_avg, shape, (torch.uint8,))
    groups = (shape[0], num_groups(shape[1]))
    _check("exp_avg_exponent", state.exp_avg_exponent, groups, (torch.uint8,))
    has_second = int(state.HAS_SECOND)
    shape, groups = ((shape[0], has_second * width) for width in (shape[1], groups[1]))
    _check("exp_avg_sq", state.exp_avg_sq, shape, (torch.uint8,))
    _check("exp_avg_sq_exponent", state.exp_avg_sq_exponent, groups, (torch.uint8,))


def _check_matrix(name: str, tensor: Tensor, dtypes: Collection[torch.dtype] = _FLOAT32) -> None:
    if tensor.dim() != 2:
        raise ValueError(
            f"{name} must be a matrix (R, O), but has shape {tuple(tensor.shape)}: "
            "pass a view of columns as rows"
        )
    _check(name, tensor, tensor.shape, dtypes)


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
