"""When windows end, as plain loops: the part of the references that both update rules share."""

from itertools import groupby
from math import ceil, floor

import torch


class Block:
    """A run of one parameter's columns, (O, n); a resident parameter's are all important."""

    def __init__(self, weight, group, ratio):
        self.weight, self.group, n = weight, group, weight.shape[1]
        self.is_split, c = ratio < 1, self.set_count(ratio)
        self.important = torch.isin(torch.arange(n), torch.arange(c) * n // max(1, c))
        self.master, self.upload = weight.float().clone(), weight.float().clone()
        self.exp_avg, self.exp_avg_sq = self.master * 0, self.master * 0
        self.score, self.steps = torch.zeros(n), torch.zeros(n).double()
        self.n, self.start, self.land_step, self.due_step, self.pending = 0, 0, None, None, False

    def set_count(self, ratio):
        n = self.weight.shape[1]
        self.count = min(n, max(1, floor(ratio * n + 0.5))) if ratio else 0
        return self.count

    def show(self, columns):
        self.weight[:, columns] = self.upload[:, columns].to(self.weight.dtype)

    def move_moments(self, columns, grad):
        m, v, g = (x[:, columns] for x in (self.exp_avg, self.exp_avg_sq, grad))
        (beta1, beta2), self.steps[columns] = self.group["betas"], self.steps[columns] + 1
        self.exp_avg[:, columns] = m.lerp(g, 1 - beta1)
        self.exp_avg_sq[:, columns] = v * beta2 + (1 - beta2) * g * g

    def displacement(self):
        lr, (beta1, beta2), steps = self.group["lr"], self.group["betas"], self.steps.clamp(1)
        denom = self.exp_avg_sq.sqrt() / (1 - beta2**steps).sqrt().float() + self.group["eps"]
        return (lr / (1 - beta1**steps)).float() * self.exp_avg / denom

    def move_weights(self, columns):
        decay = 1 - self.group["lr"] * self.group["weight_decay"]
        self.master[:, columns] = (self.master * decay - self.displacement())[:, columns]
        self.upload[:, columns] = self.master[:, columns]

    def select(self, config):
        """Choose the important columns anew, if that is asked for."""
        if self.pending:
            order = (-self.score * (1 + config.hysteresis * self.important)).argsort(stable=True)
            self.important = torch.isin(torch.arange(len(order)), order[: self.count])
        self.pending = False


class Windows:
    """Cuts parameters into blocks and ends their windows; `log` has (t, knobs) after step t."""

    def __init__(self, groups, config, max_norm=None, log=()):
        self.config, self.max_norm, self.log = config, max_norm, log
        self.groups, self.t, self.rule = groups, 0, config
        least, fewest = (1, 1) if config.block_elements else (64, 1 << 15)
        params = [(p, group) for group in groups for p in group["params"] if p.requires_grad]
        split = {p for p, _ in params if p.ndim > 1 and p.numel() >= config.min_split_elements}
        share = ceil(sum(p.numel() for p in split) / (8 * config.update_interval))
        cap = config.block_elements or share or 1
        self.weights, self.runs = [p.detach().cpu().clone() for p, _ in params], []
        for weight, (p, group) in zip(self.weights, params, strict=True):
            matrix, ratio = weight.view(len(p) if p.ndim > 1 else 1, -1), config.topk_ratio
            most = min(len(matrix.T) // least, p.numel() // fewest) or 1
            runs = matrix.tensor_split(min(ceil(p.numel() / cap), most), 1)
            self.runs.append([self.block(run, group, ratio if p in split else 1) for run in runs])
        self.blocks = [b for run in reversed(self.runs) for b in run]  # backward's order
        self.put_in_buckets()

    block = Block

    def put_in_buckets(self):
        runs = [run for run in reversed(self.runs) if run[0].is_split]
        sizes = [sum(b.weight.numel() for b in run) for run in runs]
        enough, bucket, filled = min(1 << 18, max(1 << 14, sum(sizes) // 32)), 0, 0
        for run, size in zip(runs, sizes, strict=True):
            bucket, filled = (bucket + 1, size) if filled >= enough else (bucket, filled + size)
            for b in run:
                b.bucket = bucket

    def phases(self, S):
        load, phases, left = [0] * S, {}, []
        sizes = {b: len(b.weight) * int((~b.important).sum()) for b in self.blocks if b.is_split}

        def place(blocks):
            least = load.index(min(load))
            load[least] += sum(sizes[b] for b in blocks)
            phases.update(dict.fromkeys(blocks, least))

        for _, neighbours in groupby(sizes, key=lambda b: b.bucket):
            blocks = list(neighbours)
            size = sum(sizes[b] for b in blocks)
            if size > 1 << 18:
                for b in blocks:
                    place([b])
            elif min(load) + size <= 1.02 * sum(sizes.values()) / S:
                place(blocks)
            else:
                left += blocks
        for b in sorted(left, key=lambda b: -sizes[b]):
            place([b])
        return phases

    def set_due_steps(self, now, old):
        S, starts = self.rule.update_interval, [b.start for b in self.blocks]
        phases, together = self.phases(S), min(max(starts) + S, min(starts) + old + S)
        for b in self.blocks:
            in_turn = min(now + 1 + phases.get(b, 0), b.start + old + S)
            b.due_step = max(now + 1, in_turn if self.rule.rolling else together)

    def lag(self, t):
        return self.rule.effective_lag() if t > self.config.full_warm_up_rounds else 0

    def begin(self, grads):
        """Let a step's knobs and scores hold; return its blocks' gradients and the clip factor."""
        W, t, old, decay = self.config.full_warm_up_rounds, self.t + 1, self.rule, 0
        self.t, decay, pairs = t, self.config.importance_decay, []
        self.rule = [old, *(k.applied_to(self.config) for step, k in self.log if step < t)][-1]
        S, k = self.rule.update_interval, self.rule.topk_ratio
        self.resizes = k != old.topk_ratio
        if t == W + 1 or (t > W and old.update_interval != S):
            self.set_due_steps(t - 1, old.update_interval)
        for b in self.blocks:
            b.due_step = t if t <= W or self.resizes else b.due_step
            if self.resizes:  # every window ends, and columns are chosen anew
                b.pending = b.is_split and b.set_count(k) > 0
            b.pending |= t in range(max(W, 1), t + 1, self.rule.select_interval_steps or t)
        for run, grad in ((r, g) for r, g in zip(self.runs, grads, strict=True) if g is not None):
            matrix = grad.cpu().float().reshape(len(run[0].weight), -1)
            pairs += zip(run, matrix.tensor_split(len(run), dim=1), strict=True)
        norm = sum(g.square().sum() for _, g in pairs) ** 0.5
        clip = 1.0 if self.max_norm is None else min(1.0, float(self.max_norm / (norm + 1e-6)))
        for b, g in pairs:
            b.score = decay * b.score + (1 - decay) * g.square().sum(0)
            b.n += 1
        return pairs, clip

    def close(self, b):
        """End a block's window and open the next one."""
        t, S, b.n = self.t, self.rule.update_interval, 0
        is_warm_up = t < self.config.full_warm_up_rounds
        b.start, b.land_step, b.due_step = t, t + self.lag(t), t + (1 if is_warm_up else S)

    def lay_out(self):
        """Open all windows anew after a change of k, and after warm-up."""
        W = self.config.full_warm_up_rounds
        if self.t == W or (self.resizes and self.t > W):
            self.set_due_steps(self.t, self.rule.update_interval)
