"""Announcement of a comparison, with a guess of its time, before torch loads."""

from __future__ import annotations

from experiments.output.outlook import in_words
from experiments.training.parts.models.named import find_model, has_weights
from experiments.training.settings.comparison import COMPARED
from experiments.training.settings.sizes import MODEL_SIZES
from experiments.training.settings.training import TrainSettings
from zenflow.host.limits import usable_cores

START = "start"
"""Directory of the run whose weights the strategies start from."""

SECONDS_BESIDE_STEPS = 5.0
"""Seconds of a run beside its steps, to load, evaluate and save.

A guess, until it is measured.
"""

_CORE_FLOPS = 16e9
"""FLOP per second of a CPU core in a small decoder's step.

Two cores took 41 to 61 ms for the default step of 1.9 GFLOP.
"""


def needs_start(settings: TrainSettings) -> bool:
    """Whether the strategies' common weights have to be trained first."""
    return bool(settings.start_steps) and not has_weights(find_model(settings.model))


def compared(settings: TrainSettings) -> dict[str, TrainSettings]:
    """Return the compared strategies by name: ``COMPARED``, and the tuned run if asked for."""
    runs = {name: settings.with_strategy(name) for name in COMPARED}
    return runs if settings.controller is None else {**runs, settings.label: settings}


def step_cost(strategy: str) -> float:
    """Return how long a step takes beside one on the device.

    It is a guess for the emulated link that a comparison chooses: zero_offload waits for both
    copies, the others for hardly anything.
    """
    return {"on_device": 1.0, "zero_offload": 2.5}.get(strategy, 1.15)


def intention(settings: TrainSettings) -> str:
    """Return in a sentence what a comparison does, and how long that takes on a CPU."""
    names = list(compared(settings))
    length = f"{settings.epochs} epochs" if settings.steps is None else f"{settings.steps} steps"
    first = ""
    if needs_start(settings):
        first = f"{settings.start_steps} steps on the device, for weights to start from, then "
    seconds = _cpu_seconds(settings)
    told = ""
    if seconds is not None:
        told = (
            f" On {usable_cores()} CPU cores that takes {in_words(seconds)}, by the model's size; "
            "what this machine needs is measured first."
        )
    return f"To do: {first}{length} each under {', '.join(names[:-1])} and {names[-1]}.{told}"


def _cpu_seconds(settings: TrainSettings) -> float | None:
    """Return a guess from 6 FLOP per parameter and token; None where the size is not known."""
    if settings.model not in MODEL_SIZES or settings.steps is None:
        return None
    work = settings.workload()
    step = 6 * work.num_params * work.tokens_per_step / (_CORE_FLOPS * usable_cores())
    steps, num_runs = (
        settings.steps * sum(map(step_cost, compared(settings))),
        len(compared(settings)),
    )
    if needs_start(settings):
        steps, num_runs = steps + (settings.start_steps or 0), num_runs + 1
    return step * steps + SECONDS_BESIDE_STEPS * num_runs
