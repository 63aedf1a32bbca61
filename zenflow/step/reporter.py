"""The newest step report: noted when a step ends, finished when the device has passed it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zenflow.errors import NormError
from zenflow.report import StepReport
from zenflow.rule.importance import energy_curve
from zenflow.step.window_sketch import window_norms

if TYPE_CHECKING:
    from zenflow.columns.layout import Landing
    from zenflow.device.base import AbstractDevice, HostValues
    from zenflow.device.stalls import StallClock
    from zenflow.knobs import Knobs
    from zenflow.step.controller_probes import ProbeReadings
    from zenflow.step.host_tasks import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What is known of a step when it has been launched; the report has the same names."""

    step: int
    values: HostValues
    """(factor, norm, important energy, total energy of split parameters), then the sketch's."""
    d2h_bytes: int
    h2d_bytes: int
    staleness: int
    topk_ratio: float
    knobs: Knobs
    lag: int
    learning_rates: tuple[float, ...]
    readings: ProbeReadings

    @classmethod
    def of(
        cls,
        step: Step,
        landed: Sequence[Landing],
        knobs: Knobs,
        topk_ratio: float,
        readings: ProbeReadings,
    ) -> StepFacts:
        """Return the facts of a step; its gradients are not held on to."""
        return cls(
            step=step.number,
            values=step.values,
            d2h_bytes=step.gradients.num_bytes,
            h2d_bytes=sum(landing.num_bytes for landing in landed),
            staleness=max((step.number - landing.opened for landing in landed), default=0),
            topk_ratio=topk_ratio,
            knobs=knobs,
            lag=step.lag,
            learning_rates=tuple(hyper.lr for hyper in step.hypers),
            readings=readings,
        )


class Reporter:
    """Turns the facts of each step into its report, on a GPU while the next step is under way.

    Attributes:
        report: The newest finished one.
    """

    def __init__(self, device: AbstractDevice, stalls: StallClock) -> None:
        """Start the first step's clock."""
        self._device = device
        self._stalls = stalls
        self._end_of_step = device.timing_mark()
        self._unreported: tuple[StepFacts, Any, Any, list[tuple[str, Any, Any]]] | None = None
        self.report: StepReport | None = None

    def note(self, facts: StepFacts) -> None:
        """Take a step's facts at its end; the step before is then reported."""
        self.resolve()
        start, end = self._end_of_step, self._device.timing_mark()
        self._unreported = facts, start, end, self._stalls.take()
        self._end_of_step = end
        if self._device.is_synchronous:
            self.resolve()

    def resolve(self) -> None:
        """Finish the last step's report; on a GPU this waits until the device has passed it.

        Raises:
            NormError: The step's gradient norm is not finite; so says every call until another
                state is loaded, since the weights may hold it.
        """
        if self._unreported is None:
            return
        facts, start, end, waits = self._unreported
        factor, norm, important, total, *norms = facts.values.get()
        check_finite(norm, facts.step, self._device)
        self._unreported = None
        stalls = self._stalls.resolve(waits, facts.step)
        curve = facts.readings.curve
        self.report = StepReport(
            step=facts.step,
            seconds=self._device.seconds_of(end) - self._device.seconds_of(start),
            stall_seconds=sum(stalls.values()),
            stalls=stalls,
            d2h_bytes=facts.d2h_bytes,
            h2d_bytes=facts.h2d_bytes,
            staleness=facts.staleness,
            captured_energy=important / total if total > 0 else 1.0,
            grad_norm=norm,
            clip_factor=min(1.0, factor),
            update_interval=facts.knobs.update_interval,
            lag=facts.lag,
            topk_ratio=facts.topk_ratio,
            rolling=facts.knobs.rolling,
            select_interval=facts.knobs.select_interval,
            learning_rates=facts.learning_rates,
            windows=window_norms(facts.readings.ages, norms),
            energy_curve=None if curve is None else energy_curve(curve.get()),
        )

    def forget(self) -> None:
        """Drop what is known of the last step: another state is being loaded."""
        self._unreported = None
        self.report = None
        self._end_of_step = self._device.timing_mark()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the report that the controller has not seen yet; None where it has seen all."""
        if self._device.is_synchronous or self.report is None:
            return None
        return self.report.to_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take up a report that `state_dict` returned, so that the next decision goes by it."""
        self.forget()
        if state is not None and not self._device.is_synchronous:
            self.report = StepReport.from_dict(state)


def check_finite(norm: float, step: int, device: AbstractDevice) -> None:
    """Refuse gradients that no rule can use.

    Raises:
        NormError: The norm is not finite; the message says what can be done now.
    """
    if math.isfinite(norm):
        return
    remedy = (
        "nothing was changed by it: skip this batch with zero_grad(), or lower the learning rate"
        if device.is_synchronous
        else "weights may hold it: resume from the last checkpoint with a lower learning rate"
    )
    error = NormError(
        f"the gradient norm of step {step} is {norm}: it must be finite; {remedy}. With "
        'float16 use torch.amp.GradScaler and max_grad_norm="keep"'
    )
    error.step, error.norm = step, norm
    raise error
