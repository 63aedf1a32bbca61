"""Gradient collector: takes each gradient in, and sends deferred columns to the host.

A split parameter's gradient waits until its bucket is full. Then the bucket is measured, its
important columns are kept, and the others are queued for the d2h lane. A resident's gradient is
kept whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.gradient_queue import StagedGradient
from zenflow.columns.layout import Block, Bucket, Layout, SplitParam
from zenflow.columns.local import local_of
from zenflow.device.base import AbstractDevice
from zenflow.errors import GradientError
from zenflow.lanes.completion import Completion, unique
from zenflow.lanes.copies import Copy, CopyLane
from zenflow.step.fresh.passed_weights import PassedWeights
from zenflow.step.gradients.released import matches
from zenflow.step.gradients.ring import GradientRing, PackJob
from zenflow.step.window_sketch import WindowSketch

if TYPE_CHECKING:
    from zenflow.columns.shards import Adding


@dataclass(slots=True, eq=False)
class StepGradients:
    """The gradients of the step under way."""

    important: dict[SplitParam, Tensor] = field(default_factory=dict)
    """Important columns of each parameter, (O, K) in the gradient's dtype."""
    resident: dict[Resident, Tensor] = field(default_factory=dict)
    """Whole gradients of the parameters that stay on the device."""
    waiting: dict[int, dict[SplitParam, Tensor]] = field(default_factory=dict)
    """Gradients (O, I) that are not on their way yet, by the index of their bucket."""
    adding: tuple[Bucket, Adding] | None = None
    """Full bucket whose column norms are being summed over ranks; None where there is none."""
    copied: dict[int, list[Completion]] = field(default_factory=dict)
    """Copies to the host, by the index of the bucket."""
    is_complete: bool = False
    """Whether no more gradients come in."""
    sent: list[SplitParam] = field(default_factory=list)
    """Parameters whose gradients have left, and may have moved weights."""
    num_bytes: int = 0
    """Number of bytes that are copied to the host."""


@dataclass(eq=False, repr=False)
class GradientCollector:
    """Takes gradients in any order, and sends each full bucket to the host."""

    device: AbstractDevice
    """Device that the gradients are on."""
    layout: Layout
    """Places of all parameters."""
    lane: CopyLane
    """Lane that carries gradients to the host."""
    stage: Callable[[Block], StagedGradient]
    """Function that says where on the host a block's gradient goes."""
    passed: PassedWeights
    """Writer of a bucket's weights after their last use in the step."""
    sketch: WindowSketch | None
    """Sketch of the gradients in open windows; None unless a controller asks for it."""
    ring: GradientRing | None
    """Ring into which gradients are packed before they leave, so that their own memory is free;
    None lets the lane pack them."""
    waiting: Callable[[], AbstractContextManager[None]]
    """Context that counts a wait for a slot of the ring as stall."""
    gradients: StepGradients = field(default_factory=StepGradients, init=False)
    """Gradients of the step under way."""

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has come in since the last step."""
        gradients = self.gradients
        return not (gradients.important or gradients.waiting or gradients.resident)

    def take(
        self,
        place: SplitParam | Resident,
        grad: Tensor,
        step: int,
        *,
        at_once: bool,
        is_own: bool,
    ) -> None:
        """Take one parameter's final gradient of this step; call it without grad mode.

        The gradient is measured with its bucket: when the bucket is full, or by `measure_rest`.

        Args:
            place: Place of the parameter.
            grad: Gradient, of the parameter's shape, dtype and device.
            step: The step under way.
            at_once: Whether to measure and send its bucket as soon as that is full; else
                `measure_rest` and `send_rest` do.
            is_own: Whether nobody else can write to the gradient's memory. Memory of DDP's buckets
                is not its own: the next backward writes there.

        Raises:
            GradientError: The gradient is sparse, or its shape, dtype or device is not the
                parameter's.
        """
        if not matches(grad, place.param):
            raise GradientError(
                f"the gradient of {place.name} is {grad.layout} {tuple(grad.shape)} {grad.dtype} "
                f"on {grad.device}, but must be dense {tuple(place.param.shape)} "
                f"{place.param.dtype} on {place.param.device}: make embeddings with sparse=False "
                "and don't replace .grad by a tensor of another kind"
            )
        if place.is_sharded:
            if self.gradients.is_complete:
                raise GradientError(
                    f"the gradient of {place.name} came after clip_grad_norm_(), for which ranks "
                    "have added up their norms: clip after the step's last backward"
                )
            grad = local_of(grad)
        if isinstance(place, Resident):
            self.gradients.resident[place] = grad
            return
        if self.ring is None and not is_own:  # the lane may read it long after the step
            grad = grad.clone()
        waiting = self.gradients.waiting.setdefault(place.bucket, {})
        waiting[place] = place.matrix(grad)
        bucket = self.layout.buckets[place.bucket]
        if at_once and len(waiting) == len(bucket.splits):
            self._measure(waiting)
            self.send_added(step)
            work = self.layout.shards.begin_adding(bucket.columns.energies)
            if work is None:
                self._send(bucket, step)
            else:
                # Backward goes on meanwhile: the next full bucket finds the sums there.
                self.gradients.adding = bucket, work

    def send_added(self, step: int) -> None:
        """Send the full bucket whose column norms were summed over ranks, if there is one."""
        if self.gradients.adding is None:
            return
        (bucket, work), self.gradients.adding = self.gradients.adding, None
        work.wait()
        self._send(bucket, step)

    def measure_rest(self) -> None:
        """Measure all gradients that have been taken."""
        for waiting in self.gradients.waiting.values():
            self._measure(waiting)

    def _measure(self, waiting: Mapping[SplitParam, Tensor]) -> None:
        """Measure gradients of a bucket, and keep their important columns; each once a step."""
        important = self.gradients.important
        new = {split: grad for split, grad in waiting.items() if split not in important}
        if not new:
            return
        self.device.energies(
            [(grad, split.columns.energies, split.rows.energies) for split, grad in new.items()]
        )
        for split, grad_OI in new.items():
            important[split] = grad_OI.index_select(1, split.important_columns)
            if self.sketch is not None:
                self.sketch.take(split, grad_OI)

    def complete(self, step: int) -> None:
        """Note that no more gradients come in this step, and all have been measured.

        All ranks then know all energies.
        """
        if self.gradients.is_complete:
            return
        self.gradients.is_complete = True
        self.send_added(step)
        for split in self.layout.splits:
            if split not in self.gradients.important:
                split.columns.energies.zero_()
                split.rows.energies.zero_()
                if self.sketch is not None:
                    self.sketch.leave_out(split)
        if not self.gradients.copied:
            self.layout.shards.add_up(self.layout.columns.energies)
            return
        for bucket in self.layout.buckets:
            if bucket.index not in self.gradients.copied:
                self.layout.shards.add_up(bucket.columns.energies)

    def send_rest(self, step: int) -> None:
        """Send all buckets that have not been sent."""
        if not self.gradients.copied:
            self.passed.prepare(self.gradients.important)
        rest = [
            bucket for bucket in self.layout.buckets if bucket.index not in self.gradients.copied
        ]
        # One mark for all copies: an event for each would cost more than they wait for.
        final = self.device.mark() if rest else None
        for bucket in rest:
            self._send(bucket, step, final)

    def _send(self, bucket: Bucket, step: int, final: Any = None) -> None:
        """Take a bucket's fresh step, and queue its copies to the host.

        Args:
            bucket: The bucket.
            step: The step under way.
            final: Mark behind the computation of its gradients; None marks the present.
        """
        grads = self.gradients.waiting.pop(bucket.index, {})
        self.gradients.copied[bucket.index] = []
        self.gradients.sent += grads
        self.passed.begin()
        self.passed.move(bucket, grads)
        staged = {
            block: self.stage(block)
            for split in grads
            for block in split.blocks
            if block.shape.num_deferred
        }
        own = {split: split.part.of(grad) for split, grad in grads.items()}
        jobs = [
            PackJob.of(block, own[block.split], gradient.values)
            for block, gradient in staged.items()
        ]
        device = self.device
        if self.ring is None:
            final = final or device.mark()
            # Uploads first: they are due in this step, the gradients later.
            if self.passed.lands(bucket):
                self.passed.start_uploads(bucket, device.mark(), own)
            if jobs:
                columns = [(job.grad, job.columns, job.host) for job in jobs]
                self._submit(bucket, jobs, staged, self._copy(step),
                             partial(device.pack, columns, final), step)  # fmt: skip
            return
        mark = None
        for piece in self.ring.pieces(jobs):
            sent = self._copy(step)
            packed = self.ring.pack(piece, sent, self.waiting)
            mark = device.mark()
            rows = [room for room, _ in packed]
            self.ring.hold(self.passed.start_parts(piece, rows, mark))
            self._submit(bucket, piece, staged, sent, partial(device.send, packed, mark), step)
        if self.passed.lands(bucket):  # what is left to land has no gradient in this step
            self.passed.start_uploads(bucket, mark or device.mark(), {})

    @staticmethod
    def _copy(step: int) -> Completion:
        return Completion(f"the gradients' copy of step {step} (d2h)")

    def _submit(
        self,
        bucket: Bucket,
        jobs: Sequence[PackJob],
        staged: Mapping[Block, StagedGradient],
        sent: Completion,
        run: Callable[[], Any],
        step: int,
    ) -> None:
        """Queue a copy of some of the bucket's columns."""
        num_bytes = sum(job.num_bytes for job in jobs)
        # The host has read what was in these buffers before.
        after = unique(
            before
            for job in jobs
            for before in staged[job.block].after
            if not before.has_succeeded
        )
        self.lane.submit(
            Copy(run=run, after=after, completion=sent, num_bytes=num_bytes, step=step)
        )
        for job in jobs:
            staged[job.block].copied.append(sent)
        self.gradients.copied[bucket.index].append(sent)
        self.gradients.num_bytes += num_bytes

    def drop(self, places: Collection[SplitParam | Resident]) -> list[SplitParam]:
        """Forget these parameters' gradients of this step.

        Returns:
            The parameters whose gradients have left, and may have moved weights.
        """
        gradients = self.gradients
        for place in places:
            if isinstance(place, Resident):
                gradients.resident.pop(place, None)
                continue
            gradients.important.pop(place, None)
            gradients.waiting.get(place.bucket, {}).pop(place, None)
            place.columns.energies.zero_()
            place.rows.energies.zero_()
            if self.sketch is not None:
                self.sketch.leave_out(place)
        moved = [split for split in gradients.sent if split in places]
        gradients.sent = [split for split in gradients.sent if split not in places]
        return moved

    def discard(self) -> None:
        """Forget this step's gradients; copies under way end in staging, which is overwritten."""
        self.gradients = StepGradients()
        if self.ring is not None:
            self.ring.restart()
