"""ZenFlowAdamW's update rule as a plain loop over float32 matrices: no threads, no copies."""

import torch

from tests.reference_windows import Block, Windows


class ExactBlock(Block):
    """A block whose masters and moments are AdamW's, whoever owns the columns."""

    def __init__(self, weight, group, ratio):
        super().__init__(weight, group, ratio)
        self.mean_square = torch.zeros(weight.shape[1])

    def fresh_step(self, grad, clip, num_forwards):
        """Move deferred weights by the gradient's expected share of AdamW's motion."""
        lr, (beta1, beta2), t = self.group["lr"], self.group["betas"], self.steps[0].item() + 1
        share = sum((1 - beta1**j) / (1 - beta1) for j in range(1, num_forwards + 1))
        share = share / num_forwards if num_forwards else 0
        rate = lr * share * (1 - beta1) / (1 - beta1**t)
        mean_square = beta2 * self.mean_square + (1 - beta2) * (clip * grad).square().mean(0)
        denom = (mean_square / (1 - beta2**t)).sqrt() + self.group["eps"]
        moved = self.weight.float() - rate * clip * grad / denom
        self.weight[:, ~self.important] = moved.to(self.weight.dtype)[:, ~self.important]

    def adamw(self, grad):
        beta2, every = self.group["betas"][1], torch.ones(len(self.score), dtype=torch.bool)
        self.mean_square = beta2 * self.mean_square + (1 - beta2) * grad.square().mean(0)
        self.move_moments(every, grad)
        self.move_weights(every)

    def make_upload(self, lag, num_forwards):
        """Move the master on by what momentum does, on average over the upload's forwards."""
        beta1 = self.group["betas"][0]
        leads = [sum(beta1**i for i in range(1, lag + j + 1)) for j in range(num_forwards)]
        self.upload = self.master - sum(leads) / len(leads) * self.displacement()
        self.upload[:, self.important] = self.master[:, self.important]


class Reference(Windows):
    """Feed `step` gradients, read `weights`."""

    block = ExactBlock
    clip = 1.0
    """The last step's clip factor."""

    def step(self, grads):
        pairs, clip = self.begin(grads)
        for b in self.blocks:
            if b.land_step == self.t or b.due_step == self.t:  # before the next window ends
                b.land_step = None if b.land_step is None else b.show(~b.important)
        for b, grad in pairs:
            b.fresh_step(grad, self.clip, b.due_step + self.lag(b.due_step) - self.t)
            b.adamw(clip * grad)
            b.weight[:, b.important] = b.master[:, b.important].to(b.weight.dtype)
        due = [b for b in self.blocks if b.due_step == self.t]
        counts, lag = {b: b.n for b in due}, self.lag(self.t)
        for b in due:
            former = b.important
            b.select(self.config)
            came = b.important & ~former
            b.weight[:, came] = b.master[:, came].to(b.weight.dtype)
            self.close(b)
        self.lay_out()
        for b in due:
            num_forwards = b.due_step + self.lag(b.due_step) - self.t - lag
            if not counts[b]:
                b.land_step = None
                continue
            b.make_upload(lag, num_forwards)
            if lag == 0:
                b.land_step = b.show(~b.important)
        self.clip = clip
