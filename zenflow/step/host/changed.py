"""Uploads of changed weights: blocks whose device has the last upload's weights, and no others.

A window is *still* where the device takes no fresh steps with the block's weights. The calendar
decides that before the window, by the learning rate and the weights' size. At the end of a still
window the device has the last upload, bit for bit. The host finds that upload again in the state
as the last pass left it, and sends the weights that are others now.

All weights are sent where the host's rows have changed since: after a pass before the window's
end, moves of columns, a batch that was dropped, and a state that was loaded. So decisions that
change a weight are the calendar's, and memory and timing change bytes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zenflow.columns.layout import Block, Layout
from zenflow.host.jobs import AdamStep, Changes, Upload
from zenflow.host_state import MARKED_BYTES, mark_bytes
from zenflow.step.step import Step

LARGEST_RATE = 1e-3
"""Largest learning rate of a still window, in root mean squares of the block's weights."""


class ChangedUploads:
    """The last upload of each block, and the blocks whose windows are still.

    Attributes:
        still: Blocks whose open windows are still; the set changes between steps.
    """

    def __init__(self, layout: Layout) -> None:
        """Measure all blocks, which have no upload yet; no window is still."""
        self.still: set[Block] = set()
        self._blocks = layout.blocks
        self._sizes = [0.0] * len(layout.blocks)
        self._last: dict[Block, tuple[float, AdamStep]] = {}
        self.begin_anew()

    def begin_anew(self) -> None:
        """Measure all blocks; no window is still."""
        self.still.clear()
        self.measure(self._blocks)

    @torch.no_grad()
    def measure(self, blocks: Iterable[Block]) -> None:
        """Take the root mean squares of some blocks' weights, by which later windows are still.

        The call waits for the device.
        """
        measured = [block for block in blocks if _has_marks(block)]
        if not measured:
            return
        norms = torch.stack([_norm(block) for block in measured]).cpu().tolist()
        for block, norm in zip(measured, norms, strict=True):
            count = block.shape.num_columns * block.split.num_rows
            self._sizes[block.index] = norm / math.sqrt(count)

    def begin_windows(self, step: Step, blocks: Iterable[Block]) -> None:
        """Decide which of some blocks' windows, that begin after a step, are still."""
        for block in blocks:
            if self._is_still(step, block):
                self.still.add(block)
            else:
                self.still.discard(block)

    def _is_still(self, step: Step, block: Block) -> bool:
        most = LARGEST_RATE * self._sizes[block.index]
        return _has_marks(block) and step.hyper_of(block).lr <= most

    def forget(self, blocks: Iterable[Block]) -> None:
        """Let some blocks' next uploads have all weights, as rows differ from the last ones'."""
        for block in blocks:
            self._last.pop(block, None)

    def noted(self, step: Step, block: Block, upload: Upload) -> Upload:
        """Note an upload at a window's end as the block's last; return it as it is to be made.

        Changed weights are marked where the window was still, and the next one is: else a fresh
        step of all weights follows on arrival.
        """
        if not _has_marks(block):
            return upload
        former = self._last.get(block)
        self._last[block] = upload.lead, upload.step
        is_still = block in self.still and self._is_still(step, block)
        changes = None
        if former is not None and is_still and step.buffer is not None:
            num_columns, num_rows = block.host_shape
            marks = step.buffer.behind((num_columns, mark_bytes(num_rows)), torch.uint8)
            changes = Changes(marks, *former)
        return replace(upload, is_repeatable=True, changes=changes)

    def state_dict(self) -> dict[str, Any]:
        """Return the facts that later windows depend on."""
        return {"sizes": self._sizes, "still": sorted(block.index for block in self.still)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the sizes and the still windows of a state."""
        self._sizes[:] = state["sizes"]
        self.still.clear()
        self.still.update(self._blocks[index] for index in state["still"])


def check_changed(
    weights: Sequence[Tensor], *, is_shared: bool, has_stream: bool, has_drive: bool
) -> None:
    """Refuse what uploads of changed weights are not for.

    Args:
        weights: Parameters that are split between device and host.
        is_shared: Whether ranks share parameters, or the host's work.
        has_stream: Whether weights visit the device.
        has_drive: Whether the host's states are on a drive.

    Raises:
        ValueError: A rule is broken; the message lists all that are.
    """
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in weights}
    rules = [
        (not is_shared, "ranks share the host's work, and their parts would differ in length"),
        (not has_stream, "streamed weights come from the host anyway"),
        (not has_drive, "states on a drive pass through memory in pieces"),
        (
            not weights or any(weight.itemsize == MARKED_BYTES for weight in weights),
            f"weights of {', '.join(sorted(dtypes))} change in every step: load the model in "
            "bfloat16",
        ),
    ]
    broken = [text for holds, text in rules if not holds]
    if broken:
        raise ValueError(f'uploads="changed": {"; ".join(broken)}. Or leave uploads out')


def _has_marks(block: Block) -> bool:
    return block.split.param.itemsize == MARKED_BYTES and block.shape.num_deferred > 0


def _norm(block: Block) -> Tensor:
    """Return the norm of a block's weights, shape (), float32, on the device."""
    first = block.shape.first
    weight_OI = block.split.weight()[:, first : first + block.shape.num_columns]
    norm: Tensor = torch.linalg.vector_norm(weight_OI, dtype=torch.float32)
    return norm
