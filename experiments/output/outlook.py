"""Time left of several runs, or stages: guessed at first, refined as their steps are taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ENOUGH_STEPS = 5
"""Steps of the run under way, from which on its own pace tells how long it goes on."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that is still to be done."""

    label: str
    steps: int
    cost: float = 1.0
    """Seconds of a step where ``Outlook`` has a guess, else its share of the others'."""


class Outlook:
    """Steps done of all runs, and the seconds that the rest will take.

    Costs say how runs compare; what a second's worth of them really takes is measured, with
    everything that happens between the steps: loading, evaluation, saving.
    """

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        *,
        is_guessed: bool,
        seconds_beside: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin the first run now.

        Args:
            runs: In their order.
            is_guessed: Whether costs are seconds, so that there is an estimate before any step.
            seconds_beside: A guess of what each run takes beside its steps, to load and save.
            clock: Of seconds.
        """
        self.runs = list(runs)
        self.number = 0
        """Place of the run under way, from 1; 0 before the first."""
        self._is_guessed, self._beside = is_guessed, seconds_beside
        self._clock, self._started = clock, clock()
        self._done = [0] * len(self.runs)
        self._unpaid = 0.0
        self._begun, self._begun_at = clock(), 0

    @property
    def label(self) -> str:
        """Label of the run under way, with its place among all."""
        return f"{self.number}/{len(self.runs)} {self.runs[self.number - 1].label}"

    @property
    def total(self) -> int:
        """Steps of all runs."""
        return sum(run.steps for run in self.runs)

    @property
    def done(self) -> int:
        """Steps taken of all runs."""
        return sum(self._done)

    @property
    def share(self) -> float:
        """Cost of what is done as a share of all."""
        done = sum(run.cost * done for run, done in zip(self.runs, self._done, strict=True))
        return done / sum(run.cost * run.steps for run in self.runs)

    def start(self, done: int) -> None:
        """Begin the next run, of which so many steps lie behind."""
        self.number += 1
        self._done[self.number - 1] = done
        self._unpaid += done * self.runs[self.number - 1].cost
        self._begun, self._begun_at = self._clock(), done

    def step(self, done: int) -> None:
        """Count steps of the run under way."""
        self._done[self.number - 1] = done

    def seconds_left(self) -> float | None:
        """Return the seconds that the rest will take; None while nobody knows."""
        left = [run.steps - done for run, done in zip(self.runs, self._done, strict=True)]
        paid = sum(r.cost * d for r, d in zip(self.runs, self._done, strict=True)) - self._unpaid
        if paid <= 0:
            if not self._is_guessed:
                return None
            costs = (run.cost * steps for run, steps in zip(self.runs, left, strict=True))
            return sum(costs) + self._beside * len(self.runs)
        scale = (self._clock() - self._started) / paid
        ahead = [scale * run.cost * steps for run, steps in zip(self.runs, left, strict=True)]
        taken = self._done[self.number - 1] - self._begun_at
        if taken >= _ENOUGH_STEPS:  # of the run under way it is known, whatever its share was
            ahead[self.number - 1] = left[self.number - 1] * (self._clock() - self._begun) / taken
        return sum(ahead)


def in_words(seconds: float) -> str:
    """Return a time to wait as people say it.

    >>> in_words(8), in_words(100), in_words(1000), in_words(9000)
    ('less than 10 s', 'about 2 min', 'about 17 min', 'about 2.5 h')
    """
    if seconds < 55:
        return f"less than {10 * int(seconds / 10 + 1)} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
