"""The twin: the simulator with a few constants of its own, which measured spans correct.

A profile may be wrong by a third, and a run may change while it goes on. The measured time of a
part of the engine's work, over the simulated one, corrects the constants that this part depends
on. Errors that no constant explains are left to `autotune.model.residual`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sim.hardware.profile import HardwareProfile
from sim.models.workload import Workload
from sim.simulate import Prediction, Strategy
from sim.steady import steady
from sim.timing.costs import StepCosts, costs_of, without_launches
from sim.timing.segments import Segment
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

PARTS = ("device", "step", "launch", "d2h", "h2d", "host")
"""Lanes, with the device's optimizer step apart: it grows with ``topk_ratio``.

Each has one constant: a factor on the seconds that its work takes. Those of ``launch`` are the
host's seconds for a GPU's kernels and for the engine's Python between them."""

_SLOWED: Mapping[str, tuple[str, ...]] = {
    "step": ("overheads.device_update", "overheads.column_update"),
    "d2h": ("link.d2h", "overheads.pack_bandwidth"),
    "h2d": ("link.h2d", "overheads.unpack_bandwidth"),
    "host": ("host.core_bandwidth", "host.core_update", "host.dram"),
}
"""Rates that a part's factor divides."""
_PYTHON = ("overheads.bucket", "overheads.step")
"""Seconds of the engine's Python on the training thread, which a part's factor multiplies."""

_SETTLING = 2
"""Least number of windows before a simulated step is looked at.

Fewer than for a prediction that is shown, since a tuner pays for each."""

_LONGEST_SETTLING = 3
"""Number of windows after which a step is taken as it is, though queues may still grow."""

Constants = Mapping[str, float]
"""Factor on each part's seconds; 1 takes the profile's."""

NEUTRAL: Constants = dict.fromkeys(PARTS, 1.0)


@dataclass(frozen=True, slots=True)
class Forecast:
    """A steady-state step without selections, seconds.

    See `Twin`.
    """

    step_seconds: float
    """Seconds of a step in the long run."""
    stall_seconds: float
    """Seconds of a step in which the device waits."""
    busy_seconds: Mapping[str, float]
    """Seconds of work of each of `PARTS`."""


class Twin:
    """A workload on a machine, for any knobs and constants; simulations are remembered.

    Examples:
        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> from zenflow.config import ZenFlowConfig
        >>> workload = Workload.of_config(*find_model("qwen2.5-1.5b"))
        >>> twin = Twin(workload, find_machine("hgx-h100", 1), ZenFlowConfig())
        >>> knobs = Knobs.of(twin.config)
        >>> usual, slow = twin.forecast(knobs), twin.forecast(knobs, {**NEUTRAL, "d2h": 4.0})
        >>> slow.stall_seconds > usual.stall_seconds  # a link that takes four times as long
        True
    """

    def __init__(
        self,
        workload: Workload,
        profile: HardwareProfile,
        config: ZenFlowConfig,
        *,
        releases: bool = True,
    ) -> None:
        """Prepare the costs.

        Args:
            workload: Model and batch.
            profile: The machine, as far as it is known.
            config: What no knob changes.
            releases: Whether gradients leave during backward.
        """
        self.workload = workload
        self.profile = profile
        self.config = replace(config, full_warm_up_rounds=0)
        self.releases = releases
        self._costs = costs_of(workload, profile)
        self._launches = self._costs.are_launched
        self._unbound = without_launches(self._costs) if self._launches else self._costs
        self._known: dict[tuple[Knobs, tuple[float, ...]], Forecast] = {}

    @property
    def num_simulated(self) -> int:
        """Number of simulations so far."""
        return len(self._known)

    def forecast(self, knobs: Knobs, constants: Constants = NEUTRAL) -> Forecast:
        """Return a steady-state step, selections aside.

        Raises:
            ConfigError: A knob breaks its rule.
        """
        knobs = replace(knobs, select_interval=0)  # selections are counted apart
        parts = PARTS if self._launches else [part for part in PARTS if part != "launch"]
        key = (knobs, tuple(constants[part] for part in parts))
        if key not in self._known:
            self._known[key] = self._simulated(knobs, constants)
        return self._known[key]

    def selection_seconds(self, knobs: Knobs, constants: Constants = NEUTRAL) -> float:
        """Return the seconds of one selection."""
        every = 100
        done = self._simulate(replace(knobs, select_interval=every), constants)
        return every * done.selection_seconds

    def _simulated(self, knobs: Knobs, constants: Constants) -> Forecast:
        done = self._simulate(knobs, constants)
        forward_backward = done.busy_seconds["device"] - done.update_seconds
        busy = {**done.busy_seconds, "device": forward_backward, "step": done.update_seconds}
        return Forecast(done.step_seconds, done.stall_seconds, busy)

    def _simulate(self, knobs: Knobs, constants: Constants) -> Prediction:
        config = knobs.applied_to(self.config)
        return steady(
            self._corrected(constants),
            Strategy(name="zenflow", config=config, releases=self.releases),
            num_steps=knobs.update_interval,
            settling_windows=_SETTLING,
            longest_settling=_LONGEST_SETTLING,
        )

    def _corrected(self, constants: Constants) -> StepCosts:
        quantities = self.profile.quantities()
        values = {
            name: quantities[name].value / constants[part]
            for part, names in _SLOWED.items()
            for name in names
            if name in quantities
        }
        names, part = (_PYTHON, "launch") if self._launches else (("overheads.step",), "step")
        values |= {name: quantities[name].value * constants[part] for name in names}
        return replace(
            self._costs,
            segments=tuple(self._segments(constants)),
            hardware=self.profile.with_values(values),
        )

    def _segments(self, constants: Constants) -> Iterator[Segment]:
        """Yield the model's segments; none is over before its kernels have been launched."""
        device, launch = constants["device"], constants["launch"] if self._launches else 0.0
        for usual, work in zip(self._costs.segments, self._unbound.segments, strict=True):
            forward, backward = (launch * seconds for seconds in usual.launching)
            yield replace(
                usual,
                forward=max(device * work.forward, forward),
                backward=max(device * work.backward, backward),
                launching=(forward, backward),
            )
