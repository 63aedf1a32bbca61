"""Energy guard: the one constraint that only a run can check, the captured energy."""

from __future__ import annotations

from autotune.model.stretch import Stretch


class EnergyGuard:
    """Watches captured energy, where a least share is demanded.

    Attributes:
        was_met: Whether enough was captured at some time.
        has_given_up: Whether it was once met and can't be any more: the run goes on without.
    """

    def __init__(self, least: float | None) -> None:
        """Watch for a share of the energy; None accepts any."""
        self._least = least
        self._newest = self._asked_at = -1
        self._is_short = False
        self.was_met = False
        self.has_given_up = False

    def see(self, stretch: Stretch) -> None:
        """Take a measured stretch."""
        self._newest = stretch.index
        if self._least is not None:
            self._is_short = 1.0 - stretch.rho < self._least
            self.was_met = self.was_met or not self._is_short

    @property
    def is_urgent(self) -> bool:
        """Whether too little is captured, and no question has been asked about that yet.

        A constraint is worth more than the budget of searching.
        """
        return self._is_short and not self.has_given_up and self._newest > self._asked_at

    def asked(self) -> None:
        """Note that advice was asked for with what is known."""
        self._asked_at = self._newest
