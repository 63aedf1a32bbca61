"""Steps of one run: taken without a wait, timed, and looked at for memory and idle time."""

from __future__ import annotations

import gc
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from evidence.benchmarks.gpu.figures import TRACED_STEPS
from evidence.benchmarks.gpu.idle import profiled_idle
from evidence.benchmarks.gpu.setup import Bench
from zenflow import StepReport, ZenFlowAdamW

CLIP_NORM, LR = 1.0, 1e-4


class Training:
    """One run's steps. Nothing in them waits for the device: losses are read at the end.

    Attributes:
        reports: By step; the warm-up's come first.
        losses: Of every step.
        ends: Of every step, seconds of this thread's clock; on a GPU its kernels come later.
    """

    def __init__(self, bench: Bench, model: nn.Module, optimizer: ZenFlowAdamW) -> None:
        """Begin with the first batch."""
        self._bench, self._model, self._optimizer = bench, model, optimizer
        self.reports: dict[int, StepReport] = {}
        self.losses: list[Tensor] = []
        self.ends: list[float] = []

    def take(self, count: int, after: Callable[[str], None] = lambda _: None) -> None:
        """Take steps; `after` is called behind each part of a step, with its name."""
        for _ in range(count):
            with self._optimizer.span("forward"):
                loss = self._bench.loss(self._model, len(self.losses))
            after("forward")
            with self._optimizer.span("backward"):
                loss.backward()
            after("backward")
            if not self._optimizer.releases_gradients:
                self._optimizer.clip_grad_norm_(CLIP_NORM)
            self._optimizer.step()
            after("step")
            self.losses.append(loss.detach())
            self.ends.append(time.perf_counter())
            self._note()

    def finish(self) -> None:
        """Wait for all steps."""
        self._optimizer.synchronize()
        self._note()

    def in_order(self) -> list[StepReport]:
        """Return all reports by step."""
        return [self.reports[step] for step in sorted(self.reports)]

    def peaks(self, count: int) -> dict[str, dict[str, int]] | None:
        """Take steps; return the most device memory in each part of them; None on a CPU.

        The allocator counts as kernels are launched, so nothing has to wait.
        """
        if self._bench.device.type == "cpu":
            self.take(count)
            return None
        found: dict[str, dict[str, int]] = {}

        def read(part: str) -> None:
            stats = torch.cuda.memory_stats(self._bench.device)
            torch.cuda.reset_peak_memory_stats(self._bench.device)
            own = found.setdefault(part, {"active": 0, "reserved": 0})
            for name in own:
                own[name] = max(own[name], stats[f"{name}_bytes.all.peak"])

        torch.cuda.reset_peak_memory_stats(self._bench.device)
        self.take(count, read)
        return found

    def profiled(self, count: int) -> dict[str, Any] | None:
        """Take steps under torch's profiler; return its idle share beside the reports' stalls."""
        before = max(self.reports)

        def steps() -> None:
            self.take(count)
            self.finish()

        idle = profiled_idle(steps)
        later = [report for report in self.in_order() if report.step > before]
        seconds = sum(report.seconds for report in later)
        if idle is None or not seconds:
            return None
        stalled = sum(report.stall_seconds for report in later)
        return {**idle, "stall_share": stalled / seconds}

    def _note(self) -> None:
        """Keep the last finished step's report; on a GPU that is the step before the last."""
        report = self._optimizer.report
        if report is not None:
            self.reports[report.step] = report


class Pauses:
    """Notes the garbage collector's pauses while it is entered.

    Objects that are there before are collected once and then left alone, as a training script may
    do: else a full collection of a million of them lasts longer than a step.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def __enter__(self) -> Pauses:
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)
        gc.unfreeze()

    def _note(self, phase: str, _: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._started = now
        else:
            self.seconds.append(now - self._started)

    def to_dict(self) -> dict[str, Any]:
        """Return their number, their sum and the longest, JSON-ready."""
        longest = max(self.seconds, default=0.0)
        return {"count": len(self.seconds), "seconds": sum(self.seconds), "longest": longest}


@dataclass(frozen=True, slots=True)
class Timed:
    """The timed steps of a run."""

    first: int
    """Number of the first."""
    wall_seconds: float
    """Seconds of a step by the clock of the thread that trains, which is a step ahead at most."""
    pauses: Mapping[str, Any]
    """The garbage collector's pauses meanwhile."""
    thread_seconds: Mapping[str, float]
    """CPU seconds of a step by the threads' names; a thread that waits for a GPU spins."""


def num_steps(window: int, options: Namespace) -> int:
    """Return the most steps that a run takes, those for its timeline and its peaks included."""
    stretch = max(TRACED_STEPS, window)
    timed = max(1, options.steps // stretch) * stretch
    return int(max(options.warm_steps, 2 * window) + timed + window + TRACED_STEPS)


def take_steps(training: Training, window: int, options: Namespace, budget: float) -> Timed:
    """Take the warm-up and the timed steps; fewer of them, whole windows, if time runs out."""
    stretch = max(TRACED_STEPS, window)
    started = time.monotonic()
    warm: int = max(options.warm_steps, 2 * window)
    with Pauses() as pauses:
        training.take(warm)
        pauses.seconds.clear()
        before = thread_seconds()
        for _ in range(max(1, options.steps // stretch)):
            training.take(stretch)
            if time.monotonic() - started > budget:
                break
    training.finish()
    ends = training.ends[warm - 1 :]
    count = len(ends) - 1
    busy = {
        name: (seconds - before.get(name, 0.0)) / count
        for name, seconds in thread_seconds().items()
    }
    return Timed(warm + 1, (ends[-1] - ends[0]) / count, pauses.to_dict(), busy)


def thread_seconds() -> dict[str, float]:
    """Return CPU seconds of this process so far by its threads' names, without their numbers.

    Kernels are launched by Python's main thread in forward, and by autograd's in backward.
    """
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for thread in psutil.Process().threads():
        name = python.get(thread.id) or _system_name(thread.id)
        name = name.rstrip("-_0123456789")
        found[name] = found.get(name, 0.0) + thread.user_time + thread.system_time
    return found


def _system_name(thread: int) -> str:
    """Return the name that the system has for a thread; it may have ended."""
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"
