"""Updates in flight: computed by the host, or about to be, and not yet in the device's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from zenflow.columns.layout import Block
from zenflow.columns.upload_pool import UploadBuffer
from zenflow.lanes.completion import Completion
from zenflow.lanes.lease import Lease


@dataclass(slots=True, eq=False)
class PendingUpload:
    """A block's update in flight, from its start on the host to its landing.

    The upload begins in the step of the landing, after the step's last read of the weights.
    """

    block: Block
    """Block whose weights are updated."""
    values: Tensor
    """Weights to upload, (D, O) in the parameter's dtype: a piece of `buffer`, or the staging."""
    lease: Lease
    """Lease of the memory of `values`."""
    buffer: UploadBuffer | None
    """Buffer of `values`. None at a lag of 0: the update overwrites the gradient it has read."""
    land_step: int
    """Step by whose end the weights are on the device."""
    opened: int
    """Step after which the window began: its oldest gradient is of the step after."""
    copied: Sequence[Completion]
    """Copies of the window's last gradient, for which the step of the landing has to wait."""
    computed: Completion
    """End of the host's update, which writes `values`."""
    marks: Tensor | None = None
    """Marks of the weights that the update changes, uint8 (D, 8 ceil(O / 64)), in the memory that
    `lease` is of; None where all are uploaded."""
    uploaded: Completion | None = None
    """End of the copy to the device; None until the copy is queued."""
    num_bytes: int = 0
    """Number of bytes that the copy has moved."""


class UpdatesInFlight:
    """The updates in flight, at most one for each block."""

    def __init__(self) -> None:
        """Start with none."""
        self._by_block: dict[Block, PendingUpload] = {}
        # The dictionary's own method: a step asks of each block, on the training thread.
        self.of = self._by_block.get
        """Returns a block's update in flight; None where there is none."""

    def __iter__(self) -> Iterator[PendingUpload]:
        """Return the updates, in the order in which they began; some may end meanwhile."""
        return iter(list(self._by_block.values()))

    def begin(self, update: PendingUpload) -> None:
        """Put an update in flight: its buffer is in use."""
        self._by_block[update.block] = update
        if update.buffer is not None:
            update.buffer.num_open += 1

    def end(self, update: PendingUpload) -> None:
        """Take an update out of flight: its piece of the buffer is then free."""
        del self._by_block[update.block]
        if update.buffer is not None:
            update.buffer.num_open -= 1

    def clear(self) -> None:
        """Forget all updates; the buffers are the caller's to free."""
        self._by_block.clear()
