"""Decision writer: a tuner's measurements and decisions as records with their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.decisions.file import DecisionLog
from autotune.decisions.records import Deciders, Decision, WindowRecord
from autotune.efficiency import FITTED
from autotune.model.stretch import Stretch
from autotune.online.trial_rules import KnobChange
from zenflow.knobs import Knobs


class DecisionWriter:
    """Writes a record of each measured stretch and of each change.

    Attributes:
        predicted: Step seconds foretold for the knobs in force; None where nothing was.
    """

    def __init__(self, log: DecisionLog, tokens_per_step: int) -> None:
        """Write to a log; ``tokens_per_step`` are each device's."""
        self.predicted: float | None = None
        self._log = log
        self._tokens = tokens_per_step

    def window(
        self, stretch: Stretch, constants: Mapping[str, float], search_seconds: float
    ) -> None:
        """Write a measured stretch down, with the twin's constants as last refitted."""
        worth = FITTED.of(stretch.knobs, stretch.rho)
        self._log.append(
            WindowRecord(
                step=stretch.last_step,
                window=stretch.index,
                knobs=stretch.knobs,
                step_seconds=stretch.step_seconds,
                stall_seconds=max(0.0, stretch.stall_seconds),
                predicted_step_seconds=self.predicted,
                goodput=self._tokens / stretch.step_seconds * worth,
                rho=stretch.rho,
                constants=dict(constants),
                search_seconds=search_seconds,
            )
        )

    def change(
        self,
        step: int,
        window: int,
        old: Knobs,
        change: KnobChange,
        stretches: Sequence[Stretch],
        *,
        by: Deciders,
    ) -> None:
        """Write a change of knobs down, after ``window`` stretches; ``stretches`` are known."""
        measured = [s.step_seconds for s in stretches if s.knobs == old]
        self._log.append(
            Decision(
                step=step,
                window=window,
                by=by,
                old=old,
                new=change.new,
                predicted_step_seconds=change.predicted_step_seconds,
                measured_step_seconds=measured[-1] if measured else None,
                gain=change.gain,
                error=change.error,
                rho=stretches[-1].rho if stretches else None,
                reason=change.reason,
            )
        )
        self.predicted = change.predicted_step_seconds
