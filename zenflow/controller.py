"""Who decides the window length S while a run goes on: the seam for tuners.

The engine asks its controller once after every step. Beside data, seed and configuration, its
decisions are all that the weights depend on, so they are logged, and a logged run can be replayed.
Does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from zenflow.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zenflow.report import StepReport


class AbstractIntervalController(ABC):
    """Chooses the window length S after every step.

    A decision should depend on the report's counts and norms, or be replayed from its log: one
    that depends on seconds makes two runs differ. A controller that remembers anything
    overrides ``state_dict`` and ``load_state_dict``, else a resumed run decides differently.
    """

    @abstractmethod
    def next_interval(self, report: StepReport) -> int:
        """Return S >= 1 for the steps after ``report.step``.

        Returning ``report.update_interval`` changes nothing. A change gives every block a new
        due step; open windows close there with the steps they have, so no gradient is lost.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` needs to decide as if never interrupted (JSON-ready)."""
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


class FixedInterval(AbstractIntervalController):
    """Always the same S."""

    def __init__(self, update_interval: int) -> None:
        """Keep the window length.

        Raises:
            ConfigError: It isn't an integer of at least 1.
        """
        self.update_interval = _checked_interval(update_interval)

    def next_interval(self, report: StepReport) -> int:
        """Return the fixed S."""
        return self.update_interval


class LoggedIntervals(AbstractIntervalController):
    """Replays the decisions of another run, so that its weights come out again bit for bit.

    Holds no state: a decision follows from the log and the step alone, so it resumes anywhere.

    >>> LoggedIntervals([(10, 2), (20, 8)]).log
    ((10, 2), (20, 8))
    """

    def __init__(self, log: Iterable[tuple[int, int]]) -> None:
        """Keep the log.

        Args:
            log: Pairs (step, S): after that step the controller chose S. Steps ascend. The
                engine's ``interval_log`` has this form. Before the first pair S stays as it is.

        Raises:
            ConfigError: Steps don't ascend, or an S isn't an integer of at least 1.
        """
        self.log = tuple((int(step), _checked_interval(interval)) for step, interval in log)
        self._steps = [step for step, _ in self.log]
        for earlier, later in pairwise(self._steps):
            if later <= earlier:
                raise ConfigError(
                    f"steps of an interval log must ascend, got {later} after {earlier}: "
                    "sort the log, and keep one decision per step"
                )

    def next_interval(self, report: StepReport) -> int:
        """Return the S of the last decision at or before this step."""
        index = bisect_right(self._steps, report.step)
        return self.log[index - 1][1] if index else report.update_interval


def _checked_interval(interval: object) -> int:
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ConfigError(
            f"a window length must be an integer >= 1, got {interval!r}: 1 updates every step"
        )
    return interval
