"""Jobs of the host on the rows of one block, as Python objects and as C structures.

`zenflow.host.kernel` runs one, `zenflow.host.pool` many on several threads. Shapes: R = rows
(columns of the model's matrix), O = elements per row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zenflow.host.compact import CompactState
from zenflow.host.float_state import FloatState

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The C kernel's number of each dtype."""
GRADIENT_CODES = {**DTYPE_CODES, torch.uint8: 3}
"""The C kernel's number of each gradient's dtype; uint8 is that of `zenflow.host.e4m3`'s rows."""
_SUM, _CATCH_UP, _COMPACT = range(3)
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double


class CStep(ctypes.Structure):
    """`AdamStep` as `csrc/kernel.h` declares it."""

    _fields_ = (
        *(("grad", _POINTER), ("lr", _DOUBLE), ("beta1", _DOUBLE), ("beta2", _DOUBLE)),
        *(("scale", _FLOAT), ("eps", _FLOAT), ("decay", _FLOAT)),
    )


class CJob(ctypes.Structure):
    """`HostJob` as `csrc/kernel.h` declares it.

    It holds addresses and no references: its maker keeps the tensors alive.
    """

    _fields_ = (
        *(("kind", _INT), ("grad_dtype", _INT), ("out_dtype", _INT), ("is_first", _INT)),
        *(("repeats_last", _INT), ("lead", _FLOAT), ("rows", _LONG), ("cols", _LONG)),
        *(("sum", _POINTER), ("master", _POINTER), ("exp_avg", _POINTER)),
        *(("exp_avg_sq", _POINTER), ("step", _POINTER), ("active", _POINTER)),
        *(("steps", ctypes.POINTER(CStep)), ("num_steps", _LONG)),
        *(("out", _POINTER), ("upload", CStep)),
        *((name, _POINTER) for name in ("high", "low", "exp_avg8", "exp_avg_sq8")),
        *(("exponents1", _POINTER), ("exponents2", _POINTER)),
        *(("first", _LONG), ("stride", _LONG), ("seed", ctypes.c_uint64)),
        *(("repeatable", _INT), ("former_lead", _FLOAT), ("former", CStep), ("marks", _POINTER)),
        ("factored", _INT),
    )


@dataclass(frozen=True, slots=True)
class AdamStep:
    """One AdamW step: settings and gradient."""

    lr: float
    """Learning rate of the step's parameter group."""
    beta1: float
    """Decay of the first moment."""
    beta2: float
    """Decay of the second moment."""
    eps: float
    """Addend of the denominator."""
    decay: float
    """Factor on the weights, 1 - lr * weight_decay."""
    scale: float = 1.0
    """Factor on the gradient, taken as a float32."""
    grad: Tensor | None = None
    """Gradient, float32, bfloat16 or float16 (R, O), or in eight bits as `zenflow.host.e4m3` has
    it, uint8 (R, O + ceil(O / 64)); None where only the settings are used."""

    def encode(self) -> CStep:
        """Return the step as a C structure."""
        grad = None if self.grad is None else self.grad.data_ptr()
        return CStep(grad, self.lr, self.beta1, self.beta2, self.scale, self.eps, self.decay)


def _encode_steps(steps: Sequence[AdamStep]) -> ctypes.Array[CStep]:
    return (CStep * len(steps))(*(step.encode() for step in steps))


@dataclass(frozen=True, slots=True)
class SumJob:
    """Addition of a gradient to a sum: `total = scale * grad`, or `+=`, rounded in between."""

    total: Tensor
    """Sum, float32 (R, O), changed in place."""
    grad: Tensor
    """Gradient, float32, bfloat16 or float16 (R, O), not overlapping the sum."""
    scale: float
    """Factor on the gradient, taken as a float32."""
    is_first: bool
    """Whether the sum begins with this gradient, its old value forgotten."""

    def rows(self, low: int, high: int) -> SumJob:
        """Return the job on rows low..high-1 alone."""
        return replace(self, total=self.total[low:high], grad=self.grad[low:high])

    def encode(self) -> CJob:
        """Return the job as a C structure."""
        step = AdamStep(0.0, 0.0, 0.0, 0.0, 0.0, self.scale, self.grad)
        return CJob(
            kind=_SUM,
            grad_dtype=DTYPE_CODES[self.grad.dtype],
            is_first=self.is_first,
            rows=self.total.shape[0],
            cols=self.total.shape[1],
            sum=self.total.data_ptr(),
            steps=_encode_steps([step]),
            num_steps=1,
        )


@dataclass(frozen=True, slots=True)
class Changes:
    """Marks of the weights in which an upload differs from the one before.

    The upload before was repeatable, and its rows have taken no step since. So the pass finds it
    again, by its settings, in the state that it reads.
    """

    marks: Tensor
    """Marks, uint8 (R, 8 ceil(O / 64)), as `zenflow.host.changes` has them; written."""
    lead: float
    """Lead of the upload before."""
    step: AdamStep
    """Settings of the displacement in the upload before; a gradient in them is ignored."""


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload's weights: the master, moved on by momentum along the last displacement."""

    out: Tensor
    """Weights to upload, float32, bfloat16 or float16 (R, O), rounded to nearest even."""
    lead: float
    """Factor on the displacement by which the upload runs ahead of the master."""
    step: AdamStep
    """Settings by which the displacement is computed; a gradient in them is ignored."""
    repeats_last: bool
    """Whether `step` is the last step taken, so that its displacement is known already."""
    is_repeatable: bool = False
    """Whether a later pass can find the upload again: of weights of two bytes, it is of the state
    as this pass leaves it, rounded where that is, and its zeros have no sign."""
    changes: Changes | None = None
    """Marks of the weights that are others than in the upload before; None for none. Only for a
    repeatable upload, whose `out` overlaps no gradient."""

    def rows(self, part: slice) -> Upload:
        """Return the upload of a slice of the rows."""
        changes = self.changes
        if changes is not None:
            changes = replace(changes, marks=changes.marks[part])
        return replace(self, out=self.out[part], changes=changes)


@dataclass(frozen=True, slots=True)
class CatchUpJob:
    """A catch-up pass: AdamW steps that wait, taken in order in one pass over the rows' state.

    One step with gradient `g = scale * grad` is torch.optim.AdamW's: `m = lerp(m, g, 1 - beta1)`,
    `v = beta2 * v + (1 - beta2) * g^2`, `delta = lr / (1 - beta1^t) * m / (sqrt(v) * (1 /
    sqrt(1 - beta2^t)) + eps)`, `w = decay * w - delta`, t being the row's count with this step.
    Inactive rows take no step. Afterwards every row's `out = cast(w - lead * delta)`.

    Factored state has no second moments. Its gradients come divided by their roots, so that
    `delta = lr / (1 - beta1^t) * m`.

    All tensors are contiguous and on the CPU. None may overlap another, but `out` may be the
    first step's gradient.
    """

    master: Tensor
    """Weights, float32 (R, O), changed in place; so are the moments and the counts."""
    exp_avg: Tensor
    """First moments, float32 (R, O)."""
    exp_avg_sq: Tensor
    """Second moments, float32 (R, O); (R, 0) in factored state."""
    step: Tensor
    """Number of steps that each row has taken, int64 (R,)."""
    active: Tensor
    """Flags of the rows that take the steps, uint8 (R,)."""
    steps: Sequence[AdamStep]
    """Steps to take; all gradients are of one dtype."""
    upload: Upload | None = None
    """Upload at the end of the pass; None for a pass without one."""

    @property
    def is_factored(self) -> bool:
        """Whether there are no second moments."""
        return self.exp_avg_sq.shape != self.master.shape

    def on(self, state: FloatState) -> CatchUpJob:
        """Return the job on the state of its rows, which has come to memory."""
        master, exp_avg, exp_avg_sq = state.tensors()
        return replace(self, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)

    def rows(self, low: int, high: int) -> CatchUpJob:
        """Return the job on rows low..high-1 alone."""
        part = slice(low, high)
        upload = self.upload
        return CatchUpJob(
            *(self.master[part], self.exp_avg[part], self.exp_avg_sq[part], self.step[part]),
            self.active[part],
            [replace(step, grad=step.grad[part]) for step in self.steps if step.grad is not None],
            None if upload is None else upload.rows(part),
        )

    def encode(self) -> CJob:
        """Return the job as a C structure."""
        job = CJob(
            kind=_CATCH_UP,
            rows=self.master.shape[0],
            cols=self.master.shape[1],
            master=self.master.data_ptr(),
            exp_avg=self.exp_avg.data_ptr(),
            exp_avg_sq=self.exp_avg_sq.data_ptr(),
            step=self.step.data_ptr(),
            active=self.active.data_ptr(),
            steps=_encode_steps(self.steps),
            num_steps=len(self.steps),
            factored=self.is_factored,
        )
        _encode_gradients_and_upload(job, self.steps, self.upload)
        return job


@dataclass(frozen=True, slots=True)
class CompactJob:
    """A catch-up pass over compact state: `CatchUpJob`'s, with the state rounded after all steps.

    Rows that take no step are not rounded again. The upload is of the numbers before rounding, or
    of the rounded ones if it is repeatable.
    """

    state: CompactState
    """State of the rows, changed in place; so are the counts."""
    step: Tensor
    """Number of steps that each row has taken, int64 (R,)."""
    active: Tensor
    """Flags of the rows that take the steps, uint8 (R,)."""
    steps: Sequence[AdamStep]
    """Steps to take, `MOST_WAITING` at most; all gradients are of one dtype."""
    upload: Upload | None
    """Upload at the end of the pass; None for a pass without one."""
    first: int
    """Number of the first row's first element in the whole parameter."""
    stride: int
    """Distance from one row's first element to the next one's."""
    seed: int
    """64-bit number of the run and the parameter, which random bits follow from."""

    def on(self, state: CompactState) -> CompactJob:
        """Return the job on the state of its rows, which has come to memory."""
        return replace(self, state=state)

    def rows(self, low: int, high: int) -> CompactJob:
        """Return the job on rows low..high-1 alone."""
        part, upload = slice(low, high), self.upload
        return replace(
            self,
            state=self.state.rows(part),
            step=self.step[part],
            active=self.active[part],
            steps=[replace(s, grad=s.grad[part]) for s in self.steps if s.grad is not None],
            upload=None if upload is None else upload.rows(part),
            first=self.first + low * self.stride,
        )

    def encode(self) -> CJob:
        """Return the job as a C structure."""
        state = self.state
        job = CJob(
            kind=_COMPACT,
            rows=state.high.shape[0],
            cols=state.high.shape[1],
            step=self.step.data_ptr(),
            active=self.active.data_ptr(),
            steps=_encode_steps(self.steps),
            num_steps=len(self.steps),
            high=state.high.data_ptr(),
            low=state.low.data_ptr(),
            exp_avg8=state.exp_avg.data_ptr(),
            exp_avg_sq8=state.exp_avg_sq.data_ptr(),
            exponents1=state.exp_avg_exponent.data_ptr(),
            exponents2=state.exp_avg_sq_exponent.data_ptr(),
            first=self.first,
            stride=self.stride,
            seed=self.seed,
            factored=not state.HAS_SECOND,
        )
        _encode_gradients_and_upload(job, self.steps, self.upload)
        return job


def _encode_gradients_and_upload(
    job: CJob, steps: Sequence[AdamStep], upload: Upload | None
) -> None:
    """Fill in the gradients' dtype and the upload."""
    if steps and steps[0].grad is not None:
        job.grad_dtype = GRADIENT_CODES[steps[0].grad.dtype]
    if upload is not None:
        job.out = upload.out.data_ptr()
        job.out_dtype = DTYPE_CODES[upload.out.dtype]
        job.lead = upload.lead
        job.upload = upload.step.encode()
        job.repeats_last = upload.repeats_last
        job.repeatable = upload.is_repeatable
        if upload.changes is not None:
            job.marks = upload.changes.marks.data_ptr()
            job.former = upload.changes.step.encode()
            job.former_lead = upload.changes.lead


HostJob = SumJob | CatchUpJob | CompactJob
"""Work on the rows of one block, which may be cut between any two rows."""
