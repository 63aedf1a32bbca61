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
    v_ij   = R_i C_j / mean(R) / (1 - beta2^t)         as Adafactor has it (arXiv 1804.04235)
    W_ij  <- W_ij - lr share (1 - beta1) / (1 - beta1^t) c g_ij / sqrt(v_ij)

eps^2 is added to R, C and the mean. `share` is `zenflow.rule.momentum.fresh_share` of the forwards
before the upload lands. While backward is under way the step's own clip factor is not known: the
step before's stands for it, in C and R too, which take the right one at the end of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from zenflow.columns.layout import Block, ColumnVectors, Layout, RowVectors, SplitParam
from zenflow.device.base import AbstractDevice, LateGradient
from zenflow.rule.adamw import Hyper
from zenflow.rule.calendar import WindowCalendar
from zenflow.rule.momentum import fresh_share

MOST_ELEMENTS = 1 << 22
"""Number of elements of a matrix that are moved at once; a temporary has as many."""
LEAST_ROOT = 1e-15
"""Least root of a second moment, for eps = 0: a row without any gradient is not divided by 0."""


class FreshSteps:
    """Moves deferred weights on the device as gradients become final.

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
        self.clip = torch.ones((), device=where)
        self._blocks = [block for split in layout.splits for block in split.blocks]
        lengths = torch.tensor([block.shape.num_columns for block in self._blocks])
        self._block_of = torch.arange(len(self._blocks)).repeat_interleave(lengths).to(where)
        self._widths = [split.num_columns for split in layout.splits]
        widths, heights = (
            torch.tensor([getattr(split, name) for split in layout.splits])
            for name in ("num_columns", "num_rows")
        )
        self._heights = heights.repeat_interleave(widths).to(where, torch.float32)
        self._widths_of_rows = widths.repeat_interleave(heights).to(where, torch.float32)
        self._step = 0

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, vectors over all columns and rows."""
        return self._block_of.nbytes + 3 * self._heights.nbytes + self._widths_of_rows.nbytes

    def begin(self, step: int, lands: Callable[[Block, int], bool], inverse_scale: float) -> None:
        """Get ready for a step's gradients, once in a step.

        Args:
            step: The step under way.
            lands: Whether a block's update in flight lands in a step.
            inverse_scale: Factor that undoes the loss scale.
        """
        if self._step == step:
            return
        self._step, self._inverse_scale = step, inverse_scale
        self._hypers = self._read_hypers()
        shares, stays = [], []
        self._moving: set[SplitParam] = set()
        self._landing: set[SplitParam] = set()
        for block in self._blocks:
            num_forwards = self._calendar.next_landing(block.index) - step
            beta1 = self._hypers[block.split.group].beta1
            share = fresh_share(beta1, num_forwards) if block.shape.num_deferred else 0.0
            is_landing = lands(block, step)
            shares.append(share)
            stays.append(0.0 if is_landing else 1.0)
            if share:
                self._moving.add(block.split)
            if is_landing:
                self._landing.add(block.split)
        by_block = self._device.to_device([*shares, *stays]).view(2, -1)
        both = by_block.index_select(1, self._block_of)
        both[0].masked_fill_(self._layout.columns.is_important, 0.0).mul_(self.clip)
        parts = both.split(self._widths, dim=1)
        self._parts = dict(zip(self._layout.splits, parts, strict=True))
        self._squared_clip = self.clip.square()

    def forget(self) -> None:
        """Forget the step under way, which is not taken."""
        self._step = 0

    def apply(self, split: SplitParam, grad_OI: Tensor) -> None:
        """Move a parameter's weights, but for columns whose update is landing."""
        if split not in self._moving:
            return
        shares, stays = self._parts[split]
        column_factors, row_factors = split.columns.fresh_factors, split.rows.fresh_factors
        self._second_moments(split, split.rows, split.num_columns)
        mean = row_factors.mean()
        row_factors.rsqrt_().mul_(mean.sqrt_())
        self._second_moments(split, split.columns, split.num_rows)
        column_factors.rsqrt_().mul_(shares)
        now = column_factors * stays if split in self._landing else column_factors
        weight_OI, rate = split.weight(), self._rate(split)
        height = max(1, MOST_ELEMENTS // split.num_columns)
        for low in range(0, split.num_rows, height):
            part = slice(low, low + height)
            weight_OI[part].addcmul_(
                grad_OI[part] * now, row_factors[part].unsqueeze(1), value=-rate
            )

    def _second_moments(
        self, split: SplitParam, vectors: ColumnVectors | RowVectors, length: int
    ) -> None:
        """Fill the fresh factors with second moments, this step's included, plus eps^2."""
        hyper, factors = self._hypers[split.group], vectors.fresh_factors
        gain = (1.0 - hyper.beta2) * self._inverse_scale**2 / length
        floor = max(hyper.eps * self._corrections(split)[1], LEAST_ROOT) ** 2
        torch.mul(vectors.mean_squares, hyper.beta2, out=factors)
        factors.addcmul_(vectors.energies, self._squared_clip, value=gain).add_(floor)

    def late(self, split: SplitParam, rows: Tensor, *, is_packed: bool) -> LateGradient | None:
        """Return what a landing column still has to be moved by, after `apply`.

        Args:
            split: The parameter.
            rows: Its gradient's columns as rows: all of them, or those of the landing, packed.
            is_packed: Whether it is those of the landing.
        """
        if split not in self._moving:
            return None
        factors = split.columns.fresh_factors, split.rows.fresh_factors
        return LateGradient(rows, is_packed, *factors, self._rate(split))

    def _corrections(self, split: SplitParam) -> tuple[float, float]:
        """Return 1 - beta1^t and sqrt(1 - beta2^t) of the step under way."""
        hyper, count = self._hypers[split.group], split.num_steps + 1
        return 1.0 - hyper.beta1**count, math.sqrt(1.0 - hyper.beta2**count)

    def _rate(self, split: SplitParam) -> float:
        """Return what a factor is to be multiplied by."""
        hyper = self._hypers[split.group]
        correction, root = self._corrections(split)
        return hyper.lr * (1.0 - hyper.beta1) / correction * root * self._inverse_scale

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
                    (split.columns, split.num_rows),
                    (split.rows, split.num_columns),
                ):
                    gain = (1.0 - beta2) / length
                    own.mean_squares.mul_(beta2).addcmul_(own.energies, squared, value=gain)
        for split in present:
            split.num_steps += 1
        self.clip = factor / inverse_scale if inverse_scale != 1.0 else factor.clone()
