"""Backends: measurements of settings for a study. This one simulates; another runs for real.

Runs need a trainer, which this package doesn't have: `experiments.search.measured_backend` does.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from autotune.constraints import Need, needs_of
from autotune.efficiency import EnergyCurve
from autotune.offline.objective import TrialMetrics
from sim.hardware.profile import HardwareProfile
from sim.models.workload import Workload
from sim.simulate import Strategy
from sim.steady import steady
from sim.timing.costs import costs_of
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs


class AbstractBackend(ABC):
    """Source of a study's measurements; pickled for worker processes. See `SimulatedBackend`."""

    kind: str
    """Kind of the measurements, for tables: simulated or measured."""

    @abstractmethod
    def measure(self, knobs: Knobs) -> TrialMetrics:
        """Return the time, memory, staleness and energy of a setting.

        Raises:
            ConfigError: The setting can't be carried out; the study goes on without it.
        """

    @abstractmethod
    def need(self, knobs: Knobs) -> Need:
        """Return the needs of a setting, as far as they are known without running it."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return a description of the task, JSON-ready: equal ones may be continued."""

    @property
    @abstractmethod
    def default(self) -> Knobs:
        """The setting in force before anything is tuned."""


class SimulatedBackend(AbstractBackend):
    """Predictions for a workload on a machine: `sim.steady` and `sim.memory.need`.

    Examples:
        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> workload = Workload.of_config(*find_model("gpt2"), batch_size=8)
        >>> backend = SimulatedBackend(workload, find_machine("hgx-h100", 1))
        >>> measured = backend.measure(backend.default)
        >>> measured.tokens_per_step, measured.staleness, round(measured.step_seconds, 3)
        (8192, 5, 0.03)
    """

    kind = "simulated"

    def __init__(
        self,
        workload: Workload,
        hardware: HardwareProfile,
        *,
        releases: bool = True,
        curve: EnergyCurve | None = None,
        base: ZenFlowConfig | None = None,
    ) -> None:
        """Work out the costs of a step, which no knob changes.

        Args:
            workload: Model and batch of each device.
            hardware: The machine.
            releases: Whether gradients leave during backward.
            curve: Share of gradient energy by ratio of columns, as measured in a run; None is
                `EnergyCurve.default`, which errs to the side of caution.
            base: Everything of the configuration that is no knob; None is the default.

        Raises:
            ConfigError: The device has no peak for the workload's dtype.
        """
        self.workload = workload
        self.hardware = hardware
        self._releases = releases
        self._curve = curve or EnergyCurve.default()
        self._base = base or ZenFlowConfig()
        self._costs = costs_of(workload, hardware)
        self._need: Callable[[Knobs], Need] = needs_of(
            workload, hardware, releases=releases, captured=self._curve.captured, base=self._base
        )

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle what it was made from; what it has worked out is worked out again."""
        made = partial(
            SimulatedBackend, releases=self._releases, curve=self._curve, base=self._base
        )
        return made, (self.workload, self.hardware)

    @property
    def default(self) -> Knobs:
        """The knobs of ``base``."""
        return Knobs.of(self._base)

    def need(self, knobs: Knobs) -> Need:
        """Return memory from the simulator, staleness from the rule, energy from the curve."""
        return self._need(knobs)

    def measure(self, knobs: Knobs) -> TrialMetrics:
        """Return the prediction of a steady step.

        Raises:
            ConfigError: A knob breaks its rule.
        """
        strategy = Strategy(
            name="zenflow", config=knobs.applied_to(self._base), releases=self._releases
        )
        done = steady(self._costs, strategy)
        return TrialMetrics(
            step_seconds=done.step_seconds,
            stall_seconds=done.stall_seconds,
            tokens_per_step=self.workload.tokens_per_step * self.hardware.total_devices,
            **asdict(self.need(knobs)),
        )

    def describe(self) -> dict[str, Any]:
        """Return names, the batch, and a digest of every quantity behind them."""
        everything = repr((self.workload, self.hardware, self._releases, self._curve, self._base))
        return {
            "backend": self.kind,
            "model": self.workload.name,
            "machine": self.hardware.name,
            "num_devices": self.hardware.total_devices,
            "batch_size": self.workload.batch_size,
            "sequence": self.workload.sequence,
            "accumulation": self.workload.accumulation,
            "dtype": self.workload.dtype,
            "checkpointing": self.workload.checkpointing,
            "digest": hashlib.sha256(everything.encode()).hexdigest()[:16],
        }
