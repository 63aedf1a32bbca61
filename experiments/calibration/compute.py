"""Compute: forward and backward of small models, by layer shape and beside the host kernel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.calibration.parts import synchronize
from experiments.training.parts.setup import RunSetup, build_setup, workload_of
from experiments.training.run.evaluation import cross_entropy, forward
from experiments.training.settings.training import TrainSettings
from sim.fitting.device import ComputeTimes
from sim.fitting.fit import Fit, Sample, fit_constants
from sim.fitting.refine import Observation
from sim.models.work import Work
from sim.models.workload import Workload
from zenflow.host import kernel
from zenflow.host.jobs import SumJob

_WARM_ROUNDS = 2
_BACKWARD_FACTORS = np.linspace(0.6, 1.6, 41)
_SHARING_ROUNDS = 5
_SHARING_SECONDS = 0.5
_ROWS, _COLUMNS = 2048, 1024
"""Shape of the matrix that the host kernel updates beside compute."""


@dataclass(frozen=True, slots=True)
class ComputeFit:
    """The constants of layer compute, and how well they tell the measurements."""

    fit: Fit
    backward_factor: float


class ComputeShapes:
    """Models of several shapes, whose forward and backward are timed in rounds.

    Shapes take turns in a round, so that a noisy minute disturbs all of them.
    """

    def __init__(self, shapes: Sequence[TrainSettings]) -> None:
        """Build the models, and let each of them compute before anything is timed."""
        self._setups = _build(shapes)
        self._num_rounds = 0
        self.forget()
        for _ in range(_WARM_ROUNDS):
            self.round()
        self.forget()

    def forget(self) -> None:
        """Drop the times so far."""
        self._found: list[list[tuple[float, float]]] = [[] for _ in self._setups]

    def round(self) -> None:
        """Time each shape once, behind a pass of its own, as the steps of a run follow another."""
        self._num_rounds += 1
        for setup, times in zip(self._setups, self._found, strict=True):
            _time_one(setup, self._num_rounds)
            times.append(_time_one(setup, self._num_rounds))

    def times(self) -> list[ComputeTimes]:
        """Return every shape's times."""
        return [
            ComputeTimes(
                label=workload_of(setup).name,
                workload=workload_of(setup),
                forward=median(pair[0] for pair in times),
                backward=median(pair[1] for pair in times),
            )
            for setup, times in zip(self._setups, self._found, strict=True)
        ]


def _build(shapes: Sequence[TrainSettings]) -> list[RunSetup]:
    """Return the set-up of a run of each shape, with one model for all shapes of that model.

    Drawing the weights of a billion parameters takes longer than all that is timed.
    """
    models: dict[str, nn.Module] = {}
    setups = []
    for settings in shapes:
        setup = build_setup(settings, model=models.get(settings.model))
        models[settings.model] = setup.model
        setups.append(setup)
    return setups


def _time_one(setup: RunSetup, index: int) -> tuple[float, float]:
    batch = setup.data.train.batch(index).to(setup.device)
    times = [_now(setup.device)]
    loss = cross_entropy(forward(setup.model, batch), batch)
    times.append(_now(setup.device))
    loss.backward()
    times.append(_now(setup.device))
    setup.model.zero_grad()
    return times[1] - times[0], times[2] - times[1]


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def fit_compute(times: Sequence[ComputeTimes], runs: Sequence[Observation] = ()) -> ComputeFit:
    """Return a CPU's constants that tell all times best, one factor on backward included.

    The factor makes the fit nonlinear, so a grid of factors is tried. Launches in a run may take
    longer than those of a model by itself, where no other thread wants the interpreter.

    Args:
        times: Of models by themselves.
        runs: Runs whose forward was measured.
    """
    found = []
    in_runs = [_sample_of(own) for own in forwards_of(runs)]
    for factor in map(float, _BACKWARD_FACTORS):
        own = [sample for item in times for sample in _samples(item, factor)]
        fit = fit_constants([*own, *in_runs])
        found.append(ComputeFit(fit, factor))
    return min(found, key=lambda tried: sum(e**2 for e in tried.fit.residuals.values()))


def forwards_of(runs: Sequence[Observation]) -> list[ComputeTimes]:
    """Return the forward of one micro-batch of each run that had it measured."""
    return [
        ComputeTimes(
            label=run.label,
            workload=run.workload,
            forward=run.passes["forward"] / run.workload.accumulation,
        )
        for run in runs
        if "forward" in run.passes
    ]


def _samples(times: ComputeTimes, factor: float) -> list[Sample]:
    """Return forward and backward as the counts that `sim.timing.costs.layer_seconds` charges."""
    forward_counts, works = _forward_counts(times.workload), Work(times.workload).all()
    backward_counts = {
        "matmul": 2 * factor * forward_counts["matmul"],
        "attention": 2.5 * factor * forward_counts["attention"],
        "elementwise": factor * sum(work.elementwise_bytes.backward for work in works),
        "backward launch": 2 * forward_counts["launch"],
        "gradient": sum(work.weight_bytes for work in works),
    }
    assert times.backward is not None  # a model by itself has both
    return [
        Sample(forward_counts, times.forward, f"{times.label} forward"),
        Sample(backward_counts, times.backward, f"{times.label} backward"),
    ]


def _sample_of(run: ComputeTimes) -> Sample:
    """Return a run's forward as such counts."""
    counts = _forward_counts(run.workload)
    counts |= {"launch in a run": counts["launch"]}
    return Sample(counts, run.forward, f"{run.label} forward")


def _forward_counts(workload: Workload) -> dict[str, float]:
    works = Work(workload).all()
    return {
        "matmul": sum(work.matmul_flop for work in works),
        "attention": sum(work.attention_flop for work in works),
        "elementwise": sum(work.elementwise_bytes.forward for work in works),
        "launch": sum(work.num_kernels for work in works),
    }


def measure_sharing(settings: TrainSettings) -> float:
    """Return the joint speed of two busy threads, over one's alone: 1 (one core) to 2 (two)."""
    setup = build_setup(settings)
    batch = setup.data.train.batch(0)

    def compute() -> None:
        cross_entropy(forward(setup.model, batch), batch).backward()
        setup.model.zero_grad()

    total, grad = torch.zeros(_ROWS, _COLUMNS), torch.zeros(_ROWS, _COLUMNS)
    job = SumJob(total, grad, scale=1.0, is_first=False)

    def update() -> None:
        for first in range(0, _ROWS, 256):
            kernel.run(job.rows(first, first + 256))

    found = []
    for _ in range(_SHARING_ROUNDS):
        alone = [_rate(run, threading.Event(), _SHARING_SECONDS) for run in (compute, update)]
        together = _together(compute, update)
        found.append(sum(t / a for t, a in zip(together, alone, strict=True)))
    return min(2.0, max(1.0, median(found)))


def _together(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
    stop = threading.Event()
    rates: list[float] = []
    thread = threading.Thread(
        target=lambda: rates.append(_rate(second, stop, 10 * _SHARING_SECONDS))
    )
    thread.start()
    mine = _rate(first, stop, _SHARING_SECONDS)
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
