"""Planned points: what `zenflow plan` would recommend at each point of a grid.

Settings of the update rule, strategy, loss and checkpointing that are given or varied are held;
batch and accumulation say how many tokens a step takes, as for `zenflow plan`. Where the loss is
free its logits may come in chunks, and where the strategy is, layers may visit the device.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from experiments.request.request import SYSTEM_OPTIONS
from experiments.sweeps.grid import Case, Sweep
from sim.planning.choice import Choice, Chooser
from sim.planning.chunks import with_chunks
from sim.planning.options import Option, Planner, default_reserve
from sim.planning.streams import can_stream, with_streams
from zenflow.config import PRESETS

_TOKENS = ("batch_size", "sequence", "grad_accum")
"""Targets of axes that say what a step takes, and nothing of machine and model."""
CHECKPOINTING, STRATEGY, LOSS = "checkpointing", "strategy", "loss"
HELD = frozenset({CHECKPOINTING, STRATEGY, LOSS})
"""Words of a request that are searched unless they are given or varied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPoint:
    """Setting to use at a point."""

    option: Option | None
    """Recommended option; None if none is likely to fit."""
    riskier: tuple[Option, ...]
    """Options that may fit: the likeliest where none is recommended, and a faster one."""


class PlannedPoints:
    """Plans of points; those that differ in the tokens of a step share their searches."""

    def __init__(self, sweep: Sweep, holds: Collection[str] = ()) -> None:
        """Plan nothing yet.

        Args:
            sweep: The grid.
            holds: Words of `HELD` that were given beside axes and knobs.
        """
        self._sweep = sweep
        varied = {axis.kind.target for axis in sweep.axes}
        knobs = [axis for axis in sweep.axes if axis.kind.place == "knob"]
        self._holds_recomputation = CHECKPOINTING in {*holds, *varied}
        self._holds_loss = LOSS in {*holds, *varied}
        # A setting of the update rule or an option is one of the strategy that it is given to.
        given = {*holds, *varied, *sweep.request.options}
        self._holds_strategy = bool(knobs or sweep.knobs or given & {STRATEGY, *SYSTEM_OPTIONS})
        self._knobs = {axis.name: axis.kind.target for axis in knobs}
        self._others = [axis.name for axis in sweep.axes if axis.kind.target not in _TOKENS]
        self._like: dict[tuple[Any, ...], Chooser] = {}
        self._cases: dict[int, Case] = {}
        self._choosers: dict[int, Chooser] = {}

    def _case(self, point: int) -> Case:
        if point not in self._cases:
            self._cases[point] = self._sweep.case(point)
        return self._cases[point]

    def _chooser(self, point: int) -> Chooser:
        """Return who chooses at a point whose strategy is the engine's.

        Raises:
            ConfigError: The point's values don't go together.
        """
        if point in self._choosers:
            return self._choosers[point]
        case, values = self._case(point), self._sweep.values(point)
        key = tuple(values[name] for name in self._others)
        chooser = Chooser(
            case.workload,
            case.hardware,
            names=(case.strategy.name,) if self._holds_strategy else tuple(PRESETS),
            checkpointing=case.workload.checkpointing if self._holds_recomputation else None,
            parallel=case.strategy.parallel,
            reshards=case.strategy.reshards,
            releases=case.strategy.releases,
            knobs=self._held(case, point),
            like=self._like.get(key),
        )
        self._like.setdefault(key, chooser)
        self._choosers[point] = chooser
        return chooser

    def _held(self, case: Case, point: int) -> dict[str, Any]:
        """Return the settings of the update rule that a point has."""
        if case.strategy.name not in ("zenflow", "zenflow_paper"):
            return {}
        values = self._sweep.values(point)
        varied = {target: values[name] for name, target in self._knobs.items()}
        config = case.strategy.config
        return {k: v for k, v in {**self._sweep.knobs, **varied}.items() if hasattr(config, k)}

    def _is_system(self, point: int) -> bool:
        return self._case(point).strategy.config is None

    def most_tokens_per_second(self, point: int) -> float:
        """Return tokens per second that no option of a point exceeds, selections aside.

        Raises:
            ConfigError: The point's values don't go together.
        """
        case = self._case(point)
        most = 0.0 if self._is_system(point) else self._chooser(point).most_tokens_per_second
        if not self._is_system(point) and not self._may_stream(point):
            return most
        work = case.workload
        if not self._holds_recomputation:
            work = replace(work, checkpointing=False)
        tokens = work.tokens_per_step * case.hardware.total_devices
        return max(most, tokens / Planner(case.hardware).costs(work).compute_seconds)

    def plan(self, point: int) -> PlannedPoint:
        """Return the setting to use at a point.

        Raises:
            ConfigError: The point's values don't go together.
        """
        if self._is_system(point):
            case = self._case(point)
            planner = Planner(case.hardware, reserve=default_reserve(case.hardware))
            option = planner.fitted(
                case.workload, case.strategy, recomputes=not self._holds_recomputation
            )
            return PlannedPoint(
                option=option if option.fits else None, riskier=(option,) * option.may_fit
            )
        chooser = self._chooser(point)
        choice = chooser.choose()
        better = None if self._holds_loss else with_chunks(chooser, choice)
        chooser, choice = better or (chooser, choice)
        likely = [choice.recommended, self._streamed(point, chooser, choice)]
        others = (choice.likeliest, chooser.riskier(choice))
        return PlannedPoint(
            option=max(filter(None, likely), key=lambda o: o.tokens_per_second, default=None),
            riskier=tuple(one for one in others if one is not None),
        )

    def _may_stream(self, point: int) -> bool:
        return not self._holds_strategy and can_stream(self._case(point).hardware)

    def _streamed(self, point: int, chooser: Chooser, choice: Choice) -> Option | None:
        """Return an option of layers that visit the device, if it is worth more than a choice."""
        if not self._may_stream(point):
            return None
        work = self._case(point).workload
        return with_streams(
            chooser.planners[1],
            work,
            before=choice.shown,
            checkpointing=work.checkpointing if self._holds_recomputation else None,
            may_chunk=not self._holds_loss,
        )
