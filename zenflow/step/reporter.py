"""Reporter of steps: notes facts when a step ends, and finishes the report behind the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from zenflow.errors import NormError
from zenflow.report import StepReport
from zenflow.rule.importance import energy_curve
from zenflow.step.window_sketch import window_norms

if TYPE_CHECKING:
    from zenflow.columns.in_flight import PendingUpload
    from zenflow.device.base import AbstractDevice, HostValues
    from zenflow.device.stalls import StallClock
    from zenflow.knobs import Knobs
    from zenflow.step.step import Step


@dataclass(frozen=True, slots=True)
class DriveUse:
    """Use of a drive in one step."""

    read_bytes: int
    """Bytes of states that were read."""
    written_bytes: int
    """Bytes of states that were written."""
    worn: float | None
    """Fraction of the drive's warranty that its folder has used; None without a warranty."""


class Reporter:
    """Turns the facts of each step into its report, on a GPU while the next step is under way.

    Attributes:
        report: The newest finished report.
    """

    def __init__(self, device: AbstractDevice, stalls: StallClock) -> None:
        """Start the first step's clock."""
        self._device = device
        self._stalls = stalls
        self._end_of_step = device.timing_mark()
        self._finish_last: Callable[[], StepReport] | None = None
        self.report: StepReport | None = None

    def note(
        self,
        step: Step,
        landed: Sequence[PendingUpload],
        knobs: Knobs,
        topk_ratio: float,
        ages: list[int],
        curve: HostValues | None,
        weights: tuple[int, int] = (0, 0),
        drive: DriveUse | None = None,
    ) -> None:
        """Note a step's facts at its end, and finish the report of the step before.

        Args:
            step: The step; no reference to its gradients is kept.
            landed: Updates that landed in the step.
            knobs: Knobs in force during the step.
            topk_ratio: Ratio of the layout during the step.
            ages: Number of gradients in each block's window, of `ControllerProbes.read`.
            curve: Values of the energy curve, of `ControllerProbes.read`; None in a step without.
            weights: Bytes of streamed weights that have come, and gone home, since the last step.
            drive: Use of the drive since the last step; None without a drive.
        """
        self.resolve()
        start, end = self._end_of_step, self._device.timing_mark()
        known = partial(
            StepReport,
            step=step.number,
            d2h_bytes=step.gradients.num_bytes + weights[1],
            h2d_bytes=sum(update.num_bytes for update in landed) + weights[0],
            weights_d2h_bytes=weights[1],
            weights_h2d_bytes=weights[0],
            drive_read_bytes=0 if drive is None else drive.read_bytes,
            drive_written_bytes=0 if drive is None else drive.written_bytes,
            drive_worn=None if drive is None else drive.worn,
            starved=step.gradients.starved,
            staleness=max((step.number - update.opened for update in landed), default=0),
            update_interval=knobs.update_interval,
            lag=step.lag,
            topk_ratio=topk_ratio,
            select_interval=knobs.select_interval,
            learning_rates=tuple(hyper.lr for hyper in step.hypers),
        )
        number, values, waits = step.number, step.values, self._stalls.take()
        inverse_scale = step.inverse_scale

        def finish() -> StepReport:
            factor, norm, important, total, *norms = values.get()
            check_finite(norm, number, self._device)
            stalls = self._stalls.resolve(waits, number)
            return known(
                seconds=self._device.seconds_of(end) - self._device.seconds_of(start),
                stall_seconds=sum(stalls.values()),
                stalls=stalls,
                captured_energy=important / total if total > 0 else 1.0,
                grad_norm=norm,
                clip_factor=min(1.0, factor / inverse_scale),
                windows=window_norms(ages, norms),
                energy_curve=None if curve is None else energy_curve(curve.get()),
            )

        self._finish_last = finish
        self._end_of_step = end
        if self._device.is_synchronous:
            self.resolve()

    def resolve(self) -> None:
        """Finish the last step's report; on a GPU this waits until the device has passed it.

        Raises:
            NormError: The step's gradient norm is not finite. Every call raises it until another
                state is loaded, since the weights may hold the gradient.
        """
        if self._finish_last is not None:
            self.report = self._finish_last()
            self._finish_last = None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the report that the controller has not seen yet; None if it has seen all."""
        if self._device.is_synchronous or self.report is None:
            return None
        return self.report.to_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take up a report that `state_dict` returned, for the next decision."""
        self._finish_last = None
        self._end_of_step = self._device.timing_mark()
        self.report = None
        if state is not None and not self._device.is_synchronous:
            self.report = StepReport.from_dict(state)


def check_finite(norm: float, step: int, device: AbstractDevice) -> None:
    """Refuse gradients that no rule can use.

    Raises:
        NormError: The norm is not finite; the message has the remedy.
    """
    if math.isfinite(norm):
        return
    remedy = (
        "no step was taken, and the true weights are as before: skip this batch with zero_grad(), "
        "or lower the learning rate"
        if device.is_synchronous
        else "weights may hold it: resume from the last checkpoint with a lower learning rate"
    )
    error = NormError(
        f"the gradient norm of step {step} is {norm}: it must be finite, and so must its square "
        f"in float32, in which AdamW keeps the second moments; {remedy}. With "
        'float16 use torch.amp.GradScaler and offload_gradients="keep"'
    )
    error.step, error.norm, error.is_late = step, norm, not device.is_synchronous
    raise error
