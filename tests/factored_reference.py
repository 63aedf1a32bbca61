"""The exact rule with second moments of rows and columns alone, as a plain loop."""

import torch

from tests.compact_reference import CompactBlock, CompactReference
from tests.reference import ExactBlock, Reference
from tests.rounded_reference import RoundedGradients


class Factored:
    """A block whose gradients are divided by the roots of their second moments."""

    def root(self):
        return (1 - self.group["betas"][1] ** (self.steps[0].item() + 1)) ** 0.5

    def fresh_step(self, grad, clip, row_squares, num_forwards, late):
        floor = max(1e-15, self.group["eps"] * self.root()) ** 2
        columns, rows = (x + floor for x in self.next_squares(clip * grad, row_squares))
        quotient = self.root() * grad / (rows[:, None] * columns / rows.mean()).sqrt()
        self.quotient = quotient.to(self.weight.dtype).float()
        seen = self.sent(self.quotient) if self.lands else self.quotient
        moved = (
            self.weight.float() - clip * self.group["lr"] * self.share(num_forwards, late) * seen
        )
        self.weight[:, ~self.important] = moved.to(self.weight.dtype)[:, ~self.important]

    def adamw(self, grad, clip, row_squares):
        if not self.is_split:
            super().adamw(grad, clip, row_squares)
            return
        self.column_squares, self.row_squares = self.next_squares(clip * grad, row_squares)
        self.steps += 1
        sent = clip * self.sent(self.quotient)
        self.exp_avg = self.exp_avg.lerp(sent, 1 - self.group["betas"][0])
        self.move_weights(torch.ones(len(self.score), dtype=torch.bool))

    def displacement(self):
        if not self.is_split:
            return super().displacement()
        beta1, steps = self.group["betas"][0], self.steps.clamp(1)
        return (self.group["lr"] / (1 - beta1**steps)).float() * self.exp_avg


class FactoredBlock(Factored, ExactBlock):
    """A block with float32 state."""


class FactoredCompactBlock(Factored, RoundedGradients, CompactBlock):
    """A block with compact state, and gradients of eight bits."""


class FactoredReference(Reference):
    """Feed `step` gradients, read `weights`."""

    block = FactoredBlock


class FactoredCompactReference(CompactReference):
    """Feed `step` gradients, read `weights`; `eval` shows the true ones."""

    made = FactoredCompactBlock
