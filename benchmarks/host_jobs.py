"""What the host benchmark times: our two passes over host state, their rivals, the memory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zenflow import kernel

COLUMNS = 4096
PART_PARAMS = 1 << 18  # in one call: Python's part of a call is then a hundredth
CACHED_PARAMS = 1 << 15  # 0.9 MB of counted bytes: fits a core's second-level cache
BETAS, EPS, LR, DECAY = (0.9, 0.999), 1e-8, 1e-4, 0.01
OURS, MOMENTS, CAST, FUSED, DEEPSPEED = (
    "zenflow host update",
    "zenflow moments (mid-window)",
    "cast + torch fused AdamW + cast",
    "torch fused AdamW alone (float32)",
    "cast + DeepSpeed CPUAdam + cast",
)
COPY, TRIAD, SCALE = "copy", "triad", "scale in place"
FLOORS = (COPY, TRIAD, SCALE)


@dataclass(frozen=True)
class Job:
    """Something timed: a call over all parameters, and the bytes it must move for each."""

    name: str
    bytes_per_param: int
    run: Callable[[], Any]
    traffic: int
    """Bytes the memory moves for each: those, and lines that are read before they are written."""


class State:
    """Memory of one optimizer, rows of COLUMNS parameters; all jobs continue one training."""

    def __init__(self, params: int) -> None:
        self.rows = params // COLUMNS
        generator = torch.Generator().manual_seed(0)
        shape = (self.rows, COLUMNS)
        self.master = torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02)
        self.exp_avg, self.exp_avg_sq = torch.zeros(shape), torch.zeros(shape)
        self.grad = (torch.randn(shape, generator=generator) * 0.01).bfloat16()
        self.out = torch.empty(shape, dtype=torch.bfloat16)
        self.step_size = torch.full((self.rows,), LR)
        self.denom_scale = torch.ones(self.rows)
        self.active = torch.ones(self.rows, dtype=torch.uint8)

    def update(self, first: int, last: int) -> None:
        """Run our kernel on rows first..last-1."""
        part = slice(first, last)
        kernel.adamw(
            self.master.data[part],
            self.exp_avg[part],
            self.exp_avg_sq[part],
            self.out[part],
            grad=self.grad[part],
            grad_scale=1.0,
            acc=None,
            count=1,
            step_size=self.step_size[part],
            denom_scale=self.denom_scale[part],
            active=self.active[part],
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            decay=1 - LR * DECAY,
            prediction=1.0,
        )

    def move_moments(self, first: int, last: int) -> None:
        """Run our kernel's mid-window pass on rows first..last-1."""
        part = slice(first, last)
        kernel.moments(
            self.exp_avg[part],
            self.exp_avg_sq[part],
            self.grad[part],
            1.0,
            beta1=BETAS[0],
            beta2=BETAS[1],
        )

    def adopt(self, optimizer: torch.optim.Optimizer, step: Tensor | int) -> None:
        """Give the optimizer our moments, so that all jobs walk over the same memory."""
        moments = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        optimizer.state[self.master] = {"step": step, **moments}


def our_jobs(state: State, threads: int) -> list[Job]:
    """Return our two passes: each thread walks its share of the rows in parts."""
    pool = ThreadPoolExecutor(threads)
    part = max(1, PART_PARAMS // COLUMNS)
    cuts = [state.rows * index // threads for index in range(threads + 1)]

    def shared(work: Callable[[int, int], None]) -> Callable[[], Any]:
        def walk(first: int, last: int) -> None:
            for row in range(first, last, part):
                work(row, min(row + part, last))

        return lambda: list(pool.map(walk, cuts[:-1], cuts[1:]))

    return [
        Job(OURS, 28, shared(state.update), traffic=30),
        Job(MOMENTS, 18, shared(state.move_moments), traffic=18),
    ]


def optimizer_jobs(state: State) -> tuple[list[Job], str]:
    """Return the peers' jobs, and why DeepSpeed is missing if it is."""
    settings: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    fused = torch.optim.AdamW([state.master], fused=True, **settings)
    state.adopt(fused, torch.tensor(100.0))
    wide_grad = state.grad.float()

    def cast_around(step: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            wide_grad.copy_(state.grad)
            step()
            state.out.copy_(state.master.data)

        return run

    state.master.grad = wide_grad
    jobs = [
        Job(CAST, 40, cast_around(fused.step), traffic=46),
        Job(FUSED, 28, fused.step, traffic=28),
    ]
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        cpu_adam = DeepSpeedCPUAdam([state.master], **settings)
    except ImportError as error:
        return jobs, f"DeepSpeed is not installed ({error})"
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return jobs, f"DeepSpeed's CPUAdam does not build here ({error})"
    state.adopt(cpu_adam, 100)
    return [*jobs, Job(DEEPSPEED, 40, cast_around(cpu_adam.step), traffic=46)], ""


def floor_jobs(params: int) -> list[Job]:
    """Return the memory's own speeds; torch's loops, as fast as hand-written ones here."""
    a, b, c = (torch.full((params,), float(value)) for value in (1, 2, 3))
    return [
        Job(COPY, 8, lambda: a.copy_(b), traffic=12),
        Job(TRIAD, 12, lambda: torch.add(b, c, alpha=0.5, out=a), traffic=16),
        Job(SCALE, 8, lambda: c.mul_(1.0), traffic=8),
    ]
