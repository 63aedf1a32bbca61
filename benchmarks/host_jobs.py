"""What the host benchmark times: our two passes over host state, their rivals, the memory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zenflow.columns.host_rows import HostRows
from zenflow.columns.host_update import Moments, Update, WindowUpdate
from zenflow.host.pool import HostJob, HostPool
from zenflow.rule.adamw import Hyper

COLUMNS = 4096
CACHED_PARAMS = 1 << 15  # 0.9 MB of counted bytes: fits a core's second-level cache
BETAS, EPS, LR, DECAY = (0.9, 0.999), 1e-8, 1e-4, 0.01
HYPER = Hyper(LR, *BETAS, EPS, DECAY)
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
        self.active = torch.ones(self.rows, dtype=torch.uint8)
        self.shape = shape
        self.host = HostRows(
            master=self.master.data,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            step=torch.full((self.rows,), 100),
            accumulators=[],
            staging=self.grad,
        )

    def update(self) -> HostJob:
        """Return our update of all rows, which reads their gradients and moves the moments."""
        window = WindowUpdate(
            hyper=HYPER,
            lr_scale=1.0,
            count=1,
            accumulator=None,
            reads_staging=True,
            prediction=1.0,
        )
        return Update(self.host, self.shape, window, self.active, self.out).encode()

    def move_moments(self) -> HostJob:
        """Return our mid-window pass over all rows."""
        return Moments(self.host, self.shape, HYPER).encode()

    def adopt(self, optimizer: torch.optim.Optimizer, step: Tensor | int) -> None:
        """Give the optimizer our moments, so that all jobs walk over the same memory."""
        moments = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        optimizer.state[self.master] = {"step": step, **moments}


def our_jobs(state: State, threads: int) -> list[Job]:
    """Return our two passes, on a pool as the engine's.

    Raises:
        RuntimeError: There is no C kernel.
    """
    pool = HostPool.open(threads - 1)
    if pool is None:
        raise RuntimeError("the C kernel is not built: reinstall with a C compiler present")
    return [
        Job(OURS, 28, lambda: pool.run([state.update()], 1.0), traffic=30),
        Job(MOMENTS, 18, lambda: pool.run([state.move_moments()], 1.0), traffic=18),
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
