"""Jobs of the host benchmark: our passes over host state, their rivals, the memory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zenflow.host import e4m3
from zenflow.host.compact import CompactState, FactoredCompactState
from zenflow.host.jobs import (
    AdamStep,
    CatchUpJob,
    Changes,
    CompactJob,
    HostJob,
    SumJob,
    Upload,
)
from zenflow.host.pool import HostPool
from zenflow.host_state import gradient_bytes, gradient_width, mark_bytes

COLUMNS = 4096
CACHED_PARAMS = 1 << 15  # 0.9 MB of counted bytes: fits a core's second-level cache
STAGGER = COLUMNS + 64
"""Number of elements between one gradient's end and the next one's start."""
BETAS, EPS, LR, DECAY = (0.9, 0.999), 1e-8, 1e-4, 0.01
STEP = AdamStep(LR, *BETAS, EPS, decay=1 - LR * DECAY)
DEPTHS = (1, 2, 4, 8)
"""Numbers of gradients of one pass, q."""
FACTORED_DEPTHS = (1, 4)
"""Numbers of gradients of passes without second moments."""
SHORT_DEPTH = 4
"""Number of gradients of the passes that take gradients of eight bits in."""
WINDOW = 4
"""Number of gradients of the published rule's window."""


def replay_of(depth: int) -> str:
    """Return the name of the pass that takes so many gradients in."""
    return f"zenflow replay, q = {depth}"


def compact_replay_of(depth: int) -> str:
    """Return the name of the pass over compact state that takes so many gradients in."""
    return f"compact replay, q = {depth}"


def factored_replay_of(depth: int) -> str:
    """Return the name of the pass over compact state without second moments."""
    return f"factored replay, q = {depth}"


def short_replay_of(depth: int, *, is_compact: bool = False) -> str:
    """Return the name of a pass that takes so many gradients of eight bits in."""
    name = compact_replay_of(depth) if is_compact else replay_of(depth)
    return f"{name}, 8-bit gradients"


OURS, PUBLISHED, CAST, FUSED, DEEPSPEED, BITSANDBYTES = (
    replay_of(1),
    f"published rule, sums of S = {WINDOW} and a step",
    "cast + torch fused AdamW + cast",
    "torch fused AdamW alone (float32)",
    "cast + DeepSpeed CPUAdam + cast",
    "cast + bitsandbytes AdamW8bit + cast",
)
COPY, TRIAD, SCALE = "copy", "triad", "scale in place"
FLOORS = (COPY, TRIAD, SCALE)


@dataclass(frozen=True)
class Job:
    """Something timed: a call over all parameters, and the bytes it must move for each."""

    name: str
    bytes_per_param: float
    run: Callable[[], Any]
    traffic: float
    """Bytes the memory moves for each: those, and lines that are read before they are written."""
    gradients: int = 1
    """Number of gradients that the call takes in."""


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
        self.step = torch.full((self.rows,), 100)

    def replay(self, grads: Sequence[Tensor]) -> CatchUpJob:
        """Return our pass over all rows, which takes gradients in and uploads weights."""
        return CatchUpJob(
            master=self.master.data,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            step=self.step,
            active=self.active,
            steps=[replace(STEP, grad=grad) for grad in grads],
            upload=Upload(self.out, lead=1.0, step=STEP, repeats_last=True),
        )

    def compact(
        self, grads: Sequence[Tensor], kind: type[CompactState] = CompactState
    ) -> CompactJob:
        """Return the same pass over compact state, in memory of its own."""
        state = kind.zeros(self.rows, COLUMNS)
        for first in range(0, self.rows, 256):  # a conversion takes several times the memory
            part = slice(first, first + 256)
            grad = self.grad[part].float()
            state.rows(part).set_weights(self.master.data[part])
            state.rows(part).set_moments(grad, grad.square()[:, : state.exp_avg_sq.shape[1]])
        plain = self.replay(grads)
        return CompactJob(
            state=state,
            step=self.step.clone(),
            active=self.active,
            steps=plain.steps,
            upload=plain.upload,
            first=0,
            stride=COLUMNS,
            seed=0,
        )

    def factored(self, grads: Sequence[Tensor]) -> CompactJob:
        """Return the same pass over compact state without second moments."""
        return self.compact(grads, FactoredCompactState)

    def repeatable(self, *, marks: bool) -> Upload:
        """Return an upload that a later pass can find again, with marks of changes or without."""
        shape = (self.rows, mark_bytes(COLUMNS))
        changes = Changes(torch.empty(shape, dtype=torch.uint8), lead=1.0, step=STEP)
        return Upload(
            self.out, lead=1.0, step=STEP, repeats_last=True, is_repeatable=True,
            changes=changes if marks else None,
        )  # fmt: skip

    def grads(self, count: int) -> list[Tensor]:
        """Return so many gradients, each in memory of its own.

        Their places in the caches differ, as a queue's do: eight streams that begin at multiples
        of a large power of two would push each other out.
        """
        pitch = self.grad.numel() + STAGGER
        memory = self.grad.new_empty(count * pitch)
        grads = [part[: self.grad.numel()].view_as(self.grad) for part in memory.split(pitch)]
        for grad in grads:
            grad.copy_(self.grad)
        return grads

    def short_grads(self, count: int) -> list[Tensor]:
        """Return so many gradients of eight bits, each in memory of its own."""
        width = gradient_width("e4m3", COLUMNS)
        grads = [torch.empty(self.rows, width, dtype=torch.uint8) for _ in range(count)]
        for grad in grads:
            e4m3.encode(self.grad, grad)
        return grads

    def adopt(self, optimizer: torch.optim.Optimizer, step: Tensor | int) -> None:
        """Give the optimizer our moments, so that all jobs walk over the same memory."""
        moments = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        optimizer.state[self.master] = {"step": step, **moments}


def our_jobs(state: State, threads: int) -> list[Job]:
    """Return our passes by q and the published rule's, on a pool as the engine's.

    Raises:
        RuntimeError: There is no C kernel.
    """
    pool = HostPool.open(threads - 1)
    if pool is None:
        raise RuntimeError("the C kernel is not built: reinstall with a C compiler present")
    grads = state.grads(max(DEPTHS))

    def runs(*jobs: HostJob) -> Callable[[], None]:
        def run() -> None:
            for job in jobs:  # each needs what the one before has done
                pool.run([job.encode()])

        return run

    total = torch.empty(state.grad.shape)
    sums = [SumJob(total, grad, 1.0, is_first=n == 0) for n, grad in enumerate(grads[:WINDOW])]
    # Master and moments read and written, gradients read, the weight for upload written.
    replays = [
        Job(replay_of(depth), 26 + 2 * depth, runs(state.replay(grads[:depth])),
            traffic=28 + 2 * depth, gradients=depth)
        for depth in DEPTHS
    ]  # fmt: skip
    # Five bytes and two of each group of 64, read and written.
    compact = [
        Job(compact_replay_of(depth), 12.0625 + 2 * depth,
            runs(state.compact(grads[:depth])), traffic=14.0625 + 2 * depth,
            gradients=depth)
        for depth in DEPTHS
    ]  # fmt: skip
    # Four bytes and one of each group of 64, read and written.
    compact += [
        Job(factored_replay_of(depth), 10.03125 + 2 * depth,
            runs(state.factored(grads[:depth])), traffic=12.03125 + 2 * depth,
            gradients=depth)
        for depth in FACTORED_DEPTHS
    ]  # fmt: skip
    short = state.short_grads(SHORT_DEPTH)
    sent = SHORT_DEPTH * gradient_bytes("e4m3", 2)
    for job, held in ((state.replay(short), 26), (state.compact(short), 12.0625)):
        name = short_replay_of(SHORT_DEPTH, is_compact=isinstance(job, CompactJob))
        compact.append(
            Job(name, held + sent, runs(job), traffic=held + 2 + sent, gradients=SHORT_DEPTH)
        )
    summing = 2 * WINDOW + 4 + 8 * (WINDOW - 1)
    window = runs(*sums, state.replay([total]))
    published = Job(PUBLISHED, 30 + summing, window, traffic=36 + summing, gradients=WINDOW)
    return [*replays, *compact, published]


def optimizer_jobs(state: State) -> tuple[list[Job], str]:
    """Return the peers' jobs, and which are missing and why."""
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
    missing = []
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        missing.append(f"bitsandbytes is not installed ({error})")
    else:  # moments in 8 bits, with a float32 for each 256
        eight_bit = AdamW8bit([state.master], **settings)
        jobs.append(Job(BITSANDBYTES, 32.0625, cast_around(eight_bit.step), traffic=38.0625))
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        cpu_adam = DeepSpeedCPUAdam([state.master], **settings)
    except ImportError as error:
        missing.append(f"DeepSpeed is not installed ({error})")
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        missing.append(f"DeepSpeed's CPUAdam does not build here ({error})")
    else:
        state.adopt(cpu_adam, 100)
        jobs.append(Job(DEEPSPEED, 40, cast_around(cpu_adam.step), traffic=46))
    return jobs, "; ".join(missing)


def floor_jobs(params: int) -> list[Job]:
    """Return the memory's own speeds; torch's loops, as fast as hand-written ones here."""
    a, b, c = (torch.full((params,), float(value)) for value in (1, 2, 3))
    return [
        Job(COPY, 8, lambda: a.copy_(b), traffic=12),
        Job(TRIAD, 12, lambda: torch.add(b, c, alpha=0.5, out=a), traffic=16),
        Job(SCALE, 8, lambda: c.mul_(1.0), traffic=8),
    ]
