"""Fresh steps: what the device does for a gradient that the host has not applied yet.

The host's exact AdamW step for a gradient reaches the weights with the window's end, some steps
late. AdamW with momentum is stable under late gradients for a small part of its learning rates
only. But the device has the gradient in its hands when it is fresh, and lacks only 1 / sqrt(v). An
estimate of v by one number for each row and each column is enough: the device moves the weights by
the gradient's expected share of AdamW's motion at once, and the upload that has the gradient in it
overwrites the estimate with the truth. Nothing adds up.

For a deferred column j of a matrix (O, I), gradient g of step t with clip factor c, and squared
norms E of its columns and F of its rows:

    C_j   <- beta2 C_j + (1 - beta2) c^2 E_j / O       second moments, in the mean
    R_i   <- beta2 R_i + (1 - beta2) c^2 F_i / I
    v_ij   = R_i C_j / mean(C) / (1 - beta2^t)         as Adafactor has it (arXiv 1804.04235)
    W_ij  <- W_ij - lr share (1 - beta1) / (1 - beta1^t) c g_ij / sqrt(v_ij)

eps^2 is added to R, C and the mean. Adafactor divides by the mean of R, which is that of C: both
are the mean of v over the matrix, and every rank has all of C where rows are spread over ranks.
`share` is `zenflow.rule.momentum.fresh_share` of the forwards before the upload lands.

While backward is under way the step's own clip factor is not known: the step before's stands for
it, in C and R too, which take the right one at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from zenflow.columns.layout import (
    Block,
    Bucket,
    Layout,
    SplitParam,
)
from zenflow.device.base import AbstractDevice, LateGradient
from zenflow.rule.adamw import Hyper
from zenflow.rule.calendar import WindowCalendar
from zenflow.rule.momentum import fresh_share
from zenflow.step.fresh.factors import FreshVectors, make_factors, scalars_of

MOST_ELEMENTS = 1 << 24
"""Number of elements of a matrix that are moved at once; a temporary has as many."""


class FreshSteps:
    """Moves deferred weights on the device as gradients become final.

    What needs no gradient is computed when a step begins, for all parameters at once, and what
    needs one by bucket: on small matrices the number of operations is what takes the time.

    Attributes:
        clip: Clip factor of the last step, shape (), on the device.
    """

    def __init__(
        self,
        layout: Layout,
        calendar: WindowCalendar,
        device: AbstractDevice,
        hypers: Callable[[], Sequence[Hyper]],
    ) -> None:
        """Start with no step.

        Args:
            layout: Places of all parameters.
            calendar: When windows end and land.
            device: Owner of the weights.
            hypers: Returns AdamW's settings of each parameter group, as they are now.
        """
        self._layout = layout
        self._calendar = calendar
        self._device = device
        self._read_hypers = hypers
        where = layout.columns.scores.device
        self.clip = torch.ones((), dtype=torch.float32, device=where)
        blocks = [block for split in layout.splits for block in split.blocks]
        lengths = torch.tensor([block.shape.num_columns for block in blocks], device="cpu")
        numbers = torch.arange(len(blocks), device="cpu")
        self._block_of_column = numbers.repeat_interleave(lengths).to(where)
        widths, heights, whole_heights = (
            torch.tensor([getattr(split, name) for split in layout.splits], device="cpu")
            for name in ("num_columns", "num_rows", "whole_rows")
        )
        numbers = torch.arange(len(layout.splits), device="cpu")
        self._split_of_row = numbers.repeat_interleave(heights).to(where)
        self._heights = whole_heights.repeat_interleave(widths).to(where, torch.float32)
        self._widths_of_rows = widths.repeat_interleave(heights).to(where, torch.float32)
        self._by_column, self._by_row = (
            torch.zeros(count, len(owner), dtype=torch.float32, device=where)
            for count, owner in ((5, self._block_of_column), (3, self._split_of_row))
        )
        stays = self._by_column[4].split(widths.tolist())
        self._stays = dict(zip(layout.splits, stays, strict=True))
        self._buckets = self._cut()
        # Views of vectors that stay: to make them costs the interpreter as much as to use them.
        self._row_parts = {
            split: split.rows.fresh_factors.unsqueeze(1).split(_height(split))
            for split in layout.splits
        }
        self._step = 0

    def _cut(self) -> list[FreshVectors]:
        """Cut the vectors into buckets' parts; the parameters of a bucket are neighbours."""
        parts = []
        last, last_row = self._by_column.shape[1], self._by_row.shape[1]
        for bucket in self._layout.buckets:  # in backward order: the last parameters first
            first = last - len(bucket.columns.energies)
            first_row = last_row - len(bucket.rows.energies)
            parts.append(
                FreshVectors(
                    bucket.columns,
                    self._by_column[0, first:last],
                    self._by_column[1, first:last],
                    bucket.rows,
                    self._by_row[0, first_row:last_row],
                )
            )
            last, last_row = first, first_row
        return parts

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, vectors over all columns and rows."""
        of_columns = (self._block_of_column, self._heights, self._by_column)
        of_rows = (self._split_of_row, self._widths_of_rows, self._by_row)
        return sum(tensor.nbytes for tensor in (*of_columns, *of_rows))

    def begin(self, step: int, lands: Callable[[Block, int], bool], inverse_scale: float) -> None:
        """Get ready for a step's gradients, once in a step.

        Args:
            step: The step under way.
            lands: Whether a block's update in flight lands in a step.
            inverse_scale: Factor that undoes the loss scale.
        """
        if self._step == step:
            return
        self._step = step
        self._has_factors = False
        self._rates: dict[SplitParam, float] = {}
        self._moving: set[SplitParam] = set()
        self._landing: set[SplitParam] = set()
        by_block, by_split = [], []
        hypers = self._read_hypers()
        known: dict[tuple[int, int], tuple[float, float, tuple[float, float]]] = {}
        next_due = self._calendar.next_due
        landings = {due: due + self._calendar.lag(due) for due in set(next_due)}
        for split in self._layout.splits:
            hyper, taken = hypers[split.group], (split.group, split.num_steps)
            if taken not in known:  # the same for most parameters
                known[taken] = scalars_of(hyper, split.num_steps + 1, inverse_scale)
            self._rates[split], gain, decay = known[taken]
            by_split.append((gain / split.num_columns, *decay))
            for block in split.blocks:
                num_forwards = landings[next_due[block.index]] - step
                share = fresh_share(hyper.beta1, num_forwards) if block.shape.num_deferred else 0.0
                if share:
                    self._moving.add(split)
                if is_landing := block.landing is not None and lands(block, step):
                    self._landing.add(split)
                by_block.append((gain / split.whole_rows, share, *decay, float(not is_landing)))
        self._spread(by_block, by_split)

    def _spread(
        self, by_block: Sequence[Sequence[float]], by_split: Sequence[Sequence[float]]
    ) -> None:
        """Bring numbers of blocks to their columns, of parameters to their rows, and use them.

        Args:
            by_block: Gain of an energy, share, decay and floor of second moments, and 1 for what
                is not landing; of each block.
            by_split: Gain, decay and floor; of each parameter.
        """
        sent = self._device.to_device([*chain(*by_block, *by_split)])
        of_blocks, of_splits = sent[: 5 * len(by_block)], sent[5 * len(by_block) :]
        columns, rows = self._layout.columns, self._layout.rows
        squared_clip = self.clip.square()
        for numbers, index, out in (
            (of_blocks, self._block_of_column, self._by_column),
            (of_splits, self._split_of_row, self._by_row),
        ):
            torch.index_select(numbers.view(-1, len(out)).t(), 1, index, out=out)
            out[0].mul_(squared_clip)
        self._by_column[1].masked_fill_(columns.is_important, 0.0).mul_(self.clip)
        _, _, decays, floors, _ = self._by_column
        torch.addcmul(floors, columns.mean_squares, decays, out=columns.fresh_factors)
        _, decays, floors = self._by_row
        torch.addcmul(floors, rows.mean_squares, decays, out=rows.fresh_factors)

    def forget(self) -> None:
        """Forget the step under way, which is not taken."""
        self._step = 0

    def apply(self, bucket: Bucket, grads: Mapping[SplitParam, Tensor]) -> None:
        """Move a bucket's weights, but for columns whose update is landing; once in a step.

        Args:
            bucket: The bucket; all gradients of it that there are have been measured.
            grads: These gradients, (O, I).
        """
        moving = [split for split in grads if split in self._moving]
        if moving and not self._has_factors:
            make_factors(self._buckets[bucket.index], moving)
        for split in moving:
            self._move(split, grads[split])

    def prepare(self, present: Collection[SplitParam]) -> None:
        """Compute at once what else `apply` computes by bucket; all gradients are measured.

        Args:
            present: Parameters with a gradient in the step.
        """
        moving = [split for split in present if split in self._moving]
        if moving:
            whole = FreshVectors(
                *(self._layout.columns, self._by_column[0], self._by_column[1]),
                *(self._layout.rows, self._by_row[0]),
            )
            make_factors(whole, moving)
        self._has_factors = True

    def _move(self, split: SplitParam, grad_OI: Tensor) -> None:
        column_factors, row_parts = split.columns.fresh_factors, self._row_parts[split]
        if split in self._landing:
            column_factors = column_factors * self._stays[split]
        weight_OI, rate = split.weight(), self._rates[split]
        if len(row_parts) == 1:
            weight_OI.addcmul_(grad_OI * column_factors, row_parts[0], value=-rate)
            return
        height = _height(split)
        parts = zip(weight_OI.split(height), grad_OI.split(height), row_parts, strict=True)
        for weight, grad, row_factors in parts:
            weight.addcmul_(grad * column_factors, row_factors, value=-rate)

    def late(self, split: SplitParam, rows: Tensor, *, is_packed: bool) -> LateGradient | None:
        """Return what a landing column still has to be moved by, after `apply`.

        Args:
            split: The parameter.
            rows: Its gradient's columns as rows: all of them, or those of the landing, packed; as
                long as on the host.
            is_packed: Whether it is those of the landing.
        """
        if split not in self._moving:
            return None
        factors = split.columns.fresh_factors, split.part.of(split.rows.fresh_factors)
        return LateGradient(rows, is_packed, *factors, self._rates[split])

    def finish(
        self,
        present: Collection[SplitParam],
        factor: Tensor,
        inverse_scale: float,
        hypers: Sequence[Hyper],
    ) -> None:
        """Move the second moments on by a step that is taken.

        Args:
            present: Parameters with a gradient in the step.
            factor: Factor on them, clip factor times inverse loss scale; shape (), on the device.
            inverse_scale: Factor that undoes the loss scale.
            hypers: AdamW's settings of each parameter group.
        """
        squared = factor.square()
        splits = self._layout.splits
        beta2s = {hypers[split.group].beta2 for split in splits}
        if len(present) == len(splits) and len(beta2s) == 1:  # few operations for all of them
            beta2 = beta2s.pop()
            for vectors, lengths in (
                (self._layout.columns, self._heights),
                (self._layout.rows, self._widths_of_rows),
            ):
                mean_squares = vectors.energies / lengths
                vectors.mean_squares.mul_(beta2).addcmul_(mean_squares, squared, value=1.0 - beta2)
        else:
            for split in present:
                beta2 = hypers[split.group].beta2
                for own, length in (
                    (split.columns, split.whole_rows),
                    (split.rows, split.num_columns),
                ):
                    gain = (1.0 - beta2) / length
                    own.mean_squares.mul_(beta2).addcmul_(own.energies, squared, value=gain)
        for split in present:
            split.num_steps += 1
        self.clip = factor / inverse_scale if inverse_scale != 1.0 else factor.clone()


def _height(split: SplitParam) -> int:
    """Return how many rows are moved at once."""
    return max(1, MOST_ELEMENTS // split.num_columns)
