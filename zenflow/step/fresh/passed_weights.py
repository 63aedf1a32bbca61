"""What weights go through once backward has passed them: the fresh step, and what lands."""

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
    """Writes weights that nothing computes with any more in this step."""

    gate: UploadGate
    """Starts uploads."""
    fresh: FreshSteps | None
    """Takes the fresh steps; the published rule has none."""
    step: Callable[[], int]
    """Function that returns the number of the step under way."""

    def begin(self, inverse_scale: float = 1.0) -> None:
        """Get ready for the step's gradients, which are to be multiplied by this."""
        if self.fresh is not None:
            self.fresh.begin(self.step(), self.gate.lands, inverse_scale)

    def prepare(self, present: Collection[SplitParam]) -> None:
        """Get ready for `move` of all buckets; all gradients that there are have been measured."""
        self.begin()
        if self.fresh is not None:
            self.fresh.prepare(present)

    def lands(self, bucket: Bucket) -> bool:
        """Whether an upload into the bucket's weights is to begin in this step."""
        step = self.step()
        return any(
            block.landing is not None and self.gate.is_awaited(block, step)
            for block in bucket.blocks
        )

    def move(self, bucket: Bucket, grads: Mapping[SplitParam, Tensor]) -> None:
        """Take a bucket's fresh step with its gradients, (O, I)."""
        if self.fresh is not None:
            self.fresh.apply(bucket, grads)

    def start_uploads(self, bucket: Bucket, mark: Any, grads: Mapping[SplitParam, Tensor]) -> None:
        """Begin what lands in a bucket after a mark.

        Args:
            bucket: The bucket.
            mark: The mark.
            grads: The host's rows of its gradients, (O, I), which come late for it.
        """

        def late(block: Block) -> LateGradient | None:
            grad_OI = grads.get(block.split)
            return None if grad_OI is None else self._late(block, grad_OI.t(), is_packed=False)

        self.gate.start_uploads(bucket.blocks, mark, self.step(), late)

    def start_parts(
        self, jobs: Sequence[PackJob], rows: Sequence[Tensor], mark: Any
    ) -> list[Completion]:
        """Begin what lands of a piece of the ring after a mark; its rows come late for it."""
        step = self.step()
        parts = [
            (job.block, job.low, job.high, self._late(job.block, packed, is_packed=True))
            for job, packed in zip(jobs, rows, strict=True)
            if job.block.landing is not None and self.gate.lands(job.block, step)
        ]
        return self.gate.start_parts(parts, mark, step)

    def _late(self, block: Block, rows: Tensor, *, is_packed: bool) -> LateGradient | None:
        if self.fresh is None:
            return None
        return self.fresh.late(block.split, rows, is_packed=is_packed)
