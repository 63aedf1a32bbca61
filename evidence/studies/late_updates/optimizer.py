"""An optimizer under one of the rules: AdamW on most of a model, late AdamW on deferred columns.

Blocks, phases and important columns are those of the engine, by its own functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from evidence.studies.late_updates.rules import BLOCKS, Block, Rule
from zenflow.config import ZenFlowConfig
from zenflow.rule.adamw import Hyper
from zenflow.rule.blocks import assign_phases, partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters with one weight decay."""

    params: Sequence[nn.Parameter]
    """Parameters in the order of the model."""
    weight_decay: float
    """Decoupled weight decay (AdamW's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypers:
    """AdamW's settings that all groups share."""

    betas: tuple[float, float]
    """Decay rates of the two moments."""
    eps: float
    """Addend of the denominator."""

    def at(self, lr: float, weight_decay: float) -> Hyper:
        """Return a group's settings at a learning rate."""
        return Hyper(lr, *self.betas, self.eps, weight_decay)


@dataclass(slots=True)
class _Part:
    """A block with where its gradient is found."""

    block: Block
    param: nn.Parameter
    columns: slice
    weight_decay: float
    is_split: bool

    def grad(self) -> Tensor:
        """Return the block's gradient as a matrix."""
        assert self.param.grad is not None
        return _matrix(self.param.grad)[:, self.columns]


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.view(len(tensor), -1) if tensor.ndim > 1 else tensor.view(1, -1)


class LateOptimizer:
    """Takes steps under a rule.

    Attributes:
        t: Number of steps taken.
        clip: Clip factor of the last of them.
        parts: All blocks, those of split parameters first, in backward's order.
    """

    def __init__(
        self, groups: Sequence[Group], rule: Rule | None, config: ZenFlowConfig, hypers: Hypers
    ) -> None:
        """Cut matrices into blocks.

        Args:
            groups: All parameters.
            rule: Rule of the deferred columns; None is AdamW everywhere.
            config: Share and choice of important columns, and the size of blocks.
            hypers: AdamW's settings.
        """
        self._rule, self._config, self._hypers = rule, config, hypers
        self.t, self.clip = 0, 1.0
        members = [(param, group.weight_decay) for group in groups for param in group.params]
        split = [
            (param, decay)
            for param, decay in members
            if rule is not None and param.ndim > 1 and param.numel() >= config.min_split_elements
        ]
        known = {id(param) for param, _ in split}
        self.parts = self._split_parts(split) + [
            self._resident(param, decay) for param, decay in members if id(param) not in known
        ]

    def _split_parts(self, split: Sequence[tuple[nn.Parameter, float]]) -> list[_Part]:
        if self._rule is None:
            return []
        config, rule = self._config, self._rule
        matrices = [_matrix(param.detach()) for param, _ in split]
        shapes = partition(
            [(matrix.shape[0], matrix.shape[1]) for matrix in matrices],
            topk_ratio=config.topk_ratio,
            update_interval=rule.interval,
            block_elements=config.block_elements,
        )
        loads, cohorts = [s.deferred_elements for s in shapes], [s.cohort for s in shapes]
        phases = [rule.interval] * len(shapes)
        if rule.rolling:
            phases = assign_phases(loads, cohorts, rule.interval)
        parts = []
        for shape, phase in zip(shapes, phases, strict=True):
            columns = slice(shape.first, shape.first + shape.num_columns)
            block = BLOCKS[rule.kind](
                matrices[shape.matrix][:, columns], rule, shape.num_important
            )
            block.due = phase
            parts.append(
                _Part(block, split[shape.matrix][0], columns, split[shape.matrix][1], True)
            )
        return parts

    def _resident(self, param: nn.Parameter, weight_decay: float) -> _Part:
        """Return a parameter without deferred columns, which is AdamW's under any rule."""
        matrix = _matrix(param.detach())
        block = BLOCKS["former"](matrix, Rule(name="AdamW", kind="former"), matrix.shape[1])
        return _Part(block, param, slice(None), weight_decay, False)

    @torch.no_grad()
    def step(self, lr: float, max_norm: float | None) -> None:
        """Take a step with the parameters' gradients, clipped by their global norm."""
        self.t += 1
        pairs = []
        for part in self.parts:
            grad, hyper = part.grad(), self._hypers.at(lr, part.weight_decay)
            energy = grad.square().sum(0)
            part.block.device(self.t, grad, energy, self.clip, hyper)
            pairs.append((part, grad, energy, hyper))
        if max_norm is not None:
            norm = float(torch.stack([energy.sum() for _, _, energy, _ in pairs]).sum().sqrt())
            self.clip = min(1.0, max_norm / (norm + 1e-6))
        for part, grad, energy, hyper in pairs:
            self._host_part(part, grad, energy, hyper)

    def _host_part(self, part: _Part, grad: Tensor, energy: Tensor, hyper: Hyper) -> None:
        t, block, decay = self.t, part.block, self._config.importance_decay
        block.score = decay * block.score + (1 - decay) * energy
        block.length += 1
        block.host(t, grad, energy, self.clip, hyper)
        block.show_important()
        if part.is_split and t == block.due:
            block.close(t, hyper)
            if self._selects(t, block):
                block.choose(self._config.hysteresis)
            block.land, block.due, block.length = t + block.rule.lag, t + block.rule.interval, 0
            if block.rule.lag == 0:
                block.show(~block.important)
            block.show_important()  # those chosen just now too

    def _selects(self, t: int, block: Block) -> bool:
        """Whether a selection was asked for since the block's last boundary."""
        every = self._config.select_interval_steps or 10**9
        first = t - block.length + 1
        return first <= 1 or any((step - 1) % every == 0 for step in range(first, t + 1))

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """Show the masters for as long as the context is open."""
        shown = [part.block.weight.clone() for part in self.parts]
        for part in self.parts:
            part.block.weight.copy_(part.block.master)
        try:
            yield
        finally:
            for part, weight in zip(self.parts, shown, strict=True):
                part.block.weight.copy_(weight)

    def scales(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return, for each split parameter, the square root of 1 over AdamW's denominator."""
        split: dict[nn.Parameter, list[_Part]] = {}
        for part in self.parts:
            if part.is_split or part.param.ndim > 1:
                split.setdefault(part.param, []).append(part)
        found = []
        for param, parts in split.items():
            scale = torch.empty_like(param)
            for part in parts:
                second = part.block.exp_avg_sq / (1 - self._hypers.betas[1] ** self.t)
                denom = second.sqrt() + self._hypers.eps
                _matrix(scale)[:, part.columns] = denom.rsqrt()
            found.append((param, scale))
        return found
