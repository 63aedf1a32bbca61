"""Objectives: numbers of a measured setting to maximise or minimise, for every backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autotune.constraints import Need
from autotune.efficiency import FITTED
from zenflow.config import unknown_name
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMetrics:
    """Metrics of a setting, simulated or measured. See `goodput`."""

    step_seconds: float
    """Mean seconds of a step."""
    stall_seconds: float
    """Seconds of a step in which the device waits."""
    device_bytes: float
    """Memory of one device, bytes."""
    host_bytes: float
    """Bytes of the host for all devices."""
    staleness: int
    """Largest age in steps of a gradient when its update lands."""
    captured: float
    """Share of gradient energy in the important columns."""
    tokens_per_step: int
    """Number of tokens of a step over all devices."""

    @property
    def need(self) -> Need:
        """The metrics that constraints limit."""
        return Need(
            device_bytes=self.device_bytes,
            host_bytes=self.host_bytes,
            staleness=self.staleness,
            captured=self.captured,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, JSON-ready."""
        return asdict(self)


def goodput(measurement: TrialMetrics, knobs: Knobs) -> float:
    """Return tokens per second times efficiency, the worth of a step in steps of AdamW.

    Examples:
        >>> from zenflow.config import ZenFlowConfig
        >>> metrics = TrialMetrics(
        ...     step_seconds=0.5, stall_seconds=0.0, device_bytes=1e9, host_bytes=1e9,
        ...     staleness=65, captured=0.2, tokens_per_step=8192)
        >>> [round(goodput(metrics, Knobs.of(ZenFlowConfig(update_interval=s)))) for s in (4, 64)]
        [16363, 15351]
    """
    rate = measurement.tokens_per_step / measurement.step_seconds
    return rate * FITTED.of(knobs, 1.0 - measurement.captured)


@dataclass(frozen=True, slots=True)
class Objective:
    """One number to maximise or minimise. See `objectives_of`."""

    name: str
    value: Callable[[TrialMetrics, Knobs], float]
    """Function from a measured setting to the number."""
    unit: str
    is_maximised: bool = False
    """Whether larger values are better."""

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """Optuna's name of the direction."""
        return "maximize" if self.is_maximised else "minimize"


OBJECTIVES: Mapping[str, Objective] = {
    objective.name: objective
    for objective in (
        Objective("goodput", goodput, "tokens/s", is_maximised=True),
        Objective("step_seconds", lambda measured, knobs: measured.step_seconds, "s"),
        Objective("stall_seconds", lambda measured, knobs: measured.stall_seconds, "s"),
        Objective("staleness", lambda measured, knobs: float(measured.staleness), "steps"),
        Objective("device_bytes", lambda measured, knobs: measured.device_bytes, "B"),
        Objective("host_bytes", lambda measured, knobs: measured.host_bytes, "B"),
    )
}
"""Objectives by name. Step time alone says nothing of what a stale update costs; goodput does."""


def objectives_of(names: Sequence[str]) -> tuple[Objective, ...]:
    """Return the objectives of these names: one is optimised, several give a Pareto front.

    Raises:
        ConfigError: A name is unknown or stands there twice, or there is none.

    Examples:
        >>> [objective.unit for objective in objectives_of(["goodput", "staleness"])]
        ['tokens/s', 'steps']
    """
    if not names:
        raise ConfigError(f"a study needs an objective, got none: name one of {_known()}")
    for name in names:
        if name not in OBJECTIVES:
            raise ConfigError(f"objective {unknown_name(name, OBJECTIVES)} (known: {_known()})")
    if len(set(names)) != len(names):
        raise ConfigError(f"objectives must differ, got {', '.join(names)}: name each once")
    return tuple(OBJECTIVES[name] for name in names)


def dominates(
    one: Sequence[float], other: Sequence[float], objectives: Sequence[Objective]
) -> bool:
    """Return whether values are nowhere worse than others, and somewhere better.

    Examples:
        >>> pair = objectives_of(["goodput", "staleness"])
        >>> dominates((900.0, 3), (800.0, 5), pair), dominates((900.0, 5), (800.0, 3), pair)
        (True, False)
    """
    signs = [-1.0 if objective.is_maximised else 1.0 for objective in objectives]
    gaps = [sign * (b - a) for sign, a, b in zip(signs, one, other, strict=True)]
    return min(gaps) >= 0 and max(gaps) > 0


def _known() -> str:
    return ", ".join(OBJECTIVES)
