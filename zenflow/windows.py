"""When each block's window ends, when selection is due, and how a new interval takes effect.

Everything here is counted in steps that were really taken; no clock is read, so the calendar is
the same however fast the machine is. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zenflow.blocks import assign_phases
from zenflow.config import ZenFlowConfig


class WindowCalendar:
    """The due step of every block.

    Attributes:
        interval: S in force.
        next_due: Step at which each block's open window ends.
        opened: Step after which each block's open window began.
    """

    def __init__(self, config: ZenFlowConfig, loads: Sequence[int]) -> None:
        """Lay out the first windows.

        Args:
            config: Rule of the windows.
            loads: Deferred elements of each block, in block order.
        """
        self._config = config
        self._loads = list(loads)
        self._known_phases: dict[int, list[int]] = {}
        self.interval = config.update_interval
        self._warm_up = config.full_warm_up_rounds
        self.opened = [0] * len(loads)
        if self._warm_up:
            self.next_due = [1] * len(loads)
        else:
            self.next_due = list(self.phases())

    def phases(self) -> list[int]:
        """Return every block's phase for the interval in force; laid out once per interval."""
        if self.interval not in self._known_phases:
            self._known_phases[self.interval] = (
                assign_phases(self._loads, self.interval)
                if self._config.rolling
                else [self.interval] * len(self._loads)
            )
        return self._known_phases[self.interval]

    def is_warm_up(self, step: int) -> bool:
        """Whether every column is updated synchronously at this step."""
        return step <= self._warm_up

    def is_due(self, block: int, step: int) -> bool:
        """Whether the block's window ends at this step."""
        return self.next_due[block] == step

    def close(self, block: int, step: int) -> None:
        """End the block's window at its due step and open the next one."""
        self.opened[block] = step
        if step < self._warm_up:
            self.next_due[block] = step + 1
        elif step == self._warm_up:
            self.next_due[block] = step + self.phases()[block]
        else:
            self.next_due[block] = step + self.interval

    def lag(self, step: int) -> int:
        """Return the lag of an update that starts at this step's boundary."""
        return 0 if self.is_warm_up(step) else self._config.effective_lag(self.interval)

    def selects(self, step: int) -> bool:
        """Whether a selection is asked for at this step; a block's comes at its next boundary."""
        first = max(self._warm_up, 1)
        every = self._config.select_interval_steps
        if every == 0:
            return step == first
        return step >= first and (step - first) % every == 0

    def set_interval(self, interval: int, step: int) -> None:
        """Let S be `interval` from the step after this one on.

        Open windows are not cut: with rolling windows the blocks get new phases counted from this
        step, but no window grows longer than the old S and the new one together, else changes at
        every step would put some blocks off for ever. Aligned windows end `interval` steps after
        they began. Both end at the next step at the earliest. During warm-up the new phases are
        laid out when it ends.

        Raises:
            ValueError: The interval is not a positive whole number.
        """
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(
                f"a controller's update_interval must be a whole number of at least 1, got "
                f"{interval!r}: return 1 for an update at every step"
            )
        if interval == self.interval:
            return
        former, self.interval = self.interval, interval
        if step < self._warm_up:
            return
        if self._config.rolling:
            ends = [
                min(step + phase, opened + former + interval)
                for phase, opened in zip(self.phases(), self.opened, strict=True)
            ]
        else:
            ends = [opened + interval for opened in self.opened]
        self.next_due = [max(step + 1, end) for end in ends]

    def state_dict(self) -> dict[str, Any]:
        """Return the calendar as plain values."""
        return {
            "interval": self.interval,
            "next_due": list(self.next_due),
            "opened": list(self.opened),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a calendar that `state_dict` returned."""
        self.interval = int(state["interval"])
        self.next_due = [int(step) for step in state["next_due"]]
        self.opened = [int(step) for step in state["opened"]]
