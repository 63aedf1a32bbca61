"""Fresh steps: moves of deferred weights by gradients that the host has not applied yet.

The host's exact AdamW step for a gradient reaches the weights after the window's end, some steps
late. AdamW with momentum is stable under late gradients for a small part of its learning rates
only. But the device has the gradient when it is fresh, and lacks only 1 / sqrt(v). An estimate of
v by one number for each row and each column is enough. The device moves the weights at once, by
the gradient's expected share of AdamW's motion. The upload that has the gradient in it overwrites
the estimate with the truth, so that errors do not add up.

For a deferred column j of a matrix (O, I), gradient g of step t with clip factor c, and squared
norms E of its columns and F of its rows:

    C_j   <- beta2 C_j + (1 - beta2) c^2 E_j / O       second moments, on average over the column
    R_i   <- beta2 R_i + (1 - beta2) c^2 F_i / I       and over the row
    v_ij   = R_i C_j / mean(C) / (1 - beta2^t)         as in Adafactor (arXiv 1804.04235)
    w_ij  <- w_ij - lr share c g_ij / sqrt(v_ij)

eps^2 (1 - beta2^t), at least 1e-30, is added to R, C and the mean. Adafactor divides by the mean
of R, which equals that of C: both are the mean of v over the matrix. Here it is that of C, because
every rank has all of C where rows are spread over ranks. `share` is
`zenflow.rule.momentum.fresh_share` of the forwards before the upload lands.

While backward is under way the step's own clip factor is not known. The step before's stands for
it, in C and R too; at the end of the step these take the right one.

With factored second moments v is no estimate, but the rule's own. Then gradients are divided by
its root first. Fresh steps, the host and the device's columns all take the quotient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import chain

import torch
from torch import Tensor

from zenflow.columns.layout import (
    Block,
    Bucket,
    Layout,
    SplitParam,
)
from zenflow.device.base import AbstractDevice
from zenflow.device.kernels.base import FreshMove, FreshVectors, LateGradient
from zenflow.rule.calendar import WindowCalendar
from zenflow.rule.momentum import fresh_share
from zenflow.step.fresh.factors import (
    ColumnTerms,
    RowTerms,
    StepScalars,
    scalars_of,
    second_moments,
)
from zenflow.step.step import Step


class FreshSteps:
    """Moves deferred weights on the device as gradients become final.

    Numbers that need no gradient are computed when a step begins, for all parameters at once; the
    others by bucket. On small matrices the number of operations decides about the time.

    Attributes:
        clip: Clip factor of the last step, shape (), on the device.
        divides: Whether gradients are divided by the roots of their second moments.
    """

    def __init__(
        self,
        layout: Layout,
        calendar: WindowCalendar,
        device: AbstractDevice,
        *,
        packs: bool = False,
        divides: bool = False,
        rounds_gradients: bool = False,
        still: Set[Block] = frozenset(),
    ) -> None:
        """Start with no step.

        Args:
            layout: Places of all parameters.
            calendar: When windows end and land.
            device: Owner of the weights.
            packs: Whether compute packs all deferred columns, in every step.
            divides: Whether gradients are divided by the roots of their second moments.
            rounds_gradients: Whether gradients are rounded to eight bits on their way out.
            still: Blocks without fresh steps; a set that changes between steps.
        """
        self.divides = divides
        self._rounds_gradients = rounds_gradients
        self._still = still
        self._moves_in_pack = packs and device.kernels.moves_while_packing
        self._layout = layout
        self._calendar = calendar
        self._device = device
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
            torch.zeros(len(terms._fields), len(owner), dtype=torch.float32, device=where)
            for terms, owner in (
                (ColumnTerms, self._block_of_column),
                (RowTerms, self._split_of_row),
            )
        )
        self._of_columns, self._of_rows = ColumnTerms(*self._by_column), RowTerms(*self._by_row)
        stays = self._of_columns.stays.split(widths.tolist())
        self._stays = dict(zip(layout.splits, stays, strict=True))
        shares = self._of_columns.share
        self._share_of = dict(zip(layout.splits, shares.split(widths.tolist()), strict=True))
        # Of gradients that have been divided already, the factors have the roots alone.
        self._in_factors = torch.ones_like(shares) if divides else shares
        self._ones = shares.new_ones(int(heights.max()) if divides else 0, 1)
        self._whole = FreshVectors(
            second_moments(layout.columns, self._of_columns),
            self._in_factors,
            second_moments(layout.rows, self._of_rows),
        )
        self._buckets = self._cut()
        # Views of vectors that stay: to make them costs the interpreter as much as to use them.
        self._row_factors = {
            split: split.rows.fresh_factors.unsqueeze(1) for split in layout.splits
        }

    def _cut(self) -> list[FreshVectors]:
        """Cut the vectors into buckets' parts; the parameters of a bucket are neighbours."""
        parts = []
        columns, rows = self._of_columns, self._of_rows
        last, last_row = len(columns.share), len(rows.energy_gain)
        for bucket in self._layout.buckets:  # in backward order: the last parameters first
            first = last - len(bucket.columns.energies)
            first_row = last_row - len(bucket.rows.energies)
            parts.append(
                FreshVectors(
                    second_moments(bucket.columns, columns, slice(first, last)),
                    self._in_factors[first:last],
                    second_moments(bucket.rows, rows, slice(first_row, last_row)),
                )
            )
            last, last_row = first, first_row
        return parts

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, vectors over all columns and rows."""
        of_columns = (self._block_of_column, self._heights, self._by_column)
        of_rows = (self._split_of_row, self._widths_of_rows, self._by_row, self._ones)
        # Quotients have factors apart from the shares.
        roots = (self._in_factors,) if self.divides else ()
        return sum(tensor.nbytes for tensor in (*of_columns, *of_rows, *roots))

    def begin(self, step: Step, landing: Set[Block]) -> None:
        """Get ready for a step's gradients.

        Args:
            step: The step, which has no gradient yet.
            landing: Blocks whose updates in flight land in the step.
        """
        self._has_factors = False
        self._rates: dict[SplitParam, float] = {}
        self._roots: dict[SplitParam, float] = {}
        self._moving: set[SplitParam] = set()
        self._landing = landing
        self._partly_landing = {block.split for block in landing}
        self._moves: dict[SplitParam, FreshMove] = {}
        by_block, by_split = [], []
        known: dict[tuple[int, int], tuple[StepScalars, float]] = {}
        shares: dict[tuple[tuple[int, int], int], float] = {}
        next_due = self._calendar.next_due
        landings = {due: due + self._calendar.lag(due) for due in set(next_due)}
        interval = self._calendar.knobs.update_interval
        for split in self._layout.splits:
            hyper, count = step.hypers[split.group], split.num_steps + 1
            taken = split.group, count
            if taken not in known:  # the same for most parameters
                late = self._calendar.delay(hyper.beta1, interval)
                known[taken] = scalars_of(hyper, count, step.inverse_scale), late
            scalars, late = known[taken]
            self._rates[split] = hyper.lr if self.divides else scalars.rate
            self._roots[split] = scalars.root
            gain, decay = scalars.energy_gain, (scalars.decay, scalars.floor)
            by_split.append((gain / split.num_columns, *decay))
            for block in split.blocks:
                asked = taken, landings[next_due[block.index]] - step.number
                share = 0.0
                if block.shape.num_deferred and block not in self._still:
                    if asked not in shares:
                        shares[asked] = fresh_share(hyper.beta1, asked[1], late, count)
                    share = shares[asked]
                if share:
                    self._moving.add(split)
                stays = float(block not in landing)
                by_block.append((gain / split.whole_rows, share, *decay, stays))
        self._spread(by_block, by_split)

    def _spread(
        self, by_block: Sequence[Sequence[float]], by_split: Sequence[Sequence[float]]
    ) -> None:
        """Write numbers of blocks to their columns and of parameters to their rows, and use them.

        Args:
            by_block: Numbers of each block, in the order of `ColumnTerms`, without clip factor.
            by_split: Numbers of each parameter, in the order of `RowTerms`, without clip factor.
        """
        sent = self._device.to_device([*chain(*by_block, *by_split)])
        num_of_blocks = len(ColumnTerms._fields) * len(by_block)
        of_blocks, of_splits = sent[:num_of_blocks], sent[num_of_blocks:]
        columns = self._layout.columns
        squared_clip = self.clip.square()
        for numbers, index, out in (
            (of_blocks, self._block_of_column, self._by_column),
            (of_splits, self._split_of_row, self._by_row),
        ):
            torch.index_select(numbers.view(-1, len(out)).t(), 1, index, out=out)
        self._of_columns.share.masked_fill_(columns.is_important, 0.0).mul_(self.clip)
        self._of_columns.energy_gain.mul_(squared_clip)
        self._of_rows.energy_gain.mul_(squared_clip)
        self._device.kernels.begin_factors(self._whole)

    def apply(
        self, bucket: Bucket, grads: Mapping[SplitParam, Tensor]
    ) -> Mapping[SplitParam, Tensor]:
        """Move a bucket's weights, but for columns whose update is landing; once in a step.

        Args:
            bucket: The bucket; all gradients of it that there are have been measured.
            grads: These gradients, (O, I).

        Returns:
            The gradients as the owners of the columns take them.
        """
        kernels = self._device.kernels
        moving = [split for split in grads if split in self._moving]
        used = list(grads) if self.divides else moving
        if used and not self._has_factors:
            kernels.make_factors(self._buckets[bucket.index], _outputs(used))
        if self.divides:
            grads = {s: kernels.divide(grad, self._roots_of(s)) for s, grad in grads.items()}
        for split in moving:
            if self._moves_in_pack and split.part.is_whole:
                self._moves[split] = self._factors(split)
            else:
                stays = self._stays[split] if split in self._partly_landing else None
                kernels.move(split.weight(), grads[split], self._factors(split, stays))
        return grads

    def moves(self, splits: Iterable[SplitParam]) -> bool:
        """Whether a gradient of one of these parameters moves weights in this step."""
        return not self._moving.isdisjoint(splits)

    def move_in_pack(self, block: Block) -> FreshMove | None:
        """Return the fresh step to take while a block is packed, after `apply`; None for none.

        Blocks of one parameter have one between them. A block whose update lands has none: its
        update may be on its way by then, for columns that were packed before.
        """
        stays = block in self._landing or block in self._still
        return None if stays else self._moves.get(block.split)

    def _factors(self, split: SplitParam, stays: Tensor | None = None) -> FreshMove:
        return FreshMove(*self._vectors_of(split), self._rates[split], stays)

    def _vectors_of(self, split: SplitParam) -> tuple[Tensor, Tensor]:
        """Return the fresh step's factors on columns, (I,), and on rows, (O, 1)."""
        if self.divides:
            return self._share_of[split], self._ones[: split.num_rows]
        return split.columns.fresh_factors, self._row_factors[split]

    def _roots_of(self, split: SplitParam) -> FreshMove:
        """Return the factors that divide a gradient by the root of its second moments."""
        columns, rows = split.columns.fresh_factors, self._row_factors[split]
        return FreshMove(columns, rows, self._roots[split])

    def prepare(self, present: Collection[SplitParam]) -> None:
        """Compute all buckets' factors at once, in place of `apply`; all gradients are measured.

        Args:
            present: Parameters with a gradient in the step.
        """
        used = [split for split in present if self.divides or split in self._moving]
        if used:
            self._device.kernels.make_factors(self._whole, _outputs(used))
        self._has_factors = True

    def late(self, block: Block, rows: Tensor, *, is_packed: bool) -> LateGradient | None:
        """Return the gradient whose fresh step landing columns still need, after `apply`.

        Args:
            block: Block that the columns are of.
            rows: Columns of its parameter's gradient as rows, of this host's part: all of them as
                the device has them, or the landing ones, packed.
            is_packed: Whether `rows` are the landing columns alone.
        """
        split = block.split
        if split not in self._moving or block in self._still:
            return None
        columns, rows_O1 = self._vectors_of(split)
        move = FreshMove(columns, split.part.of(rows_O1), self._rates[split])
        return LateGradient(rows, is_packed, move, self._rounds_gradients)

    def count(self, step: Step) -> None:
        """Count a step that is taken; the lead of uploads goes by the count."""
        for split in step.gradients.important:
            split.num_steps += 1

    def finish(self, step: Step, factor: Tensor) -> None:
        """Update the second moments C and R by a step that is taken.

        Args:
            step: The step.
            factor: Factor on gradients, clip factor times inverse loss scale; shape (), on the
                device.
        """
        present, hypers = step.gradients.important, step.hypers
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
        scale = step.inverse_scale
        self.clip = factor / scale if scale != 1.0 else factor.clone()


def _outputs(splits: Iterable[SplitParam]) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter's factors by column and by row, for `DeviceKernels.make_factors`."""
    return [(split.columns.fresh_factors, split.rows.fresh_factors) for split in splits]
