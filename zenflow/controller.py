"""Controllers: objects that choose the knobs while a run goes on, such as tuners.

The engine asks its controller once after every step. Beside data, seed and configuration, its
decisions are all that the weights depend on, so they are logged, and a logged run can be replayed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from zenflow.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zenflow.knobs import Knobs
    from zenflow.report import StepReport
    from zenflow.trace.timeline import Timeline


class ObservedTimeline(Protocol):
    """Timeline that a controller may look at beside reports."""

    @property
    def timeline(self) -> Timeline:
        """Spans of the last steps; empty unless the optimizer keeps some. Waits for the device."""


class AbstractController(ABC):
    """Chooses the knobs after every step.

    A decision should depend on the report's counts and norms, or be replayed from its log: one
    that depends on seconds makes two runs differ. A controller that remembers anything
    overrides ``state_dict`` and ``load_state_dict``, else a resumed run decides differently.

    The attributes are read once, when the optimizer is made; ``looks_at_windows`` is read before
    every step.
    """

    measures_windows: bool = False
    """Whether reports have ``windows``: norms of the gradients in open windows."""

    looks_at_windows: bool = True
    """Whether the next step is measured for ``windows``; read before every step.

    Windows count that began while the value was true. With False nothing is measured, at no cost.
    """

    curve_interval: int = 0
    """Steps between two reports with an ``energy_curve``; 0 for none."""

    least_topk_ratio: float | None = None
    """Smallest k that the controller may choose; host memory is laid out for it. None: first k."""

    largest_interval: int | None = None
    """Largest S that the controller may choose: blocks are cut for it. None: the first S."""

    follows_clock: bool = False
    """Whether decisions depend on seconds: ranks of one training would then decide differently."""

    timeline_steps: int = 0
    """Number of last steps whose spans the optimizer must keep for the controller; 0 for none."""

    @property
    def search_seconds(self) -> float:
        """CPU seconds that the controller's search has taken so far."""
        return 0.0

    def attach(self, observed: ObservedTimeline) -> None:
        """Take the optimizer's timeline; called once, before the first step."""
        del observed

    @abstractmethod
    def next_knobs(self, step: int, report: StepReport | None, knobs: Knobs) -> Knobs:
        """Return the knobs for the steps after ``step``, which has just ended.

        Args:
            step: Number of the step.
            report: The newest finished report: of this step on a CPU, of the step before on a
                GPU, so that nothing waits. None before there is one.
            knobs: Knobs in force. To return them changes nothing.

        Returns:
            Any knobs that fit the optimizer's configuration. A change of ``update_interval`` gives
            every block a new due step; open windows close there with the steps they have, so no
            gradient is lost. One of ``topk_ratio`` ends every window in the next step.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End the controller's own threads and processes, such as one that searches."""

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state, JSON-ready: with it a resumed run decides alike."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that ``state_dict`` returned.

        Raises:
            CheckpointError: The state isn't this controller's.
        """
        if state:
            raise CheckpointError(
                f"{type(self).__name__} keeps no state, but the checkpoint has "
                f"{', '.join(map(repr, state))}: resume with the controller that was saved"
            )


class AbstractIntervalController(AbstractController):
    """Chooses the window length S alone."""

    @abstractmethod
    def next_interval(self, report: StepReport) -> int:
        """Return S >= 1 for the steps to come; called once for every report.

        Returning ``report.update_interval`` asks for no change: on a GPU, where reports come a
        step late, a change decided since then stays.
        """

    def next_knobs(self, step: int, report: StepReport | None, knobs: Knobs) -> Knobs:
        """Return the knobs with the S that the report calls for.

        Raises:
            ConfigError: It isn't an integer of at least 1.
        """
        if report is None:
            return knobs
        interval = _checked_interval(self.next_interval(report), type(self).__name__)
        if interval in (report.update_interval, knobs.update_interval):
            return knobs
        return replace(knobs, update_interval=interval)


class FixedInterval(AbstractIntervalController):
    """Keeps one window length S for the whole run."""

    def __init__(self, update_interval: int) -> None:
        """Keep the window length.

        Raises:
            ConfigError: It isn't an integer of at least 1.
        """
        self.update_interval = _checked_interval(update_interval, "FixedInterval")

    def next_interval(self, report: StepReport) -> int:
        """Return the fixed S."""
        return self.update_interval


class LoggedDecisions(AbstractController):
    """Replays the logged decisions of another run, whose weights are then repeated bit for bit.

    Holds no state: a decision follows from the log and the step alone, so it resumes anywhere.

    >>> from zenflow import Knobs, ZenFlowConfig
    >>> LoggedDecisions([(10, Knobs.of(ZenFlowConfig(update_interval=2)))]).log[0][0]
    10
    """

    def __init__(
        self, log: Iterable[tuple[int, Knobs]], *, largest_interval: int | None = None
    ) -> None:
        """Keep the log.

        Args:
            log: Pairs (step, knobs): after that step the controller chose them. Steps ascend. The
                optimizer's ``decision_log`` has this form. Before the first pair the knobs stay as
                they are.
            largest_interval: That of the controller whose decisions these are: it says how blocks
                are cut.

        Raises:
            ConfigError: Steps don't ascend, or an S isn't an integer of at least 1.
        """
        self.log = tuple((int(step), knobs) for step, knobs in log)
        self.largest_interval = largest_interval
        self.least_topk_ratio = min((knobs.topk_ratio for _, knobs in self.log), default=None)
        self._steps = [step for step, _ in self.log]
        for _, knobs in self.log:
            _checked_interval(knobs.update_interval, "LoggedDecisions")
        for earlier, later in pairwise(self._steps):
            if later <= earlier:
                raise ConfigError(
                    f"steps of a decision log must ascend, got {later} after {earlier}: "
                    "sort the log, and keep one decision per step"
                )

    def next_knobs(self, step: int, report: StepReport | None, knobs: Knobs) -> Knobs:
        """Return the knobs of the last decision at or before this step."""
        index = bisect_right(self._steps, step)
        return self.log[index - 1][1] if index else knobs


def _checked_interval(interval: object, controller: str) -> int:
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ConfigError(
            f"{controller}: a window length must be an integer >= 1, got {interval!r}: 1 updates "
            "at every step"
        )
    return interval
