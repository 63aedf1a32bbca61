"""Contention: compute and the host kernel at the same time, on cores that may be one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from experiments.training.evaluation import cross_entropy, forward
from experiments.training.settings import TrainSettings
from experiments.training.setup import build_setup
from zenflow.host import kernel

_ROUNDS = 5
_SECONDS = 0.5
_ROWS, _COLUMNS = 2048, 1024


def measure_sharing(settings: TrainSettings) -> float:
    """Return how much two busy threads do of what they do alone, together: from 1 to 2."""
    setup = build_setup(settings)
    batch = setup.data.train.batch(0)

    def compute() -> None:
        cross_entropy(forward(setup.model, batch), batch).backward()
        for parameter in setup.model.parameters():
            parameter.grad = None

    state = [torch.zeros(_ROWS, _COLUMNS) for _ in range(3)]

    def update() -> None:
        for first in range(0, _ROWS, 256):
            part = slice(first, first + 256)
            kernel.moments(
                state[0][part], state[1][part], state[2][part], 1.0, beta1=0.9, beta2=0.999
            )

    found = []
    for _ in range(_ROUNDS):
        alone = [_rate(run, threading.Event(), _SECONDS) for run in (compute, update)]
        together = _together(compute, update)
        found.append(sum(t / a for t, a in zip(together, alone, strict=True)))
    return min(2.0, max(1.0, median(found)))


def _together(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
    stop = threading.Event()
    rates: list[float] = []
    thread = threading.Thread(target=lambda: rates.append(_rate(second, stop, 10 * _SECONDS)))
    thread.start()
    mine = _rate(first, stop, _SECONDS)
    stop.set()
    thread.join()
    return mine, rates[0]


def _rate(run: Callable[[], Any], stop: threading.Event, seconds: float) -> float:
    """Return calls per second until told to stop, or for so long."""
    started = time.perf_counter()
    count = 0
    while not stop.is_set() and time.perf_counter() - started < seconds:
        run()
        count += 1
    return count / (time.perf_counter() - started)
