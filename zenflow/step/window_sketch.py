"""Window sketch: estimates the norms of open windows' summed gradients, without keeping these.

A few fixed random sign vectors times a gradient give a few numbers per column, its sketch. A
sketch is linear in the gradient, so that sketches add up over a window, cancellation included. The
mean of its squares is an unbiased estimate of the column's squared norm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zenflow.columns.layout import ColumnVectors, Layout, SplitParam
from zenflow.columns.shards import RowSpread, part_of
from zenflow.device.base import AbstractDevice
from zenflow.report import WindowNorms

if TYPE_CHECKING:
    from zenflow.step.host.tasks import Window

NUM_SIGNS = 8
"""Number of sign vectors. A column's estimate is off by about sqrt(2 / 8), a block's by less."""


class WindowSketch:
    """Sums of sketched gradients of every column's open window, on the device.

    Attributes:
        sums: Summed sketches of the clipped gradients since each window began,
            (NUM_SIGNS, all columns), float32.
        is_watching: Whether gradients are sketched; a window that began unwatched has no norms.
        is_whole: Whether the sums hold all that the window holds, for each block.
    """

    def __init__(self, layout: Layout, device: AbstractDevice, windows: Sequence[Window]) -> None:
        """Start with empty windows; the signs depend on the parameters' order alone."""
        self._layout = layout
        self._windows = windows
        self._device = device
        where = layout.columns.scores.device
        widths = [split.num_columns for split in layout.splits]
        self.sums = torch.zeros(NUM_SIGNS, sum(widths), dtype=torch.float32, device=where)
        self._step = torch.zeros_like(self.sums)
        parts = self._step.split(widths, dim=1)
        self._parts = dict(zip(layout.splits, parts, strict=True))
        sums = self.sums.split(widths, dim=1)
        self._sums_of: dict[SplitParam, Tensor] = dict(zip(layout.splits, sums, strict=True))
        self._signs = {
            split: _signs(index, split).to(where) for index, split in enumerate(layout.splits)
        }
        self._blocks = [block for split in layout.splits for block in split.blocks]
        self.is_watching = True
        self.is_whole = [True] * len(self._blocks)
        lengths = torch.tensor([block.shape.num_columns for block in self._blocks], device="cpu")
        self._lengths = lengths.to(where)
        numbers = torch.arange(len(self._blocks), device="cpu")
        self._block_of = numbers.repeat_interleave(lengths).to(where)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        fixed = (self._lengths, self._block_of, *self._signs.values())
        return sum(tensor.nbytes for tensor in (self.sums, self._step, *fixed))

    def take(self, split: SplitParam, grad_OI: Tensor) -> None:
        """Sketch one parameter's gradient of the step under way."""
        if not self.is_watching:
            return
        if grad_OI.dtype == torch.float16:  # a sum of scaled gradients may overflow
            grad_OI = grad_OI.float()
        if grad_OI.dtype == torch.float32:
            torch.mm(self._signs[split], grad_OI, out=self._parts[split])
        else:
            self._parts[split].copy_(self._signs[split].to(grad_OI.dtype) @ grad_OI)

    def sums_of(self, split: SplitParam) -> Tensor:
        """Return one parameter's part of the sums, (NUM_SIGNS, I): a view."""
        return self._sums_of[split]

    def leave_out(self, split: SplitParam) -> None:
        """Note that a parameter has no gradient in the step under way."""
        self._parts[split].zero_()

    def read(self, columns: ColumnVectors, factor: Tensor) -> Tensor:
        """Return every block's squared norms with this step's gradients, (2 * blocks,) float32.

        The first half is of the deferred columns' sums, the second of this step's important
        gradients; `window_norms` reads them. The windows take the gradients at `close`.

        Args:
            columns: This step's energies, and who owns each column.
            factor: Factor on the gradients, shape ().
        """
        self._layout.shards.add_up(self._step).mul_(factor).add_(self.sums)
        deferred = self._step.square().mean(dim=0).masked_fill_(columns.is_important, 0.0)
        important = torch.where(columns.is_important, columns.energies, 0.0)
        return torch.cat([self._by_block(deferred), self._by_block(important) * factor * factor])

    def _by_block(self, by_column: Tensor) -> Tensor:
        """Sum over each block's columns, always in one order, so that bits repeat."""
        # Unsafe only in that the lengths aren't checked, for which a GPU would have to be awaited.
        return torch.segment_reduce(by_column, "sum", lengths=self._lengths, unsafe=True)

    def close(self, next_due: Sequence[int], step: int) -> None:
        """Add the step's gradients to the windows, and clear windows that end with the step."""
        ends = [next_due[block.index] == step for block in self._blocks]
        goes_on = [
            float(whole and not end) for whole, end in zip(self.is_whole, ends, strict=True)
        ]
        keep = self._device.to_device(goes_on).index_select(0, self._block_of)
        torch.mul(self._step, keep, out=self.sums)
        self.is_whole = [whole or end for whole, end in zip(self.is_whole, ends, strict=True)]

    def watch(self, wanted: bool) -> None:
        """Begin or cease to sketch gradients, from the next step on; called between two steps."""
        if wanted and not self.is_watching:
            self.sums.zero_()
            self.is_whole = [self._windows[b.index].count == 0 for b in self._blocks]
        self.is_watching = wanted

    def state_dict(self) -> dict[str, Any]:
        """Return the sketch's state without its tensors, JSON-ready."""
        return {"is_watching": self.is_watching, "is_whole": list(self.is_whole)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state of ``state_dict``; the caller sets the sums in place."""
        self.is_watching = bool(state["is_watching"])
        self.is_whole = [bool(whole) for whole in state["is_whole"]]

    def ages(self, present: Sequence[SplitParam]) -> list[int]:
        """Return the number of gradients in each block's window, with this step's.

        0 for blocks without a gradient in this step, without deferred columns, or not whole.

        Args:
            present: Parameters with a gradient in this step, whose blocks haven't counted it.
        """
        counted = set(present)
        return [
            self._windows[b.index].count + 1
            if whole and b.split in counted and b.shape.num_deferred
            else 0
            for b, whole in zip(self._blocks, self.is_whole, strict=True)
        ]


def _signs(index: int, split: SplitParam) -> Tensor:
    """Return the sign vectors of a parameter's rows on this rank, (NUM_SIGNS, O), float32."""
    generator = torch.Generator("cpu").manual_seed(index)
    size = (NUM_SIGNS, split.whole_rows)
    bits = torch.randint(0, 2, size, generator=generator, device="cpu")
    return 2.0 * part_of(bits.float(), RowSpread.of(split.param), 1) - 1.0


def window_norms(ages: Sequence[int], values: Sequence[float]) -> tuple[WindowNorms, ...]:
    """Return the norms of deferred and important gradients by window age, ascending.

    Args:
        ages: Number of gradients in each block's window, of `WindowSketch.ages`.
        values: Squared norms by block, of `WindowSketch.read`.
    """
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for age, accumulated, important in zip(
        ages, values[: len(ages)], values[len(ages) :], strict=True
    ):
        if age:
            sums[age][0] += accumulated
            sums[age][1] += important
    return tuple(WindowNorms(age, *sums[age]) for age in sorted(sums))
