"""The step under way: all facts of one step, from its first gradient to its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.layout import Block, Bucket, SplitParam
from zenflow.columns.upload_pool import UploadBuffer
from zenflow.device.base import HostValues
from zenflow.lanes.completion import Completion
from zenflow.rule.adamw import Hyper

if TYPE_CHECKING:
    from zenflow.columns.shards import Adding


@dataclass(slots=True, eq=False)
class StepGradients:
    """The gradients of a step."""

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
    starved: int = 0
    """Number of times that the device had run dry when gradients were to be measured."""

    def __bool__(self) -> bool:
        """Whether any gradient has come in."""
        return bool(self.important or self.waiting or self.resident)


@dataclass(slots=True, eq=False, kw_only=True)
class Step:
    """A step, which begins with its first gradient."""

    number: int
    """Number of the step, from 1."""
    lag: int
    """Number of steps from the start of this step's updates to their landing."""
    hypers: Sequence[Hyper] = ()
    """AdamW's settings of each parameter group, read at the first gradient and again by
    `step()`."""
    inverse_scale: float = 1.0
    """Factor that undoes the loss scale."""
    gradients: StepGradients = field(default_factory=StepGradients)
    """Gradients of the step: the last ones of all windows that end with the step."""
    values: HostValues = field(init=False)
    """Measured values on their way to the host, once all gradients are there. The first is the
    factor on gradients: clip factor times inverse loss scale."""
    buffer: UploadBuffer | None = None
    """Memory of the updates that start at this step; None at a lag of 0, or without updates."""

    def has_gradient(self, block: Block) -> bool:
        """Whether the block's parameter has a gradient in this step."""
        return block.split in self.gradients.important

    def hyper_of(self, block: Block) -> Hyper:
        """Return AdamW's settings of the block's parameter group."""
        return self.hypers[block.split.group]
