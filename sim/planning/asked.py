"""Asked: what a plan may look at, and the searches that answer it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.hardware.profile import HardwareProfile
from sim.models.recomputation import Recomputation
from sim.models.workload import Workload
from sim.planning.choice import Chooser
from sim.planning.drives import with_drive
from sim.planning.options import Option
from sim.planning.rules import FEW_BYTES
from sim.planning.streams import can_stream, with_streams
from sim.planning.ways import Way, better_of, way_of
from sim.simulate import SYSTEMS, Strategy
from zenflow.config import PRESETS
from zenflow.host_state import GradientLink, HostState, SecondMoment, Uploads
from zenflow.presets import ZERO_INFINITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Arguments of `sim.planning.plan.plan`, which explains them, with strategies for names."""

    workload: Workload
    hardware: HardwareProfile
    strategies: tuple[Strategy, ...]
    checkpointing: Recomputation | None
    reserve: float | None
    parallel: str | None
    reshards: bool
    host_state: HostState | None
    gradient_link: GradientLink
    uploads: Uploads
    second_moment: SecondMoment
    chunked_loss: bool | None
    streams: bool | None
    state_on_drive: bool | None

    @property
    def presets(self) -> list[str]:
        """Names of the engine's presets to look at."""
        return [each.name for each in self.strategies if each.name in PRESETS]

    @property
    def systems(self) -> list[Strategy]:
        """Other systems to look at: those that a machine of this kind can run."""
        return [
            each
            for each in self.strategies
            if each.name in SYSTEMS or (each.name == ZERO_INFINITY and can_stream(self.hardware))
        ]

    def ways(self) -> tuple[Way, Way | None]:
        """Return the better way to share the model, and the other one if it was looked at."""
        if self.parallel is not None:
            return self._way(self.parallel), None
        return better_of(self._way)

    def streamed(self, found: Way) -> Option | None:
        """Return a step whose layers visit the device; None unless that is worth telling."""
        if not self._has_both or self.streams is False:
            return None
        return with_streams(
            found.one,
            found.chooser.workload,
            before=None if self.streams else found.choice.shown,
            checkpointing=self.checkpointing,
            may_chunk=self.chunked_loss is not False,
            knobs=found.chooser.knobs,
        )

    def on_drive(self, found: Way, before: Option | None) -> Option | None:
        """Return a step whose states are on a drive; None unless that is worth telling.

        Args:
            found: Way to share the model.
            before: Best option whose states are in memory.
        """
        if not self._has_both or self.state_on_drive is False or self.hardware.nvme is None:
            return None
        state = {} if self.host_state is None else {"host_state": self.host_state}
        return with_drive(
            found.one,
            self.workload,
            before=before,
            is_asked=bool(self.state_on_drive),
            may_stream=self.streams is not False,
            checkpointing=self.checkpointing,
            may_chunk=self.chunked_loss is not False,
            knobs={**self._held, **state},
        )

    @property
    def _has_both(self) -> bool:
        """Whether weights may visit the device, and states be on a drive."""
        return "zenflow" in self.presets and can_stream(self.hardware)

    @property
    def _held(self) -> dict[str, Any]:
        """Formats of few bytes, which searches do not choose themselves."""
        formats = {
            "gradient_link": self.gradient_link,
            "uploads": self.uploads,
            "second_moment": self.second_moment,
        }
        return {name: value for name, value in formats.items() if value == FEW_BYTES[name]}

    def _way(self, parallel: str) -> Way:
        """Return the choice under a way to share the model."""
        chooser = Chooser(
            self.workload, self.hardware, names=self.presets, checkpointing=self.checkpointing,
            reserve=self.reserve, parallel=parallel, reshards=self.reshards, knobs=self._held,
        )  # fmt: skip
        if self.host_state == "compact":
            chooser = chooser.compact()
        return way_of(
            parallel,
            chooser,
            self.presets,
            may_compact=self.host_state is None,
            may_chunk=self.chunked_loss is None,
        )
