"""Gradient collector: takes each gradient in, and sends deferred columns to the host.

A split parameter's gradient waits until its bucket is full. Then the bucket is measured, its
important columns are kept, and the others are queued for the d2h lane. A resident's gradient is
kept whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.gradient_queue import StagedGradient
from zenflow.columns.layout import Block, Bucket, Layout, SplitParam
from zenflow.columns.local import local_of
from zenflow.device.base import AbstractDevice
from zenflow.errors import GradientError
from zenflow.lanes.completion import Completion
from zenflow.lanes.copies import Copy, CopyLane
from zenflow.lanes.lease import Lease, take
from zenflow.step.fresh.steps import FreshSteps
from zenflow.step.gradients.released import matches
from zenflow.step.gradients.ring import GradientRing, PackJob
from zenflow.step.step import Step
from zenflow.step.uploads import UploadGate
from zenflow.step.window_sketch import WindowSketch


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
    gate: UploadGate
    """Gate that starts uploads into weights after their last use in the step."""
    fresh: FreshSteps | None
    """Fresh steps; None under the published rule."""
    sketch: WindowSketch | None
    """Sketch of the gradients in open windows; None unless a controller asks for it."""
    ring: GradientRing | None
    """Ring into which gradients are packed before they leave, so that their own memory is free;
    None lets the lane pack them."""
    waiting: Callable[[], AbstractContextManager[None]]
    """Context that counts a wait for a slot of the ring as stall."""

    def take(
        self,
        step: Step,
        place: SplitParam | Resident,
        grad: Tensor,
        *,
        at_once: bool,
        is_own: bool,
    ) -> None:
        """Take one parameter's final gradient of this step; call it without grad mode.

        The gradient is measured with its bucket: when the bucket is full, or by `measure_rest`.

        Args:
            step: The step under way.
            place: Place of the parameter.
            grad: Gradient, of the parameter's shape, dtype and device.
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
            if step.gradients.is_complete:
                raise GradientError(
                    f"the gradient of {place.name} came after clip_grad_norm_(), for which ranks "
                    "have added up their norms: clip after the step's last backward"
                )
            grad = local_of(grad)
        if isinstance(place, Resident):
            step.gradients.resident[place] = grad
            return
        if self.ring is None and not is_own:  # the lane may read it long after the step
            grad = grad.clone()
        waiting = step.gradients.waiting.setdefault(place.bucket, {})
        waiting[place] = place.matrix(grad)
        bucket = self.layout.buckets[place.bucket]
        if at_once and len(waiting) == len(bucket.splits):
            step.gradients.starved += self.device.has_run_dry()
            self._measure(step, waiting)
            self.send_added(step)
            work = self.layout.shards.begin_adding(bucket.columns.energies)
            if work is None:
                self._send(bucket, step)
            else:
                # Backward goes on meanwhile: the next full bucket finds the sums there.
                step.gradients.adding = bucket, work

    def send_added(self, step: Step) -> None:
        """Send the full bucket whose column norms were summed over ranks, if there is one."""
        if step.gradients.adding is None:
            return
        (bucket, work), step.gradients.adding = step.gradients.adding, None
        work.wait()
        self._send(bucket, step)

    def measure_rest(self, step: Step) -> None:
        """Measure all gradients that have been taken."""
        if step.gradients.waiting:
            step.gradients.starved += self.device.has_run_dry()
        for waiting in step.gradients.waiting.values():
            self._measure(step, waiting)

    def _measure(self, step: Step, waiting: Mapping[SplitParam, Tensor]) -> None:
        """Measure gradients of a bucket, and keep their important columns; each once a step."""
        important = step.gradients.important
        new = {split: grad for split, grad in waiting.items() if split not in important}
        if not new:
            return
        kernels = self.device.kernels
        kernels.energies(
            [(grad, split.columns.energies, split.rows.energies) for split, grad in new.items()]
        )
        if self._divides:  # `_send_bucket` takes the columns of the quotients
            important.update(new)
        else:
            self._keep_important(step, new)
        if self.sketch is not None:
            for split, grad_OI in new.items():
                self.sketch.take(split, grad_OI)

    @property
    def _divides(self) -> bool:
        """Whether gradients are divided by the roots of their second moments before they leave."""
        return self.fresh is not None and self.fresh.divides

    def _keep_important(self, step: Step, grads: Mapping[SplitParam, Tensor]) -> None:
        """Keep the important columns of gradients."""
        columns = self.device.kernels.important(
            [(grad, split.important_columns) for split, grad in grads.items()]
        )
        step.gradients.important.update(zip(grads, columns, strict=True))

    def complete(self, step: Step) -> None:
        """Note that no more gradients come in this step, and all have been measured.

        All ranks then know all energies.
        """
        gradients = step.gradients
        if gradients.is_complete:
            return
        gradients.is_complete = True
        self.send_added(step)
        for split in self.layout.splits:
            if split not in gradients.important:
                split.columns.energies.zero_()
                split.rows.energies.zero_()
                if self.sketch is not None:
                    self.sketch.leave_out(split)
        if not gradients.copied:
            self.layout.shards.add_up(self.layout.columns.energies)
            return
        for bucket in self.layout.buckets:
            if bucket.index not in gradients.copied:
                self.layout.shards.add_up(bucket.columns.energies)

    def send_rest(self, step: Step) -> None:
        """Send all buckets that have not been sent."""
        gradients = step.gradients
        if self.fresh is not None and not gradients.copied:
            self.fresh.prepare(gradients.important)
        rest = [bucket for bucket in self.layout.buckets if bucket.index not in gradients.copied]
        # One mark for all copies: an event for each would cost more than they wait for.
        final = self.device.mark() if rest and not self._divides else None
        for bucket in rest:
            self._send(bucket, step, final)

    def _send(self, bucket: Bucket, step: Step, final: Any = None) -> None:
        """Take a bucket's fresh step, and queue its copies to the host, with its page here."""
        if bucket.page is None:
            self._send_bucket(bucket, step, final)
            return
        grads = step.gradients.waiting.get(bucket.index, {})
        moves = self.fresh is not None and self.fresh.moves(grads)
        lands = bool(self.gate.awaited(bucket.blocks, step.number))
        with bucket.held(changes=moves or lands):
            self._send_bucket(bucket, step, final)
        copied = step.gradients.copied
        if all(split.bucket in copied for split in self.layout.pages[bucket.page]):
            bucket.page.stream.leave(bucket.page)

    def _send_bucket(self, bucket: Bucket, step: Step, final: Any) -> None:
        """Take a bucket's fresh step, and queue its copies to the host.

        Args:
            bucket: The bucket.
            step: The step under way.
            final: Mark behind the computation of its gradients; None marks the present.
        """
        grads: Mapping[SplitParam, Tensor] = step.gradients.waiting.pop(bucket.index, {})
        step.gradients.copied[bucket.index] = []
        step.gradients.sent += grads
        if self.fresh is not None:
            grads = self.fresh.apply(bucket, grads)
        if self._divides and grads:
            self._keep_important(step, grads)
        staged = {
            block: self.stage(block)
            for split in grads
            for block in split.blocks
            if block.shape.num_deferred
        }
        own = {split: split.part.of(grad) for split, grad in grads.items()}
        jobs = [
            PackJob.of(
                block,
                own[block.split],
                gradient.values,
                None if self.fresh is None else self.fresh.move_in_pack(block),
            )
            for block, gradient in staged.items()
        ]
        device = self.device
        if self.ring is None:
            final = final or device.mark()
            # Uploads first: they are due in this step, the gradients later.
            if self.gate.awaited(bucket.blocks, step.number):
                self.gate.start_bucket(bucket, device.mark(), step.number, own)
            if jobs:
                columns = [(job.grad, job.columns, job.host) for job in jobs]
                run = partial(device.pack, columns, final)
                self._submit(step, bucket, jobs, staged, run)
            return
        mark = None
        for piece in self.ring.pieces(jobs):
            packed, slot = self.ring.pack(piece, self.waiting)
            mark = device.mark()
            rows = [room for room, _ in packed]
            self.gate.start_piece(piece, rows, slot, mark, step.number)
            run = partial(device.transfer, "d2h", packed, mark)
            self._submit(step, bucket, piece, staged, run, [slot])
        if self.gate.awaited(bucket.blocks, step.number):  # without a gradient in this step
            self.gate.start_bucket(bucket, mark or device.mark(), step.number, {})

    def _submit(
        self,
        step: Step,
        bucket: Bucket,
        jobs: Sequence[PackJob],
        staged: Mapping[Block, StagedGradient],
        run: Callable[[], Any],
        source: Sequence[Lease] = (),
    ) -> None:
        """Queue a copy of some of the bucket's columns, which reads the memory of `source`."""
        sent = Completion(f"the gradients' copy of step {step.number} (d2h)")
        num_bytes = sum(job.num_bytes for job in jobs)
        after = take(sent, reads=source, fills=[staged[job.block].lease for job in jobs])
        self.lane.submit(
            Copy(run=run, after=after, completion=sent, num_bytes=num_bytes, step=step.number)
        )
        step.gradients.copied[bucket.index].append(sent)
        step.gradients.num_bytes += num_bytes

    def drop(self, step: Step, places: Collection[SplitParam | Resident]) -> list[SplitParam]:
        """Forget these parameters' gradients of this step.

        Returns:
            The parameters whose gradients have left, and may have moved weights.
        """
        gradients = step.gradients
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
