"""The host kernel's arithmetic in torch operations, for installations without the compiled one.

Each operation rounds as the C kernel's does. `zenflow.host.jobs` documents the jobs.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import torch
from torch import Tensor

from zenflow.host import e4m3
from zenflow.host.changes import mark
from zenflow.host.compact import Rounding, keys_of
from zenflow.host.jobs import AdamStep, CatchUpJob, CompactJob, HostJob, SumJob


@torch.no_grad()
def run(job: HostJob) -> None:
    """Do a job whose tensors have been checked."""
    if isinstance(job, SumJob):
        scaled = job.grad.to(torch.float32) * job.scale
        job.total.copy_(scaled if job.is_first else job.total + scaled)
    elif isinstance(job, CompactJob):
        _catch_up_compact(job)
    else:
        _catch_up(job)


def _catch_up_compact(job: CompactJob) -> None:
    numbers = job.state.numbers()
    upload = job.upload
    is_repeatable = upload is not None and upload.is_repeatable
    if upload is not None and upload.changes is not None:
        _repeat(CatchUpJob(*numbers, job.step, job.active, (), upload))
    first_pass = None if is_repeatable else upload
    _catch_up(CatchUpJob(*numbers, job.step, job.active, job.steps, first_pass))
    rows = job.active.nonzero().squeeze(1)
    if job.steps and len(rows):
        keys = keys_of(job.seed, job.step[rows])
        first = job.first + rows * job.stride
        rounding = Rounding.drawn(keys, first, job.state.high.shape[1])
        weight, exp_avg, exp_avg_sq = (tensor[rows] for tensor in numbers)
        job.state.put(rows, weight, exp_avg, exp_avg_sq, rounding)
    if is_repeatable:
        written = CatchUpJob(*job.state.numbers(), job.step, job.active, (), upload)
        _upload(written, rows, written.master)


def _catch_up(job: CatchUpJob) -> None:
    if job.upload is not None and job.upload.changes is not None:
        _repeat(job)
    rows = job.active.nonzero().squeeze(1)
    state = [tensor[rows] for tensor in (job.master, job.exp_avg, job.exp_avg_sq, job.step)]
    delta = torch.zeros_like(state[0])
    for step in job.steps:
        delta = _take(step, state, rows)
    for tensor, values in zip(
        (job.master, job.exp_avg, job.exp_avg_sq, job.step), state, strict=True
    ):
        tensor[rows] = values
    if job.upload is not None:
        _upload(job, rows, delta)


def _take(step: AdamStep, state: list[Tensor], rows: Tensor) -> Tensor:
    """Take a step with the rows' (master, exp_avg, exp_avg_sq, step); return its displacement."""
    assert step.grad is not None
    w, m, v, count = state
    own = step.grad[rows]
    is_short = own.dtype == torch.uint8
    grad = (e4m3.decode(own) if is_short else own.to(torch.float32)) * step.scale
    rate = ctypes.c_float(1.0 - step.beta1).value  # rounded first, as C and torch.lerp see it
    if rate < 0.5:
        m.add_((grad - m) * rate)
    else:
        m.copy_(grad + (grad - m) * (rate - 1.0))
    if v.shape == w.shape:  # else the gradient has been divided by its root
        v.mul_(step.beta2).add_((grad * (1.0 - step.beta2)).mul_(grad))
    count += 1
    delta = _displacement(step, m, v, count)
    w.mul_(step.decay).sub_(delta)
    return delta


def _displacement(step: AdamStep, m: Tensor, v: Tensor, count: Tensor) -> Tensor:
    """Return the displacement that the moments make after so many steps."""
    step_size, denom_scale = _row_scales(step, count)
    if v.shape != m.shape:
        return m * step_size.unsqueeze(1)
    root = v.double().sqrt().float()  # correctly rounded, which torch's float32 root is not always
    denom = root.mul_(denom_scale.reciprocal().unsqueeze(1)).add_(step.eps)
    return (m * step_size.unsqueeze(1)).div_(denom)


def _row_scales(step: AdamStep, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return lr / (1 - beta1^t) and sqrt(1 - beta2^t) by row, in Python's floats until the end."""
    known = {
        t: (step.lr / (1.0 - step.beta1**t), math.sqrt(1.0 - step.beta2**t))
        for t in set(count.tolist())
    }
    scales = [known[t] for t in count.tolist()]
    pairs = torch.tensor(scales, dtype=torch.float64, device="cpu").view(-1, 2)
    step_size, denom_scale = pairs.float().unbind(1)
    return step_size, denom_scale


def _upload(job: CatchUpJob, rows: Tensor, delta: Tensor) -> None:
    upload = job.upload
    assert upload is not None
    lead = ctypes.c_float(upload.lead).value
    whole = torch.zeros_like(job.master)
    leads = (job.step > 0) if lead else torch.zeros_like(job.step, dtype=torch.bool)
    own = leads.clone()
    if upload.repeats_last and len(job.steps):
        whole[rows] = delta
        own[rows] = False
    own_rows = own.nonzero().squeeze(1)
    if len(own_rows):
        whole[own_rows] = _displacement(
            upload.step, job.exp_avg[own_rows], job.exp_avg_sq[own_rows], job.step[own_rows]
        )
    moved = torch.where(leads.unsqueeze(1), job.master - whole * lead, job.master)
    if not upload.is_repeatable:
        upload.out.copy_(moved)
        return
    now = moved.to(upload.out.dtype)
    now.masked_fill_(now == 0, 0)  # without a sign
    if upload.changes is not None:
        mark(upload.changes.marks, upload.out, now)
    upload.out.copy_(now)


def _repeat(job: CatchUpJob) -> None:
    """Write the upload before once more, of rows that have taken no step since."""
    upload = job.upload
    assert upload is not None
    assert upload.changes is not None
    former = replace(upload, lead=upload.changes.lead, step=upload.changes.step, changes=None)
    _upload(replace(job, steps=(), upload=former), job.step[:0], job.master)
