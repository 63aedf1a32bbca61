"""ZenFlowAdamW's update rule as a plain loop over float32 matrices: no threads, no copies."""

import torch

from tests.reference_windows import Block, Windows


def delay(beta1, n):
    """Return by how many steps n forwards are behind AdamW's weights on average."""
    memory = beta1 / (1 - beta1)
    return 1.5 * memory * (n * n - 1) / (3 * memory + n + 2) ** 2


def first(age, moves):
    """Return the sum of the first moves, so many as an age has steps, the last one in part."""
    return sum(min(1, max(0, age - i)) * move for i, move in enumerate(moves))


class ExactBlock(Block):
    """A block whose masters and moments are AdamW's, whoever owns the columns."""

    column_squares = row_squares = 0.0
    """Second moments in the mean: by column, and by row of the whole parameter."""
    lands = False
    """Whether an upload has landed in this step."""

    def sent(self, grad):
        """Return a gradient as the owners of its columns get it."""
        return grad

    def next_squares(self, grad, row_squares):
        beta2 = self.group["betas"][1]
        columns = beta2 * self.column_squares + (1 - beta2) * grad.square().mean(0)
        return columns, beta2 * self.row_squares + (1 - beta2) * row_squares

    def share(self, num_forwards, late):
        """Return the gradient's expected share of AdamW's motion."""
        beta1, t = self.group["betas"][0], self.steps[0].item() + 1
        moves = [(1 - beta1) * beta1**i / (1 - beta1 ** (t + i)) for i in range(num_forwards)]
        ages = [j - late for j in range(1, num_forwards + 1)]
        return sum(first(age, moves) for age in ages) / num_forwards if num_forwards else 0

    def fresh_step(self, grad, clip, row_squares, num_forwards, late):
        """Move deferred weights by the gradient's expected share of AdamW's motion."""
        lr, beta2, t = self.group["lr"], self.group["betas"][1], self.steps[0].item() + 1
        rate = clip * lr * self.share(num_forwards, late) * (1 - beta2**t) ** 0.5
        floor = max(1e-15, self.group["eps"] * (1 - beta2**t) ** 0.5) ** 2
        columns, rows = (x + floor for x in self.next_squares(clip * grad, row_squares))
        seen = self.sent(grad) if self.lands else grad
        moved = self.weight.float() - rate * seen / (rows[:, None] * columns / rows.mean()).sqrt()
        self.weight[:, ~self.important] = moved.to(self.weight.dtype)[:, ~self.important]

    def took_step(self, is_due):
        """Note a gradient that the host has."""

    def came(self, former):
        """Note columns that the host has from now on, once they were chosen."""

    def ended(self):
        """Note a window's end, once its upload is made."""

    def adamw(self, grad, clip, row_squares):
        every = torch.ones(len(self.score), dtype=torch.bool)
        self.column_squares, self.row_squares = self.next_squares(clip * grad, row_squares)
        self.move_moments(every, clip * self.sent(grad))
        self.move_weights(every)

    def make_upload(self, lag, num_forwards, late):
        """Move the master on by what momentum does, on average over the upload's forwards."""
        beta1, t, end = self.group["betas"][0], self.steps[0].item(), lag + num_forwards
        moves = [beta1**i * (1 - beta1**t) / (1 - beta1 ** (t + i)) for i in range(1, end)]
        ages = [lag + j - late for j in range(num_forwards)]
        leads = [first(age, moves) if age > 0 else age for age in ages]
        self.upload = self.master - sum(leads) / len(leads) * self.displacement()
        self.upload[:, self.important] = self.master[:, self.important]


class Reference(Windows):
    """Feed `step` gradients, read `weights`."""

    block, clip = ExactBlock, 1.0  # `clip` is the last step's clip factor

    def late(self, b, num_forwards):
        """Return the steps by which forwards are behind AdamW's weights on average."""
        return delay(b.group["betas"][0], num_forwards) if self.config.forward_delay else 0

    def step(self, grads):
        pairs, clip = self.begin(grads)
        for b in self.blocks:
            b.lands = b.land_step is not None and self.t in (b.land_step, b.due_step)
            if b.lands:  # before the next window ends
                b.land_step = b.show(~b.important)
        grads = dict(pairs)
        for run in self.runs:
            matrix = [grads[b] for b in run if b in grads]
            rows = torch.cat(matrix, 1).square().mean(1) if matrix else None
            for b in run if matrix else []:
                landing = b.due_step + self.lag(b.due_step)
                late, num_forwards = self.late(b, self.rule.update_interval), landing - self.t
                b.fresh_step(grads[b], self.clip, self.clip**2 * rows, num_forwards, late)
                b.adamw(grads[b], clip, clip**2 * rows)
                b.weight[:, b.important] = b.master[:, b.important].to(b.weight.dtype)
                b.took_step(b.due_step == self.t and not self.resizes)
        due = [b for b in self.blocks if b.due_step == self.t]
        counts, lag = {b: b.n for b in due}, self.lag(self.t)
        for b in due:
            former = b.important
            b.select(self.config)
            came = b.important & ~former
            b.weight[:, came] = b.master[:, came].to(b.weight.dtype)
            b.came(former)
            self.close(b)
        self.lay_out()
        for b in due:
            num_forwards = b.due_step + self.lag(b.due_step) - self.t - lag
            if not counts[b]:
                b.land_step = None
                continue
            b.make_upload(lag, num_forwards, self.late(b, num_forwards))
            b.ended()
            if lag == 0:
                b.land_step = b.show(~b.important)
        self.clip = clip
