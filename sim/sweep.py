"""Sweep: one model and strategy on many machines, by formula where one holds, else by events.

No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sim.closed_form import AXES, Array, ClosedForm, has_closed_form
from sim.costs import StepCosts
from sim.hardware import HardwareProfile
from sim.machine import Rates
from sim.simulate import Strategy, simulate
from zenflow.config import unknown_name
from zenflow.errors import ConfigError

_FIGURES = {"d2h": "link.d2h", "h2d": "link.h2d", "dram": "host.dram"}
"""Figures that an axis stands for as they are."""


@dataclass(frozen=True, slots=True)
class Swept:
    """Step time and stall, seconds, of every machine, and how each was found."""

    step_seconds: Array
    stall_seconds: Array
    is_formula: NDArray[np.bool_]
    """Whether the closed form held; the others were simulated."""

    @property
    def method(self) -> str:
        """How many points each method answered, in words."""
        formula = int(self.is_formula.sum())
        return f"closed form for {formula}, events for {len(self.is_formula) - formula}"


def sweep(
    costs: StepCosts,
    strategy: Strategy,
    *,
    tolerance: float = 0.0,
    on_point: Callable[[], None] | None = None,
    **axes: Array | float,
) -> Swept:
    """Return the steady state of a strategy on every machine.

    Args:
        costs: Of a step; what no axis names is as they have it.
        strategy: What to run, without selections.
        tolerance: Relative error to accept of a formula; see `ClosedForm.solve`.
        on_point: Called after each simulated point.
        axes: Of `sim.closed_form.AXES`, one value for each machine or one for all.

    Raises:
        ConfigError: An axis is unknown, or a value is not positive.
    """
    unknown = [name for name in axes if name not in AXES]
    if unknown:
        raise ConfigError(f"axis {unknown_name(unknown[0], AXES)}")
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(v, float)) for v in axes.values()))
    count = len(columns[0]) if columns else 1
    steps, stalls = np.zeros(count), np.zeros(count)
    holds = np.zeros(count, bool)
    if has_closed_form(costs, strategy):
        found = ClosedForm(costs, strategy).solve(tolerance=tolerance, **axes)
        steps[:], stalls[:], holds[:] = found.step_seconds, found.stall_seconds, found.applies
    for index in np.flatnonzero(~holds):
        point = {name: float(column[index]) for name, column in zip(axes, columns, strict=True)}
        predicted = simulate(_at(costs, point), strategy, keeps_spans=False)
        steps[index] = predicted.step_seconds - predicted.selection_seconds
        stalls[index] = predicted.stall_seconds - predicted.selection_seconds
        if on_point is not None:
            on_point()
    return Swept(steps, stalls, holds)


def _at(costs: StepCosts, point: dict[str, float]) -> StepCosts:
    """Return the costs on the machine of one point.

    Raises:
        ConfigError: A value is not positive.
    """
    scaled = costs.segments
    for name, total in (("forward", costs.forward_seconds), ("backward", costs.backward_seconds)):
        if name in point:
            factor = point[name] / total
            scaled = tuple(
                replace(segment, **{name: getattr(segment, name) * factor}) for segment in scaled
            )
    return replace(costs, segments=scaled, hardware=_machine(costs.hardware, point))


def _machine(hardware: HardwareProfile, point: dict[str, float]) -> HardwareProfile:
    """Return the machine whose rates are the point's."""
    now = Rates.of(hardware)
    factors = {name: point[name] / getattr(now, name) for name in AXES[2:] if name in point}
    figures = hardware.figures()
    values = {
        figure: figures[figure].value * factors[name]
        for name, figure in _FIGURES.items()
        if name in factors
    }
    if "host" in factors:
        values["host.core_bandwidth"] = figures["host.core_bandwidth"].value * factors["host"]
    if {"d2h", "h2d", "duplex"} & factors.keys():
        ways = point.get("d2h", now.d2h) + point.get("h2d", now.h2d)
        both = point.get("duplex", now.duplex)
        values["link.duplex"] = min(1.0, both / ways)
    return hardware.with_values(values)
