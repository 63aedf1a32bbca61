"""Calendar: the step at which each block's window ends, selections, and changes of knobs.

Only steps that were taken count. No clock is read, so that the calendar does not depend on the
machine's speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs
from zenflow.rule.blocks import BlockShape, assign_phases
from zenflow.rule.momentum import delay


class WindowCalendar:
    """Due step of every block, under the knobs in force.

    Attributes:
        knobs: Knobs in force, from the next step on where they have just been set.
        rule: The configuration with these knobs.
        next_due: Step at which each block's open window ends.
        opened: Step after which each block's open window began.
        version: Count of the times that windows were laid out anew.
    """

    def __init__(self, config: ZenFlowConfig, blocks: Sequence[BlockShape]) -> None:
        """Lay out the first windows.

        Args:
            config: The update rule's settings, with the first knobs.
            blocks: Shapes of all blocks, in backward order.
        """
        self._config = config
        self._blocks = list(blocks)
        self._known_phases: dict[int, list[int]] = {}
        self.knobs = Knobs.of(config)
        self.rule = self.knobs.applied_to(config)
        self._warm_up = config.full_warm_up_rounds
        self.opened = [0] * len(blocks)
        self.version = 0
        if self._warm_up:
            self.next_due = [1] * len(blocks)
        else:
            self.next_due = list(self.phases())

    def phases(self) -> list[int]:
        """Return every block's phase for the knobs in force; laid out once per interval."""
        interval = self.knobs.update_interval
        if not self.rule.rolling:
            return [interval] * len(self._blocks)
        if interval not in self._known_phases:
            loads = [block.deferred_elements for block in self._blocks]
            cohorts = [block.cohort for block in self._blocks]
            self._known_phases[interval] = assign_phases(loads, cohorts, interval)
        return self._known_phases[interval]

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
            self.next_due[block] = step + self.knobs.update_interval

    def open_all(self, blocks: Sequence[BlockShape], step: int) -> None:
        """Open every block's window after this step, laid out for blocks of other loads."""
        self.version += 1
        self._blocks = list(blocks)
        self._known_phases.clear()
        self.opened = [step] * len(blocks)
        is_warm_up = self.is_warm_up(step + 1)
        self.next_due = [step + (1 if is_warm_up else phase) for phase in self.phases()]

    def lag(self, step: int) -> int:
        """Return the lag, in steps, of an update that starts at the end of this step."""
        return 0 if self.is_warm_up(step) else self.rule.effective_lag()

    def delay(self, beta1: float, num_forwards: int) -> float:
        """Return the steps by which so many forwards are to be behind AdamW's weights."""
        return delay(beta1, num_forwards) if self.rule.forward_delay else 0.0

    def next_landing(self, block: int) -> int:
        """Return the step by whose end the update of the block's open window will have landed."""
        due = self.next_due[block]
        return due + self.lag(due)

    def selects(self, step: int) -> bool:
        """Whether a selection is due at this step; blocks select when their next windows end."""
        first = max(self._warm_up, 1)
        every = self.knobs.select_interval
        if every == 0:
            return step == first
        return step >= first and (step - first) % every == 0

    def set_knobs(self, knobs: Knobs, step: int) -> None:
        """Let the knobs hold from the step after this one on.

        A change of S lays the windows out anew, without cutting open ones:

        - Rolling blocks get new phases, counted from this step.
        - Aligned blocks end together, S steps after the last of them began.
        - No window grows longer than the old S and the new one together. Without that bound,
          changes at every step would put some blocks off for ever.
        - No window ends before the next step.
        - During warm-up the new phases are laid out when it ends.

        A change of `topk_ratio` ends every window in the next step.

        Raises:
            ConfigError: The knobs break a rule of the configuration.
        """
        rule = knobs.applied_to(self._config)
        former, self.knobs, self.rule = self.knobs, knobs, rule
        self.version += 1
        if knobs.topk_ratio != former.topk_ratio:  # every window ends, then `open_all`
            self.next_due = [step + 1] * len(self.next_due)
            return
        if knobs.update_interval == former.update_interval or step < self._warm_up:
            return
        longest = former.update_interval + knobs.update_interval
        if rule.rolling:
            ends = [
                min(step + phase, opened + longest)
                for phase, opened in zip(self.phases(), self.opened, strict=True)
            ]
        else:
            first, last = min(self.opened, default=0), max(self.opened, default=0)
            ends = [min(last + knobs.update_interval, first + longest)] * len(self.opened)
        self.next_due = [max(step + 1, end) for end in ends]

    def state_dict(self) -> dict[str, Any]:
        """Return the calendar as plain values."""
        return {
            "knobs": self.knobs.to_dict(),
            "next_due": list(self.next_due),
            "opened": list(self.opened),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a calendar that `state_dict` returned."""
        self.version += 1
        self.knobs = Knobs.from_dict(state["knobs"])
        self.rule = self.knobs.applied_to(self._config)
        self.next_due = [int(step) for step in state["next_due"]]
        self.opened = [int(step) for step in state["opened"]]
