"""The exact rule over compact host state, as a plain loop: rounded once in every pass."""

from functools import partial
from itertools import count

import torch

from tests.reference import ExactBlock, Reference
from zenflow.host.compact import CompactState, Rounding, keys_of


class CompactBlock(ExactBlock):
    """A block whose deferred columns are rounded when the gradients that wait are applied."""

    waiting, seed, first = 0, None, 0
    """Gradients that wait; with a number of the parameter rounding is random, for k = 0 alone."""

    def round(self, columns):
        """Round these columns as the host does."""
        numbers = [x[:, columns].T for x in (self.master, self.exp_avg, self.exp_avg_sq)]
        state = CompactState.zeros(*numbers[0].shape)
        state.encode(*numbers, self.rounding(columns))
        for x, rounded in zip(
            (self.master, self.exp_avg, self.exp_avg_sq), state.numbers(), strict=True
        ):
            x[:, columns] = rounded.T

    def rounding(self, columns):
        if self.seed is None:
            return Rounding.nearest()
        numbers = len(self.weight) * (self.first + torch.arange(len(columns))[columns])
        return Rounding.drawn(
            keys_of(self.seed, self.steps[columns].long()), numbers, len(self.weight)
        )

    def flush(self):
        if self.waiting:
            self.round(~self.important)
        self.waiting = 0

    def took_step(self, is_due):
        self.waiting += 1
        if self.waiting >= self.depth and not is_due:
            self.flush()

    def select(self, config):
        if self.is_resized:  # gradients are applied where they are before columns move
            self.flush()
        super().select(config)

    def came(self, former):
        self.came_now = former & ~self.important
        self.round(self.came_now)

    def ended(self):
        if self.waiting:
            self.round(~self.important & ~self.came_now)
        self.waiting = 0


class CompactReference(Reference):
    """Feed `step` gradients, read `weights`; `eval` shows the true ones."""

    made = CompactBlock

    def __init__(self, *arguments, depth, is_random=False):
        """Let `depth` gradients wait at most, and round at random or to nearest."""
        self.block = partial(self.make, depth)
        super().__init__(*arguments)
        seeds = count(1)
        for run in self.runs:
            if run[0].is_split:
                seed, first = next(seeds), 0
                for b in run:
                    b.first, first = first, first + b.weight.shape[1]
                    b.seed = seed if is_random else None
                    bits = b.master[:, ~b.important]
                    state = CompactState.zeros(*bits.T.shape)
                    state.set_weights(bits.T)
                    b.master[:, ~b.important] = state.weights().T

    def make(self, depth, *arguments):
        block = self.made(*arguments)
        block.depth = depth if block.is_split else float("inf")
        return block

    def begin(self, grads):
        begun = super().begin(grads)
        for b in self.blocks:
            b.is_resized = self.resizes
        return begun

    def eval(self):
        """Apply all gradients that wait, and return the true weights."""
        for b in self.blocks:
            b.flush()
        pairs = zip(self.weights, self.runs, strict=True)
        return [torch.cat([b.master for b in run], dim=1).view(w.shape).to(w) for w, run in pairs]
