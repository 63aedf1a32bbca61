"""Samplers by Optuna's names, and how constraints reach them."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial

from zenflow.config import unknown_name
from zenflow.errors import ConfigError

SAMPLERS: Mapping[str, str] = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "nsgaii": "NSGAIISampler",
    "qmc": "QMCSampler",
    "grid": "RandomSampler",
}
"""Class of Optuna for each sampler; ``grid`` leaves it nothing to choose."""

ORDERED: tuple[str, ...] = ("gp", "cmaes", "qmc")
"""Samplers of numbers, which choose places in the order of a knob's values."""

_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "gp": ("scipy", "torch"),
    "cmaes": ("cmaes",),
    "qmc": ("scipy",),
}
_MISSES = "misses"
_HAS_SET_CONSTRAINT = hasattr(Trial, "set_constraint")  # since Optuna 4.9; functions go with 7


def check_sampler(name: str, num_objectives: int) -> None:
    """Refuse a sampler that can't be made.

    Raises:
        ConfigError: Its name is unknown, a package that it needs is not installed, or it takes one
            objective only.
    """
    if name not in SAMPLERS:
        raise ConfigError(f"sampler {unknown_name(name, SAMPLERS)} (known: {', '.join(SAMPLERS)})")
    lacking = [own for own in _PACKAGES.get(name, ()) if importlib.util.find_spec(own) is None]
    if lacking:
        raise ConfigError(
            f"sampler {name!r} needs {' and '.join(lacking)}, which is not installed: "
            f"pip install {' '.join(lacking)}, or take tpe"
        )
    if name == "cmaes" and num_objectives > 1:
        raise ConfigError(
            f"sampler 'cmaes' takes one objective, got {num_objectives}: take nsgaii or tpe for a "
            "Pareto front"
        )


def make_sampler(name: str, seed: int, *, is_constrained: bool) -> BaseSampler:
    """Return a sampler; the same seed gives the same suggestions.

    Args:
        name: One of ``SAMPLERS``.
        seed: Of its choices.
        is_constrained: Whether trials say by how much they miss constraints.
    """
    made: Callable[..., BaseSampler] = getattr(optuna.samplers, SAMPLERS[name])
    arguments: dict[str, Any] = {"seed": seed}
    takes = inspect.signature(made).parameters
    if is_constrained and not _HAS_SET_CONSTRAINT and "constraints_func" in takes:
        arguments["constraints_func"] = _misses_of
    if name == "qmc":
        arguments["scramble"] = True  # without it every seed gives the same sequence
    return made(**arguments)


def tell_misses(trial: Trial, misses: Mapping[str, float]) -> None:
    """Tell a trial, once, by how much it misses each constraint; 0 or less is met."""
    trial.set_user_attr(_MISSES, dict(misses))
    if _HAS_SET_CONSTRAINT:
        for name, missed in misses.items():
            trial.set_constraint(name, missed)


def is_allowed(trial: FrozenTrial) -> bool:
    """Return whether a trial missed no constraint."""
    return all(missed <= 0 for missed in trial.user_attrs.get(_MISSES, {}).values())


def _misses_of(trial: FrozenTrial) -> Sequence[float]:
    return list(trial.user_attrs.get(_MISSES, {}).values())
