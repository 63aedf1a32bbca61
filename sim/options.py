"""Options: each strategy on a machine, as it fits and as it does not stall. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.costs import StepCosts, costs_of
from sim.hardware import HardwareProfile
from sim.memory import MemoryNeed, Shortfall, memory_of
from sim.simulate import Prediction, Strategy, simulate
from sim.workload import Workload
from zenflow.config import ZenFlowConfig

RULES: Mapping[str, str] = {
    "on_device": "AdamW exactly",
    "zero_offload": "AdamW exactly",
    "delayed": "AdamW with every update one step late",
    "zenflow_paper": "the published rule: not AdamW's moments, updates up to 2 S - 1 steps late",
    "zenflow": "AdamW's moments; the host's columns change once in S steps",
    "published_on_device": "AdamW exactly",
    "published_zero_offload": "AdamW exactly",
    "published_delayed": "AdamW with every update one step late",
    "deepspeed_zero_offload": "AdamW exactly",
    "deepspeed_zenflow": "the release's own rule, not AdamW's moments",
    "zero_infinity": "AdamW exactly",
    "deep_optimizer_states": "AdamW exactly",
    "layer_overlapped": "AdamW exactly, without clipping by a global norm",
    "superoffload": "AdamW exactly",
}
"""What becomes of a gradient, which decides accuracy; no prediction here says anything of that."""

BASELINES = ("delayed", "zenflow_paper")
"""Presets to compare with: recommended only where no other fits."""

_MEASURED = 2
"""Steps that are simulated once they repeat, and at least a window."""
_STALLS = 0.02
"""Share of a step from which on knobs are tried."""
_FASTER: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "zenflow": (
        {"lag": 2},
        {"update_interval": 8},
        {"update_interval": 16},
        {"deferred_moments": "window"},
    ),
}
"""Knobs that are tried where a preset stalls: more time for an update, fewer of them, or less
host traffic for a gradient."""
_GAIN = 0.995
"""Share of a step that another setting of a knob has to take less than."""
_BUSY = 0.95
"""Share of a step from which on a lane has no time to spare: a longer lag only puts off its stall,
however long."""
_SMALLER: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "zenflow": (
        {"update_interval": 8},
        {"topk_ratio": 0.03},
        {"topk_ratio": 0.3},
        {"topk_ratio": 0.6},
    ),
}
"""Knobs that are tried where it does not fit: smaller uploads, fewer columns on the device, or
more of them where the host is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One strategy on a machine."""

    strategy: Strategy
    changes: tuple[str, ...] = ()
    """What differs from the preset and from the workload that was asked for."""
    need: MemoryNeed
    shortfalls: tuple[Shortfall, ...]
    """Empty if it fits."""
    prediction: Prediction | None
    """Of a step, for a preset as if it fitted; None for another system that does not fit."""

    @property
    def fits(self) -> bool:
        """Whether there is memory for it."""
        return not self.shortfalls

    @property
    def is_ours(self) -> bool:
        """Whether ``zenflow train`` runs it."""
        return self.strategy.config is not None

    @property
    def rule(self) -> str:
        """Its rule, which decides accuracy."""
        config = self.strategy.config
        if self.strategy.name == "zenflow" and config and config.deferred_moments == "window":
            return "moments of windows' means, not AdamW's; the host's columns change once in S"
        return RULES.get(self.strategy.name, "its own rule")

    @property
    def step_seconds(self) -> float:
        """Predicted; infinite if nothing can be predicted."""
        return self.prediction.step_seconds if self.prediction else float("inf")

    @property
    def tokens_per_second(self) -> float:
        """Over all devices; 0 if nothing can be predicted."""
        return self.need.num_devices * self.need.workload.tokens_per_step / self.step_seconds

    @property
    def label(self) -> str:
        """The strategy's name with what is changed."""
        return ", ".join([self.strategy.name, *self.changes])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "strategy": self.strategy.name,
            "is_ours": self.is_ours,
            "changes": list(self.changes),
            "rule": self.rule,
            "fits": self.fits,
            "tokens_per_second": self.tokens_per_second,
            "prediction": self.prediction.to_dict() if self.prediction else None,
            "memory": self.need.to_dict(),
            "shortfalls": [shortfall.to_dict() for shortfall in self.shortfalls],
        }


class Planner:
    """Looks at strategies on one machine; what it has predicted once it knows.

    Attributes:
        hardware: The machine.
    """

    def __init__(self, hardware: HardwareProfile, *, may_shrink: bool = True) -> None:
        """Start with no predictions.

        Args:
            hardware: The machine.
            may_shrink: Whether checkpointing and smaller micro-batches are tried where a strategy
                does not fit; both compute the same step.
        """
        self.hardware = hardware
        self._may_shrink = may_shrink
        self._costs: dict[Workload, StepCosts] = {}
        self._known: dict[tuple[Workload, str, ZenFlowConfig | None], Prediction] = {}

    def options(self, workload: Workload, name: str) -> list[Option]:
        """Return a strategy with as few changes as fit it, then with knobs that do more.

        Raises:
            ConfigError: There is no such strategy, or no peak for the workload's dtype.
        """
        first = self.fitted(workload, Strategy.of(name))
        tried: Sequence[Mapping[str, Any]] = ()
        if first.shortfalls:
            tried = _SMALLER.get(name, ())
        elif first.prediction and _stalls(first):
            spare = all(b < _BUSY * first.step_seconds for b in _beside_device(first.prediction))
            tried = [knobs for knobs in _FASTER.get(name, ()) if spare or "lag" not in knobs]
        found = [first]
        enough: set[tuple[str, ...]] = set()
        for knobs in tried:
            strategy = Strategy.of(name, **knobs)
            if tuple(knobs) in enough or self._fitting(workload, strategy) is None:
                continue
            other = self.fitted(workload, strategy)
            if not first.shortfalls and not _stalls(other):
                enough.add(tuple(knobs))  # more of the same knob has nothing left to save
            if first.shortfalls or other.step_seconds < _GAIN * first.step_seconds:
                changes = tuple(f"{key}={value}" for key, value in knobs.items())
                found.append(replace(other, changes=(*changes, *other.changes)))
        return found

    def fitted(self, workload: Workload, strategy: Strategy) -> Option:
        """Return a strategy with no more changes than it takes to fit the device."""
        chosen, changes = self._fitting(workload, strategy, on_device=True) or (workload, ())
        return replace(self.option(chosen, strategy), changes=changes)

    def option(self, workload: Workload, strategy: Strategy) -> Option:
        """Return a strategy for a workload as it is; other systems are predicted if they fit."""
        need = memory_of(workload, strategy, self.hardware)
        shortfalls = tuple(need.fits(self.hardware))
        is_compared = strategy.config is not None or not shortfalls
        return Option(
            strategy=strategy,
            need=need,
            shortfalls=shortfalls,
            prediction=self._predict(workload, strategy) if is_compared else None,
        )

    def _fitting(
        self, workload: Workload, strategy: Strategy, *, on_device: bool = False
    ) -> tuple[Workload, tuple[str, ...]] | None:
        """Return the workload with the fewest changes that fits; None if there is none.

        Args:
            workload: As asked for.
            strategy: What is to run.
            on_device: Whether it is enough to fit where activations are.
        """
        where = "host" if self.hardware.device.is_cpu else "device"
        for smaller, changes in self.variants(workload):
            short = memory_of(smaller, strategy, self.hardware).short_of(self.hardware)
            if not short or (on_device and where not in short):
                return smaller, changes
        return None

    def variants(self, workload: Workload) -> list[tuple[Workload, tuple[str, ...]]]:
        """Return the workload, then the same step in less and less device memory, with how."""
        changes: tuple[str, ...] = ()
        found = [(workload, changes)]
        if not self._may_shrink:
            return found
        if not workload.checkpointing:
            workload, changes = replace(workload, checkpointing=True), ("checkpointing",)
            found.append((workload, changes))
        while workload.batch_size % 2 == 0:
            size, count = workload.batch_size // 2, workload.accumulation * 2
            workload = replace(workload, batch_size=size, accumulation=count)
            found.append((workload, (*changes, f"{count} micro-batches of {size}")))
        return found

    def _predict(self, workload: Workload, strategy: Strategy) -> Prediction:
        if workload not in self._costs:
            self._costs[workload] = costs_of(workload, self.hardware)
        key = (workload, strategy.name, strategy.config)
        if key not in self._known:
            # One window is enough where steps repeat; with a lag in between they take longer to.
            config = strategy.config
            repeats = config is None or config.lag is None or config.effective_lag() <= 1
            self._known[key] = simulate(
                self._costs[workload],
                strategy,
                keeps_spans=False,
                num_steps=_MEASURED if repeats else None,
            )
        return self._known[key]


def _stalls(option: Option) -> bool:
    """Return whether steps stall, selections aside: those take what they take."""
    done = option.prediction
    if done is None:
        return False
    return done.stall_seconds - done.selection_seconds > _STALLS * done.step_seconds


def _beside_device(prediction: Prediction) -> list[float]:
    """Return the busy seconds of a step on lanes that the device does not compute on."""
    return [busy for lane, busy in prediction.busy_seconds.items() if lane != "device"]
