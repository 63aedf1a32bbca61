"""Steps of one engine: timed one by one without a wait between them, and what they need."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor

from evidence.benchmarks.gpu.idle import profiled_idle
from evidence.benchmarks.gpu.peers.engine import Engine, Peer
from evidence.benchmarks.gpu.setup import Bench, host_peak_bytes
from evidence.benchmarks.gpu.training import Pauses
from evidence.benchmarks.record import spread
from experiments.calibration.parts import synchronize

WARM, LEAST, MOST = 3, 8, 16
"""Steps before the clock starts, two windows at least, and the fewest and most that are timed."""
LOSS_STEP = WARM + LEAST
"""Number of the step whose loss is told; every engine takes as many."""


class Steps:
    """Steps of one engine, one behind the other.

    Attributes:
        losses: Of all steps, on the device: reading them would wait.
        traffic: Bytes to the host and from it, by step, where the engine tells.
    """

    def __init__(self, engine: Engine, bench: Bench, first: int = 0) -> None:
        """Begin with the first batch, or behind as many steps as a checkpoint has."""
        self._engine, self._bench, self._first = engine, bench, first
        self.losses: list[Tensor] = []
        self.traffic: list[tuple[int, int]] = []
        self._ends: list[Any] = []

    def take(self, count: int) -> None:
        """Take steps."""
        for _ in range(count):
            loss = self._bench.loss(self._engine.model, self._first + len(self.losses))
            self._engine.backward(loss)
            self._engine.step()
            self._mark()
            self.losses.append(loss.detach())
            if (moved := self._engine.traffic()) is not None:
                self.traffic.append(moved)

    def timed(self, count: int) -> list[float]:
        """Take steps; return seconds of each, from the end of the one before to its own end."""
        del self._ends[:], self.traffic[:]
        with Pauses():  # which begins with a collection: it is no step's time
            self._mark()
            self.take(count)
        synchronize(self._bench.device)
        if self._bench.device.type == "cpu":
            return [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]
        pairs = zip(self._ends, self._ends[1:], strict=False)
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def _mark(self) -> None:
        """Note the end of a step: where the device's own work gets to it, which needs no wait."""
        if self._bench.device.type == "cpu":
            self._ends.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ends.append(event)


def whole_windows(count: float, window: int) -> int:
    """Return a number of steps, from the fewest to the most, that fills whole windows.

    >>> whole_windows(9.5, 4), whole_windows(1, 3), whole_windows(99, 1)
    (8, 9, 16)
    """
    within = min(MOST, max(LEAST, int(count)))
    return max(within // window, math.ceil(LEAST / window)) * window


def by_position(seconds: Sequence[float], window: int) -> dict[str, float] | None:
    """Return the median step at a window's slowest position, and that of all other steps.

    >>> by_position([1.0, 1.0, 5.0, 1.5, 1.0, 7.0], 3)
    {'slowest': 6.0, 'others': 1.0}

    Args:
        seconds: Of steps that fill whole windows.
        window: Steps of a window; one has no positions.
    """
    if window == 1:
        return None
    places = [seconds[place::window] for place in range(window)]
    slowest = max(places, key=median)
    others = [each for own in places if own is not slowest for each in own]
    return {"slowest": median(slowest), "others": median(others)}


def host_bytes() -> int | None:
    """Return the peak of this process's memory and what its children have of their own, bytes."""
    own = host_peak_bytes()
    if own is None:
        return None
    return own + sum(_anonymous_bytes(each.pid) for each in psutil.Process().children(True))


def _anonymous_bytes(process: int) -> int:
    """Return the memory that a process shares with none."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _paced(steps: Steps, engine: Engine, bench: Bench) -> float:
    """Take the warm-up; return seconds of a step in its last window."""
    steps.take(max(WARM, engine.window))
    synchronize(bench.device)
    started = time.perf_counter()
    steps.take(engine.window)
    synchronize(bench.device)
    return (time.perf_counter() - started) / engine.window


def measure(name: str, peer: Peer, bench: Bench, seconds: float) -> dict[str, Any]:
    """Return one engine's row for a cell, JSON-ready; times in seconds, memory in bytes.

    Args:
        name: Of the engine.
        peer: The engine.
        bench: The cell.
        seconds: For timed steps; fewer of them are taken where they don't fit.
    """
    bench.free()
    model = bench.model()
    bench.forget_peak()
    engine = peer.make(model, bench)
    try:
        steps = Steps(engine, bench)
        pace = _paced(steps, engine, bench)
        took = steps.timed(whole_windows(seconds / pace, engine.window))
        row = {
            "engine": name,
            "cell": str(bench.cell),
            "state": peer.state,
            "version": peer.version(),
            "step_seconds": spread(took),
            "window": engine.window,
            "window_seconds": by_position(took, engine.window),
            "tokens_per_second": bench.tokens * len(took) / sum(took),
            "traffic": _mean(steps.traffic),
            "peak_device_bytes": bench.peak_bytes(),
            "peak_host_bytes": host_bytes(),
            "loss": float(steps.losses[LOSS_STEP - 1]),
        }
        idle = profiled_idle(lambda: _profiled(steps, max(2, engine.window), bench))
        return {**row, "idle_share": None if idle is None else idle["idle_share"]}
    finally:
        engine.close()


def _profiled(steps: Steps, count: int, bench: Bench) -> None:
    steps.take(count)
    synchronize(bench.device)


def _mean(traffic: Sequence[tuple[int, int]]) -> dict[str, float] | None:
    """Return mean bytes of a step each way; None where nothing was told."""
    if not traffic:
        return None
    return {
        way: sum(each[index] for each in traffic) / len(traffic)
        for index, way in enumerate(("d2h_bytes", "h2d_bytes"))
    }
