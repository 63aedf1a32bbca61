"""The published rule as a plain loop: window means, aligned windows, a lag of S."""

import torch

from tests.reference_windows import Block, Windows


class MeanBlock(Block):
    """A block whose deferred columns take one AdamW step for each window's mean gradient."""

    def __init__(self, weight, group, ratio):
        super().__init__(weight, group, ratio)
        self.acc = self.master * 0

    def close_window(self, config):
        if self.n:
            self.move_moments(~self.important, self.acc / self.n)
            self.move_weights(~self.important)
        self.select(config)
        self.upload, self.acc = self.master.clone(), self.acc * 0


class PublishedReference(Windows):
    """Feed `step` gradients, read `weights`."""

    block = MeanBlock

    def step(self, grads):
        pairs, clip = self.begin(grads)
        for b, g in pairs:
            b.move_moments(b.important, clip * g)
            b.move_weights(b.important)
            b.acc = b.acc + clip * g
        lag, due = self.lag(self.t), [b for b in self.blocks if b.due_step == self.t]
        for b in self.blocks:
            lands = torch.tensor(b in due or self.t == b.land_step)
            b.show(b.important | lands)  # a window lands before the next ends
        for b in due:
            b.close_window(self.config)
            self.close(b)
            b.show(b.important | torch.tensor(lag == 0))
        self.lay_out()
