"""Writes to weights that backward has passed: fresh steps, and landing updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from zenflow.columns.layout import Block, Bucket, SplitParam
    from zenflow.device.base import LateGradient
    from zenflow.lanes.completion import Completion
    from zenflow.step.fresh.steps import FreshSteps
    from zenflow.step.gradients.ring import PackJob
    from zenflow.step.uploads import UploadGate


@dataclass(eq=False, repr=False)
class PassedWeights:
    """Writes weights after their last use in the step."""

    gate: UploadGate
    """Gate that starts uploads of landing updates."""
    fresh: FreshSteps | None
    """Fresh steps; None under the published rule."""
    step: Callable[[], int]
    """Function that returns the number of the step under way."""

    def begin(self, inverse_scale: float = 1.0) -> None:
        """Get ready for the step's gradients, which are to be multiplied by `inverse_scale`."""
        if self.fresh is not None:
            self.fresh.begin(self.step(), self.gate.lands, inverse_scale)

    def prepare(self, present: Collection[SplitParam]) -> None:
        """Get ready for `move` of all buckets at once; all gradients have been measured."""
        self.begin()
        if self.fresh is not None:
            self.fresh.prepare(present)

    def lands(self, bucket: Bucket) -> bool:
        """Whether an upload into the bucket's weights is to begin in this step."""
        step = self.step()
        return any(
            block.pending is not None and self.gate.is_awaited(block, step)
            for block in bucket.blocks
        )

    def move(self, bucket: Bucket, grads: Mapping[SplitParam, Tensor]) -> None:
        """Take a bucket's fresh step with its gradients, (O, I)."""
        if self.fresh is not None:
            self.fresh.apply(bucket, grads)

    def start_uploads(self, bucket: Bucket, mark: Any, grads: Mapping[SplitParam, Tensor]) -> None:
        """Queue the uploads that land in a bucket's weights.

        Args:
            bucket: The bucket.
            mark: The device's position after the last use of the weights.
            grads: This host's rows of the bucket's gradients, (O, I). They are newer than the
                upload, so that the fresh step is applied on arrival.
        """

        def late(block: Block) -> LateGradient | None:
            grad_OI = grads.get(block.split)
            return None if grad_OI is None else self._late(block, grad_OI.t(), is_packed=False)

        self.gate.start_uploads(bucket.blocks, mark, self.step(), late)

    def start_parts(
        self, jobs: Sequence[PackJob], rows: Sequence[Tensor], mark: Any
    ) -> list[Completion]:
        """Queue the uploads that land on the columns of this piece of the ring.

        The piece's gradients are newer than the upload, so that the fresh step is applied on
        arrival.
        """
        step = self.step()
        parts = [
            (job.block, job.low, job.high, self._late(job.block, packed, is_packed=True))
            for job, packed in zip(jobs, rows, strict=True)
            if job.block.pending is not None and self.gate.lands(job.block, step)
        ]
        return self.gate.start_parts(parts, mark, step)

    def _late(self, block: Block, rows: Tensor, *, is_packed: bool) -> LateGradient | None:
        if self.fresh is None:
            return None
        return self.fresh.late(block.split, rows, is_packed=is_packed)
