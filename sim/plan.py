"""Plan: which strategies fit a machine, how fast each would be, which to use, what would help.

Only the engine's own presets are recommended, since they are what ``zenflow train`` runs; other
systems stand beside them for comparison. Nothing is run: times are `sim.simulate`'s, memory is
`sim.memory`'s. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.hardware import HardwareProfile
from sim.improvements import Improvement, improvements
from sim.options import BASELINES, Option, Planner
from sim.simulate import STRATEGIES
from sim.workload import Workload
from zenflow.config import PRESETS

_DISTANCE: Mapping[str, int] = {"on_device": 0, "zero_offload": 0, "zenflow": 1, "delayed": 2}
"""How far a preset's rule is from AdamW, from records of losses under `experiments/results`."""
_FARTHEST = 4
_WORTH = 1.1
"""How many times as fast a rule must be to be preferred to one that is nearer by 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a machine can do for a workload."""

    workload: Workload
    hardware: HardwareProfile
    options: tuple[Option, ...]
    """The engine's presets first, each with its knobs behind it; then other systems."""
    recommended: Option | None
    """None if no preset of the engine fits."""
    reason: str
    """Why it is recommended, or what is missing, in a few sentences."""
    improvements: tuple[Improvement, ...]
    """Changes of the machine, the most helpful first; those that save nothing too."""

    def option(self, name: str) -> Option:
        """Return a strategy's first option."""
        return next(option for option in self.options if option.strategy.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "model": self.workload.name,
            "num_params": self.workload.num_params,
            "machine": self.hardware.name,
            "num_devices": self.hardware.num_devices,
            "batch_size": self.workload.batch_size,
            "sequence": self.workload.sequence,
            "accumulation": self.workload.accumulation,
            "dtype": self.workload.dtype,
            "checkpointing": self.workload.checkpointing,
            "recommended": None if self.recommended is None else self.recommended.to_dict(),
            "reason": self.reason,
            "options": [option.to_dict() for option in self.options],
            "improvements": [item.to_dict() for item in self.improvements],
        }


def plan(
    workload: Workload,
    hardware: HardwareProfile,
    *,
    strategies: Sequence[str] = STRATEGIES,
    may_shrink: bool = True,
) -> Plan:
    """Return what a machine can do for a workload.

    Args:
        workload: Model and batch of each device.
        hardware: The machine.
        strategies: Which to look at, by name.
        may_shrink: Whether checkpointing and smaller micro-batches are tried where a strategy does
            not fit; both compute the same step.

    Raises:
        ConfigError: A strategy is unknown, or the device has no peak for the workload's dtype.
    """
    planner = Planner(hardware, may_shrink=may_shrink)
    ordered = sorted(strategies, key=lambda name: name not in PRESETS)
    options = [option for name in ordered for option in planner.options(workload, name)]
    chosen = recommend(options)
    return Plan(
        workload=workload,
        hardware=hardware,
        options=tuple(options),
        recommended=chosen,
        reason=_nearest_miss(options) if chosen is None else _reason(chosen, options),
        improvements=tuple(improvements(workload, options, chosen, planner)),
    )


def recommend(options: Iterable[Option]) -> Option | None:
    """Return the option to use: of the engine's that fit the fastest, unless it is farther off.

    A rule that is farther from AdamW by 1 has to be `_WORTH` times as fast. None if none fits.
    """
    fitting = [option for option in options if option.is_ours and option.fits]
    fitting = [o for o in fitting if o.strategy.name not in BASELINES] or fitting
    if not fitting:
        return None
    return min(fitting, key=lambda option: option.step_seconds * _WORTH ** distance(option))


def distance(option: Option) -> int:
    """Return how far a preset's rule is from AdamW: 0 is AdamW, and longer windows are farther."""
    config = option.strategy.config
    assert config is not None
    far = _DISTANCE.get(option.strategy.name, _FARTHEST)
    if option.strategy.name != "zenflow":
        return far
    far += max(0, (config.update_interval - 1).bit_length() - 2)  # 4 steps are the default
    return far + (config.deferred_moments == "window") + (config.effective_lag() > 1)


def _reason(chosen: Option, options: Sequence[Option]) -> str:
    """Return why an option is recommended, and what its rule means for accuracy."""
    assert chosen.prediction is not None
    stall = chosen.prediction.stall_fraction
    text = f"{chosen.label} fits and stalls for {stall:.1%} of a step of {seconds(chosen)}"
    if distance(chosen) == 0:
        return (
            f"{text}. Its rule is AdamW exactly, so that accuracy is AdamW's too, and nothing "
            "else that fits is so much faster that it would be worth another rule."
        )
    exact = [o for o in options if o.is_ours and o.fits and distance(o) == 0]
    if exact:
        best = min(exact, key=lambda option: option.step_seconds)
        factor = best.step_seconds / chosen.step_seconds
        text += f", {factor:.1f} times as fast as {best.label}, whose rule is AdamW exactly"
    else:
        text += "; nothing whose rule is AdamW exactly fits"
    return (
        f"{text}. Its own rule is another one: {chosen.rule}. That decides accuracy, of which "
        "nothing here says anything: compare losses with `zenflow train --compare` first."
    )


def seconds(option: Option) -> str:
    """Return an option's step time in words."""
    return f"{option.step_seconds:.3g} s"


def _nearest_miss(options: Iterable[Option]) -> str:
    """Return which preset comes nearest to fitting, and what it lacks."""
    ours = [option for option in options if option.is_ours]
    if not ours:
        return "None of the engine's presets was asked for."
    nearest = min(
        ours, key=lambda option: max(s.needed / max(1.0, s.available) for s in option.shortfalls)
    )
    listed = "; ".join(str(shortfall) for shortfall in nearest.shortfalls)
    return f"No preset of the engine fits this machine. {nearest.label} comes nearest. {listed}."
