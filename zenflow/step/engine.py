"""Engine: one step of the update rule, from gradients to landed weights.

Every wait is a stall with a cause. Nothing here decides by the clock: what is computed depends on
data, configuration and the controller's decisions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from zenflow.columns.host_rows import UploadPool, upload_bytes
from zenflow.columns.layout import Bucket, Layout
from zenflow.columns.resize import resize
from zenflow.config import ZenFlowConfig
from zenflow.controller import AbstractController
from zenflow.device.base import AbstractDevice
from zenflow.device.stalls import StallClock
from zenflow.errors import ConfigError
from zenflow.host.pool import HostPool
from zenflow.knobs import Knobs
from zenflow.lanes.completion import wait_all
from zenflow.lanes.copies import CopyLane, PacedLink
from zenflow.lanes.host_worker import HostWorker
from zenflow.report import StepReport
from zenflow.rule.adamw import Hyper
from zenflow.rule.calendar import WindowCalendar
from zenflow.step.device_step import (
    Measured,
    measure,
    move_scores,
    resident_grads_of,
    update_device,
)
from zenflow.step.gauges import Gauges
from zenflow.step.gradient_ring import GradientRing
from zenflow.step.gradients import Intake, StepGradients
from zenflow.step.host_schedule import HostSchedule
from zenflow.step.reporter import Reporter, StepFacts, check_finite
from zenflow.step.uploads import LandingStrip, unique
from zenflow.trace.recorder import Recorder
from zenflow.trace.timeline import Timeline

POOL_CALLERS = 2
"""Number of Python threads that call the pool: one prepares a call while the other's runs."""


class Engine:
    """The parts of the optimizer at work: intake, calendar, lanes, worker.

    Attributes:
        step: Steps taken so far.
        decision_log: (step, knobs) of every change: they hold from the step after.
    """

    def __init__(
        self,
        layout: Layout,
        config: ZenFlowConfig,
        device: AbstractDevice,
        controller: AbstractController,
        *,
        num_timeline_steps: int,
        link: PacedLink | None,
        host_threads: int,
        wait_timeout: float,
        releases: bool,
    ) -> None:
        """Start lanes and worker; the optimizer has checked the arguments."""
        self.layout = layout
        self.config = config
        self.device = device
        self.controller = controller
        self.wait_timeout = wait_timeout
        self.step = 0
        self.decision_log: list[tuple[int, Knobs]] = []
        self.calendar = WindowCalendar(config, [block.shape for block in layout.blocks])
        self.recorder = Recorder(num_timeline_steps, device.seconds_of)
        self.stalls = StallClock(device, self.recorder)
        self.reporter = Reporter(device, self.stalls)
        callers = min(POOL_CALLERS, host_threads)
        self.pool = HostPool.open(host_threads - callers)
        num_threads = host_threads if self.pool is None else callers
        self.worker = HostWorker(num_threads, self.recorder, device.enter_thread)
        self.d2h = self._lane("d2h", "grads", link.d2h_bytes_per_second if link else None)
        self.h2d = self._lane("h2d", "params", link.h2d_bytes_per_second if link else None)
        self.uploads = UploadPool(device, self.upload_capacity())
        self.uploads.reserve(self.num_upload_buffers)
        self.strip = LandingStrip(device, self.h2d, self.stalls, self.calendar, wait_timeout)
        self.schedule = HostSchedule(
            layout,
            config,
            self.calendar,
            self.worker,
            self.pool,
            self.uploads,
            device,
            wait_timeout,
        )
        self.gauges = Gauges(controller, layout, device)
        self.ring = self._make_ring() if releases and device.has_ring else None
        self.intake = Intake(
            device,
            layout,
            self.d2h,
            self._bucket_passed,
            self.gauges.sketch,
            self.ring,
            partial(self.stalls.waiting, "d2h"),
        )

    def _make_ring(self) -> GradientRing:
        buffers = [split.room.staging for split in self.layout.splits]
        return GradientRing.for_buffers(self.device, buffers, wait_timeout=self.wait_timeout)

    def _lane(self, name: str, span_name: str, bytes_per_second: float | None) -> CopyLane:
        return CopyLane(
            name,
            span_name,
            self.recorder,
            bytes_per_second=bytes_per_second,
            wait_timeout=self.wait_timeout,
            enter_thread=self.device.enter_thread,
        )

    @property
    def num_upload_buffers(self) -> int:
        """Number of upload buffers in use at once in the long run: one a step in flight."""
        lag = self.calendar.lag(self.config.full_warm_up_rounds + 1)
        return lag if self.config.rolling else 1

    def upload_capacity(self) -> int:
        """Return the bytes of the largest boundary step whose updates land later."""
        if not self.config.overlap_step:
            return 0
        by_phase: dict[int, list[tuple[int, torch.dtype]]] = {}
        for block, phase in zip(self.layout.blocks, self.calendar.phases(), strict=True):
            size = (block.shape.deferred_elements, block.split.param.dtype)
            by_phase.setdefault(phase, []).append(size)
        return max((upload_bytes(sizes) for sizes in by_phase.values()), default=0)

    def _bucket_passed(self, bucket: Bucket, mark: Any) -> None:
        self.strip.release(bucket.blocks, mark, self.step + 1)

    def discard(self) -> None:
        """Forget the gradients of the step under way, which will not be taken.

        What lands in it may be on its way into the weights: the next forward waits for that.
        """
        self.intake.discard()
        landings = [b.landing for b in self.layout.blocks if b.landing is not None]
        for completion in unique(landing.uploaded for landing in landings):
            completion.wait_set(self.wait_timeout)
            self.device.order_after(completion)

    def measure_in_place(self) -> None:
        """Measure the columns of gradients that are still in `.grad`."""
        for split in self.layout.splits:
            if split.param.grad is None:
                split.columns.energies.zero_()
            else:
                grad_OI = split.matrix(split.param.grad)
                self.device.column_energies(grad_OI, split.columns.energies)

    def finish_step(
        self, hypers: Sequence[Hyper], *, max_norm: float | None, inverse_scale: float
    ) -> None:
        """Turn the gradients that came in into one step of the rule.

        Raises:
            GradientError: The gradient norm is not finite. On a CPU nothing has changed; on a GPU
                the error comes one step late and the optimizer can't go on.
            WorkerError: A copy or a host task failed.
        """
        step = self.step + 1
        started = self.device.timing_mark()
        self.intake.complete()
        gradients = self.intake.gradients
        resident_grads = resident_grads_of(self.layout, gradients)
        measured = measure(
            self.layout,
            self.device,
            resident_grads,
            max_norm=max_norm,
            inverse_scale=inverse_scale,
            sketch=self.gauges.watching,
        )
        if self.device.is_synchronous:
            check_finite(measured.values.get()[1], step, self.device)
        self.intake.send_rest(step)
        move_scores(self.layout, gradients, self.config.importance_decay, inverse_scale)
        update_device(self.layout, gradients, resident_grads, hypers, measured)
        self.recorder.add("device", "step", started, self.device.timing_mark(), step)
        topk_ratio = self.layout.topk_ratio
        gauged = self.gauges.read(list(gradients.important), self.calendar.next_due, step)
        h2d_bytes, staleness = self._run_host(gradients, hypers, measured, step)
        self.reporter.note(
            StepFacts(
                step=step,
                measured=measured,
                d2h_bytes=gradients.num_bytes,
                h2d_bytes=h2d_bytes,
                staleness=staleness,
                topk_ratio=topk_ratio,
                knobs=self.calendar.knobs,
                lag=self.calendar.lag(step),
                learning_rates=tuple(hyper.lr for hyper in hypers),
                gauged=gauged,
            )
        )
        self.recorder.forget_before(step)
        self.intake.discard()
        self.step = step
        self._control(step)
        self.gauges.follow()

    def _run_host(
        self, gradients: StepGradients, hypers: Sequence[Hyper], measured: Measured, step: int
    ) -> tuple[int, int]:
        """Queue the host's work, land what is due, select; return (h2d bytes, staleness)."""
        blocks = self.layout.blocks
        landed = self.strip.collect(blocks, step)
        selecting = self.schedule.begin(gradients, hypers, measured.values, step)
        self.strip.wait(landed)
        if selecting:
            with self.stalls.waiting("select"):
                self.schedule.select(selecting, gradients, hypers, measured.values, step)
            self.uploads.capacity = self.upload_capacity()  # k may be another
        if self.calendar.lag(step) == 0:
            self.strip.release(blocks, self.device.mark(), step)
            at_once = self.strip.collect(blocks, step)
            self.strip.wait(at_once)
            landed += at_once
        num_bytes = sum(landing.num_bytes for landing in landed)
        return num_bytes, max((step - landing.opened for landing in landed), default=0)

    # ---- reports and control ----------------------------------------------------------------

    @property
    def report(self) -> StepReport | None:
        """What the last finished step did; on a GPU the one before it, so that nothing waits."""
        return self.reporter.report

    @property
    def timeline(self) -> Timeline:
        """Spans of the last steps; on a GPU this waits for their events."""
        emulated = self.d2h.bytes_per_second is not None
        device = str(self.device.torch_device)
        return self.recorder.timeline(
            {"source": "measured", "device": device, "emulated_link": emulated}
        )

    def _control(self, step: int) -> None:
        """Ask the controller. It gets the newest finished report: nothing waits for another."""
        former = self.calendar.knobs
        knobs = self.controller.next_knobs(step, self.report, former)
        if knobs == former:
            return
        try:
            self._check_possible(knobs)
            self.calendar.set_knobs(knobs, step)
        except ConfigError as error:
            raise ConfigError(
                f"{type(self.controller).__name__} chose {knobs} after step {step}, which can't "
                f"be: {error}"
            ) from error
        self.uploads.capacity = self.upload_capacity()
        self.decision_log.append((step, knobs))

    def _check_possible(self, knobs: Knobs) -> None:
        """Refuse a k that this layout can't take.

        Raises:
            ConfigError: It is one.
        """
        ratio, former = knobs.topk_ratio, self.calendar.knobs.topk_ratio
        if ratio == former:
            return
        if not (0 < ratio < 1 and 0 < former < 1):
            raise ConfigError(
                f"a topk_ratio that changes must stay between 0 and 1, got {ratio:g} after "
                f"{former:g}: 0 and 1 place parameters for good; start and stay in between"
            )
        if ratio < self.layout.least_topk_ratio:
            raise ConfigError(
                f"topk_ratio must be at least {self.layout.least_topk_ratio:g}, for which host "
                f"memory was laid out, got {ratio:g}: give the controller that least_topk_ratio"
            )

    def resize(self, topk_ratio: float) -> None:
        """Lay drained blocks out for another ratio; what is in their windows is lost.

        For a state that is about to be loaded.
        """
        resize(self.layout, topk_ratio, self.config.hysteresis, {}, 1.0)
        self.schedule.renew()
        self.calendar.open_all([block.shape for block in self.layout.blocks], self.step)

    # ---- waiting and ending -----------------------------------------------------------------

    def drain(self) -> None:
        """Wait for everything queued: host state is then that of the end of the last step."""
        blocks = self.layout.blocks
        # Copies nothing waits for too: those of gradients that were dropped end in staging.
        wait_all([self.d2h.last, self.h2d.last], self.wait_timeout)
        wait_all(unique(block.staging_free for block in blocks), self.wait_timeout)
        wait_all(unique(block.last_update for block in blocks), self.wait_timeout)
        self.device.synchronize()

    def close(self) -> None:
        """End all threads; queued work that has not started is dropped."""
        self.worker.close()
        self.d2h.close()
        self.h2d.close()
        if self.pool is not None and not self.worker.is_running:
            self.pool.close()
        self.device.close()
