"""Search budget: CPU time that a run may spend on searching, and has spent."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

_SPIKE = 5.0
"""Median steps above which a step counts as one of them: a long gap between two steps, such as an
evaluation, is no step's time."""
FEWEST_TRIALS, _MOST_TRIALS = 6, 60
_BESIDE_TRIALS, _OF_EACH_SETTING = 4, 2
"""Simulations of a question that are no trials: those that compare, and those that refit, of every
setting that has been measured."""
_AFTER_TRIALS = 3
"""Trials' worth of time that an answer may take beyond the limit on its trials.

One is for the trial in which the limit passes, the others are to compare them all."""
_AT_ONCE = 0.8
"""Share of the budget that may be spent from the start; the rest comes as the run goes on, for
what may change."""
_OF_ROOM = 0.5
"""Share of what may be spent now that one question takes: there will be others.

So the last of it is for a machine that changes: only then a question may take it all."""


class SearchBudget:
    """CPU time of searching as a share of the run's time, stalls left out.

    Attributes:
        share: Of the run's time.
        spent: CPU seconds so far, loading included.
        seconds_per_trial: As last seen; None before anything was.

    Examples:
        A run of 1000 steps of 2 s pays a hundredth: 20 s, most of which may be spent early.

        >>> budget = SearchBudget(share=0.01, total_steps=1000)
        >>> for step in range(1, 4):
        ...     budget.add_step(step, 2.0)
        >>> round(budget.seconds_left)
        16
    """

    def __init__(self, share: float, total_steps: int) -> None:
        """Start with nothing spent of a share of the run's time."""
        self.share = share
        self._total_steps = total_steps
        self._run_seconds = 0.0
        self._counted = 0
        self._recent: deque[float] = deque(maxlen=12)
        self._done = 0
        self.spent = 0.0
        self.seconds_per_trial: float | None = None

    def add_step(self, step: int, seconds: float) -> None:
        """Count a step of the run; the first one's time has the run's own start in it.

        Args:
            step: Its number.
            seconds: What it took without its stalls. Those may be what tuning wins: a share of
                what is left of the run then must not count them.
        """
        if self._done:
            usual = median(self._recent) if self._recent else math.inf
            self._run_seconds += usual if seconds > _SPIKE * usual else seconds
            self._counted += 1
            self._recent.append(seconds)
        self._done = step

    @property
    def seconds_left(self) -> float:
        """CPU seconds that may be spent now; 0 before the first steps."""
        if not self._counted:
            return 0.0
        progress = self._done / self._total_steps
        return (
            self.share * self._seconds_in_all() * (_AT_ONCE + (1 - _AT_ONCE) * progress)
            - self.spent
        )

    def _seconds_in_all(self) -> float:
        """Return an estimate of the whole run's seconds.

        A tuned run gets faster, so the steps to come are taken at the latest pace.
        """
        pace = self._run_seconds / self._counted
        latest = min(pace, median(self._recent)) if self._recent else pace
        return pace * self._done + latest * max(0, self._total_steps - self._done)

    def seconds_for_trials(self, num_trials: int) -> float:
        """Return the CPU seconds after which a question's trials must end, however many are left.

        A trial may cost several times the price that one setting has shown. So the share of one
        question holds in seconds too, and the rest of the room is left to weigh settings anew.
        """
        of_room = 1.0 if num_trials <= FEWEST_TRIALS else _OF_ROOM
        return max(
            0.0, of_room * self.seconds_left - _AFTER_TRIALS * (self.seconds_per_trial or 0.0)
        )

    def num_trials(self, num_settings: int, *, is_new: bool = True) -> int:
        """Return the number of trials that may be paid for now; 0 if too few to be worth asking.

        Args:
            num_settings: Settings that have been measured.
            is_new: Whether nothing has been asked about the machine as it is now.
        """
        room = self.seconds_left
        if self.seconds_per_trial is None:
            return 0
        beside = _beside(num_settings)
        affordable = int(room / max(self.seconds_per_trial, 1e-6)) - beside
        spared = int(_OF_ROOM * room / max(self.seconds_per_trial, 1e-6)) - beside
        if spared >= FEWEST_TRIALS:
            return min(_MOST_TRIALS, spared)
        return FEWEST_TRIALS if is_new and affordable >= FEWEST_TRIALS else 0

    def is_too_small(self, num_settings: int) -> bool:
        """Return whether not even the whole run's share pays for a search, as far as one knows.

        ``num_settings`` have been measured.
        """
        if self.seconds_per_trial is None or not self._counted:
            return False
        least = (_beside(num_settings) + FEWEST_TRIALS) * self.seconds_per_trial
        return self.spent + least > self.share * self._seconds_in_all()

    def state_dict(self) -> dict[str, Any]:
        """Return the counted seconds and steps, JSON-ready."""
        return {
            "run_seconds": self._run_seconds,
            "counted": self._counted,
            "spent": self.spent,
            "done": self._done,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned."""
        self._run_seconds = float(state["run_seconds"])
        self._counted = int(state["counted"])
        self.spent = float(state["spent"])
        self._done = int(state["done"])


def _beside(num_settings: int) -> int:
    return _BESIDE_TRIALS + _OF_EACH_SETTING * num_settings
