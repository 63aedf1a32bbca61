"""Decisions: asks the controller after every step, checks its knobs, and brings them in force."""

from __future__ import annotations

from dataclasses import dataclass, field

from zenflow.columns.layout import Layout
from zenflow.controller import AbstractController
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs
from zenflow.report import StepReport
from zenflow.rule.calendar import WindowCalendar


@dataclass(eq=False, repr=False)
class Decisions:
    """A controller's decisions, checked and written down."""

    controller: AbstractController
    """Controller that chooses the knobs."""
    layout: Layout
    """Layout whose host memory bounds the ratio k."""
    calendar: WindowCalendar
    """Calendar that holds the knobs in force."""
    log: list[tuple[int, Knobs]] = field(default_factory=list, init=False)
    """(step, knobs) of every change: the knobs hold from the step after."""

    def ask(self, step: int, report: StepReport | None) -> None:
        """Ask the controller. It gets the newest finished report: nothing waits for another.

        Raises:
            ConfigError: The knobs that it chooses break a rule, or do not fit the layout.
        """
        former = self.calendar.knobs
        knobs = self.controller.next_knobs(step, report, former)
        if knobs == former:
            return
        try:
            self._check_possible(knobs, former)
            self.calendar.set_knobs(knobs, step)
        except ConfigError as error:
            raise ConfigError(
                f"{type(self.controller).__name__} chose {knobs} after step {step}, which can't "
                f"be: {error}"
            ) from error
        self.log.append((step, knobs))

    def _check_possible(self, knobs: Knobs, former: Knobs) -> None:
        """Refuse a k that this layout can not have: 0, 1, or less than its memory is for."""
        ratio = knobs.topk_ratio
        if ratio == former.topk_ratio:
            return
        if not (0 < ratio < 1 and 0 < former.topk_ratio < 1):
            raise ConfigError(
                f"a topk_ratio that changes must stay between 0 and 1, got {ratio:g} after "
                f"{former.topk_ratio:g}: 0 and 1 place parameters for good; start and stay in "
                "between"
            )
        if ratio < self.layout.least_topk_ratio:
            raise ConfigError(
                f"topk_ratio must be at least {self.layout.least_topk_ratio:g}, for which host "
                f"memory was laid out, got {ratio:g}: give the controller that least_topk_ratio"
            )
