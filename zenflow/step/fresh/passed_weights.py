"""Writes to weights that backward has passed: fresh steps, and landing updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from zenflow.columns.layout import Block, Bucket, SplitParam
    from zenflow.device.base import LateGradient
    from zenflow.lanes.lease import Lease
    from zenflow.step.fresh.steps import FreshSteps
    from zenflow.step.gradients.ring import PackJob
    from zenflow.step.step import Step
    from zenflow.step.uploads import UploadGate


@dataclass(eq=False, repr=False)
class PassedWeights:
    """Writes weights after their last use in the step."""

    gate: UploadGate
    """Gate that starts uploads of landing updates."""
    fresh: FreshSteps | None
    """Fresh steps; None under the published rule."""

    def prepare(self, present: Collection[SplitParam]) -> None:
        """Get ready for `move` of all buckets at once; all gradients have been measured."""
        if self.fresh is not None:
            self.fresh.prepare(present)

    def lands(self, bucket: Bucket, step: Step) -> bool:
        """Whether an upload into the bucket's weights is to begin in this step."""
        return any(self.gate.is_awaited(block, step.number) for block in bucket.blocks)

    def move(self, bucket: Bucket, grads: Mapping[SplitParam, Tensor]) -> None:
        """Take a bucket's fresh step with its gradients, (O, I)."""
        if self.fresh is not None:
            self.fresh.apply(bucket, grads)

    def start_uploads(
        self, bucket: Bucket, mark: Any, grads: Mapping[SplitParam, Tensor], step: Step
    ) -> None:
        """Queue the uploads that land in a bucket's weights.

        Args:
            bucket: The bucket.
            mark: The device's position after the last use of the weights.
            grads: This host's rows of the bucket's gradients, (O, I). They are newer than the
                upload, so that the fresh step is applied on arrival.
            step: The step under way.
        """

        def late(block: Block) -> LateGradient | None:
            grad_OI = grads.get(block.split)
            return None if grad_OI is None else self._late(block, grad_OI.t(), is_packed=False)

        self.gate.start_uploads(bucket.blocks, mark, step.number, late)

    def start_parts(
        self,
        jobs: Sequence[PackJob],
        packed: Sequence[Tensor],
        slot: Lease,
        mark: Any,
        step: Step,
    ) -> None:
        """Queue the uploads that land on the columns of a piece of the ring.

        The piece's gradients are newer than the upload, so that the fresh step is applied on
        arrival.

        Args:
            jobs: The piece.
            packed: Its packed columns, (D, O) each.
            slot: Lease of their memory.
            mark: The device's position after the last use of the weights.
            step: The step under way.
        """
        parts = [
            (job.block, job.low, job.high, self._late(job.block, rows, is_packed=True))
            for job, rows in zip(jobs, packed, strict=True)
            if self.gate.lands(job.block, step.number)
        ]
        self.gate.start_parts(parts, mark, step.number, [slot])

    def _late(self, block: Block, rows: Tensor, *, is_packed: bool) -> LateGradient | None:
        if self.fresh is None:
            return None
        return self.fresh.late(block.split, rows, is_packed=is_packed)
