"""Compute by layer shape: forward and backward of small models, without an optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import nn

from experiments.training.evaluation import cross_entropy, forward
from experiments.training.settings import TrainSettings
from experiments.training.setup import RunSetup, build_setup, workload_of
from sim.fitting.fit import Fit, Sample, fit_constants
from sim.models.workload import Workload

WARM_ROUNDS = 2
_BACKWARD_FACTORS = np.linspace(0.6, 1.6, 41)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """One shape's measurement: medians, seconds."""

    label: str
    workload: Workload
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class ComputeFit:
    """The constants of layer compute, and how well they tell the measurements."""

    fit: Fit
    backward_factor: float


def measure_compute(
    shapes: Sequence[TrainSettings], *, rounds: int, on_round: Callable[[], None]
) -> list[ComputeTimes]:
    """Return every shape's times; shapes take turns, so that a noisy minute disturbs all."""
    setups = _build(shapes)
    found: list[list[tuple[float, float]]] = [[] for _ in setups]
    for index in range(WARM_ROUNDS + rounds):
        for setup, times in zip(setups, found, strict=True):
            pair = _time_one(setup, index)
            if index >= WARM_ROUNDS:
                times.append(pair)
        on_round()
    return [
        ComputeTimes(
            label=workload_of(setup).name,
            workload=workload_of(setup),
            forward=median(pair[0] for pair in times),
            backward=median(pair[1] for pair in times),
        )
        for setup, times in zip(setups, found, strict=True)
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
    for parameter in setup.model.parameters():
        parameter.grad = None
    return times[1] - times[0], times[2] - times[1]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fit_compute(times: Sequence[ComputeTimes]) -> ComputeFit:
    """Return the constants that tell all times best, one factor on backward included.

    The factor makes the fit nonlinear, so a grid of factors is tried.
    """
    best: ComputeFit | None = None
    for factor in _BACKWARD_FACTORS:
        samples = [sample for item in times for sample in _samples(item, float(factor))]
        fit = fit_constants(samples)
        if best is None or _squares(fit) < _squares(best.fit):
            best = ComputeFit(fit, float(factor))
    assert best is not None
    return best


def _squares(fit: Fit) -> float:
    return sum(error**2 for error in fit.residuals.values())


def _samples(times: ComputeTimes, factor: float) -> list[Sample]:
    """Return forward and backward as the counts that `sim.timing.costs.layer_seconds` charges."""
    works = times.workload.works()
    flop = sum(work.matmul_flop for work in works)
    attention = sum(work.attention_flop for work in works)
    elementwise = sum(work.elementwise_bytes for work in works)
    kernels = sum(work.num_kernels for work in works)
    forward_counts = {
        "matmul": flop,
        "attention": attention,
        "elementwise": elementwise,
        "launch": kernels,
    }
    backward_counts = {
        "matmul": 2 * factor * flop,
        "attention": 2.5 * factor * attention,
        "elementwise": 2 * factor * elementwise,
        "backward launch": 2 * kernels,
        "gradient": sum(work.weight_bytes for work in works),
    }
    return [
        Sample(forward_counts, times.forward, f"{times.label} forward"),
        Sample(backward_counts, times.backward, f"{times.label} backward"),
    ]
