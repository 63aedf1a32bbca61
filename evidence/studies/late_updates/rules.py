"""Rules for columns whose AdamW runs late, on a slow host: what the weights do, block by block.

Everything happens in one thread; a delay is a number of steps. A block is (O, n): n columns that
share a window. Its *master* is what the host keeps. Its *weight* is what forward sees.

`LateBlock` is the rule with the fresh gradient. The host is exactly AdamW, in every step. At a
window's end it uploads its master, moved on by what momentum alone will do while the upload is
used. Between uploads the device adds what each new gradient adds to AdamW's motion on average.
`FormerBlock` and `PublishedBlock` are the rules that it is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zenflow.rule.adamw import Hyper
from zenflow.rule.importance import select_columns
from zenflow.rule.momentum import delay, fresh_share, upload_lead

Fresh = Literal["none", "column", "factored", "exact"]

SETTLED = 10**6
"""Number of steps after which bias correction is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Treatment of deferred columns: one rule for late updates."""

    name: str
    """Name for the reader."""
    interval: int = 4
    """Number of steps in a window, S."""
    lag: int = 1
    """Number of steps from a window's end to the landing of its upload."""
    rolling: bool = True
    """Whether blocks end their windows in turn."""
    kind: Literal["late", "former", "published"] = "late"
    """Class of the blocks."""
    fresh: Fresh = "column"
    """Second moment of the fresh term; with ``none`` there is no such term."""
    fresh_share: float = 1.0
    """Factor on the fresh term."""
    lead_share: float = 1.0
    """Factor on the lead of uploads."""
    bound: float | None = None
    """Largest fresh term of an element, over the learning rate; None sets no bound."""
    delay_share: float = 1.0
    """Factor on the delay of fresh terms and leads; with 0 they aim at the forwards' own steps."""
    corrects_bias: bool = True
    """Whether fresh terms and leads follow AdamW's bias correction from step to step."""

    def share(self, beta1: float, num_forwards: int, count: int) -> float:
        """Return the fresh term's share of a gradient's motion, as `fresh_share` does."""
        late = self.delay_share * delay(beta1, self.interval)
        if self.corrects_bias:
            return self.fresh_share * fresh_share(beta1, num_forwards, late, count)
        settled = fresh_share(beta1, num_forwards, late, SETTLED)
        return self.fresh_share * settled / (1 - beta1**count)

    def lead(self, beta1: float, count: int) -> float:
        """Return the lead of an upload, as `upload_lead` does."""
        late = self.delay_share * delay(beta1, self.interval)
        count = count if self.corrects_bias else SETTLED
        return self.lead_share * upload_lead(beta1, self.lag, self.interval, late, count)


class Block:
    """Columns that share a window: their AdamW state, and when their windows end."""

    def __init__(self, weight: Tensor, rule: Rule, num_important: int) -> None:
        """Take over columns.

        Args:
            weight: The columns, (O, n): what forward sees. It is changed in place.
            rule: What happens to those that are deferred.
            num_important: Number of columns that are never late.
        """
        self.weight, self.rule, self.count = weight, rule, num_important
        self.master, self.upload = weight.clone(), weight.clone()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
        n = weight.shape[1]
        spread = torch.arange(num_important) * n // max(1, num_important)
        self.important = torch.isin(torch.arange(n), spread)
        self.score = torch.zeros(n)
        self.due, self.land, self.length = 0, 0, 0
        """Step at which the window ends; at which the upload lands; steps in the window so far."""

    def device(self, t: int, grad: Tensor, energy: Tensor, clip: float, hyper: Hyper) -> None:
        """Do the device's part once a gradient is final, before the norm of all is known.

        Args:
            t: Step, from 1.
            grad: Gradient as it is, not clipped.
            energy: Its columns' squared norms.
            clip: Clip factor of the step before.
            hyper: AdamW's settings at this step.
        """
        del grad, energy, clip, hyper
        if t == self.land:
            self.show(~self.important)

    def host(self, t: int, grad: Tensor, energy: Tensor, clip: float, hyper: Hyper) -> None:
        """Move state and masters. The clip factor is this step's own."""
        raise NotImplementedError

    def close(self, t: int, hyper: Hyper) -> None:
        """End the window: fill ``upload``."""
        raise NotImplementedError

    def choose(self, hysteresis: float) -> None:
        """Choose the important columns anew, behind ``close``."""
        self.important = select_columns(self.score, self.important, self.count, hysteresis)

    def show(self, columns: Tensor) -> None:
        """Let forward see the upload in these columns, a mask."""
        torch.where(columns, self.upload, self.weight, out=self.weight)

    def step_of(self, t: int, hyper: Hyper) -> Tensor:
        """Return AdamW's step for the moments as they are, not times the learning rate."""
        denom = (self.exp_avg_sq / (1 - hyper.beta2**t)).sqrt_().add_(hyper.eps)
        return (self.exp_avg / (1 - hyper.beta1**t)).div_(denom)

    def move_moments(self, grad: Tensor, hyper: Hyper) -> None:
        """Let both moments see a clipped gradient."""
        self.exp_avg.lerp_(grad, 1 - hyper.beta1)
        self.exp_avg_sq.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)

    def show_important(self) -> None:
        """Let forward see the masters of important columns, as it does after every step."""
        torch.where(self.important, self.master, self.weight, out=self.weight)


class LateBlock(Block):
    """The host is exact AdamW, in every step; the device adds the fresh gradient's share."""

    def __init__(self, weight: Tensor, rule: Rule, num_important: int) -> None:
        super().__init__(weight, rule, num_important)
        self.columns, self.rows = torch.zeros(weight.shape[1]), torch.zeros(len(weight))
        self.last_step = torch.zeros_like(weight)

    def device(self, t: int, grad: Tensor, energy: Tensor, clip: float, hyper: Hyper) -> None:
        """Land what is due, then add the fresh term."""
        super().device(t, grad, energy, clip, hyper)
        left = self.due + self.rule.lag - t
        if self.rule.fresh == "none" or left == 0:
            return
        columns, rows = self._moved_on(grad, energy, clip, hyper)
        if self.rule.fresh == "exact":
            columns = hyper.beta2 * self.exp_avg_sq + (1 - hyper.beta2) * (clip * grad) ** 2
        denom = (columns / (1 - hyper.beta2**t)).sqrt_()
        if self.rule.fresh == "factored":
            denom = (rows / rows.mean().clamp_min(1e-38)).sqrt_()[:, None] * denom
        term = grad / (denom + hyper.eps) * (clip * self.rule.share(hyper.beta1, left, t))
        if self.rule.bound is not None:
            term.clamp_(-self.rule.bound, self.rule.bound)
        self.weight.sub_(term, alpha=hyper.lr)

    def _moved_on(
        self, grad: Tensor, energy: Tensor, clip: float, hyper: Hyper
    ) -> tuple[Tensor, Tensor]:
        """Return the mean squares by column and by row with a gradient clipped by this factor."""
        scale = (1 - hyper.beta2) * clip**2
        columns = hyper.beta2 * self.columns + scale * energy / len(grad)
        if self.rule.fresh != "factored":
            return columns, self.rows
        return columns, hyper.beta2 * self.rows + scale * grad.square().mean(1)

    def host(self, t: int, grad: Tensor, energy: Tensor, clip: float, hyper: Hyper) -> None:
        """Take AdamW's step with masters and moments of all columns."""
        self.columns, self.rows = self._moved_on(grad, energy, clip, hyper)
        self.move_moments(clip * grad, hyper)
        self.last_step = self.step_of(t, hyper)
        self.master.mul_(1 - hyper.lr * hyper.weight_decay).sub_(self.last_step, alpha=hyper.lr)

    def close(self, t: int, hyper: Hyper) -> None:
        """Upload the master, moved on by what momentum will do while the upload is used."""
        lead = self.rule.lead(hyper.beta1, t)
        torch.sub(self.master, self.last_step, alpha=hyper.lr * lead, out=self.upload)


class WindowBlock(Block):
    """Deferred masters move once a window; a column that moves shows its master."""

    def choose(self, hysteresis: float) -> None:
        """Choose anew, without prediction for what moves."""
        before = self.important
        super().choose(hysteresis)
        self.upload = torch.where(before == self.important, self.upload, self.master)


class FormerBlock(WindowBlock):
    """Moments move in every step, deferred masters once a window by n times its last step.

    The upload is extrapolated along that displacement to the middle of its use.
    """

    def host(self, t: int, grad: Tensor, energy: Tensor, clip: float, hyper: Hyper) -> None:
        """Move all moments, and the masters of important columns."""
        del energy
        self.move_moments(clip * grad, hyper)
        moved = self.master * (1 - hyper.lr * hyper.weight_decay)
        moved.sub_(self.step_of(t, hyper), alpha=hyper.lr)
        torch.where(self.important, moved, self.master, out=self.master)

    def close(self, t: int, hyper: Hyper) -> None:
        """Move deferred masters, and extrapolate."""
        lr, ahead_of = self.length * hyper.lr, self.rule.lag + (self.rule.interval - 1) / 2
        step = lr * self.step_of(t, hyper)
        moved = self.master * (1 - lr * hyper.weight_decay) - step
        torch.where(self.important, self.master, moved, out=self.master)
        lead = ahead_of / self.length * self.rule.lead_share
        torch.sub(self.master, step, alpha=lead, out=self.upload)


class PublishedBlock(WindowBlock):
    """Deferred moments and masters move once a window, by the mean of its gradients.

    Windows are aligned and an update lands a whole window late, as in ZenFlow's paper
    (arXiv 2505.12242).
    """

    def __init__(self, weight: Tensor, rule: Rule, num_important: int) -> None:
        super().__init__(weight, rule, num_important)
        self.sum, self.steps = torch.zeros_like(weight), torch.zeros(weight.shape[1])

    def host(self, t: int, grad: Tensor, energy: Tensor, clip: float, hyper: Hyper) -> None:
        """Take AdamW's step with important columns; add up the gradients of the others."""
        del t, energy
        self.sum += clip * grad
        self._take(self.important, clip * grad, hyper)

    def close(self, t: int, hyper: Hyper) -> None:
        """Take AdamW's step with deferred columns, by the window's mean."""
        del t
        self._take(~self.important, self.sum / self.length, hyper)
        self.sum.zero_()
        self.upload.copy_(self.master)

    def _take(self, columns: Tensor, grad: Tensor, hyper: Hyper) -> None:
        """Take AdamW's step with some columns, each by its own count of steps."""
        self.steps += columns
        before = self.exp_avg, self.exp_avg_sq, self.master
        self.exp_avg, self.exp_avg_sq = self.exp_avg.clone(), self.exp_avg_sq.clone()
        self.move_moments(grad, hyper)
        denom = (self.exp_avg_sq / (1 - hyper.beta2**self.steps)).sqrt_().add_(hyper.eps)
        step = (self.exp_avg / (1 - hyper.beta1**self.steps)).div_(denom)
        self.master = self.master * (1 - hyper.lr * hyper.weight_decay) - hyper.lr * step
        after = self.exp_avg, self.exp_avg_sq, self.master
        self.exp_avg, self.exp_avg_sq, self.master = (
            torch.where(columns, new, old) for new, old in zip(after, before, strict=True)
        )


BLOCKS: dict[str, type[Block]] = {
    "late": LateBlock,
    "former": FormerBlock,
    "published": PublishedBlock,
}
