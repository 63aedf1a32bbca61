"""Engine: one step of the update rule, from gradients to landed weights.

Every wait is a stall with a cause. No decision depends on the clock: results follow from data,
configuration and the controller's decisions only.

docs/engine.md tells the life of a gradient, with the module of each part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.in_flight import PendingUpload, UpdatesInFlight
from zenflow.columns.layout import Block, Layout, SplitParam
from zenflow.columns.resizing import resize
from zenflow.columns.training_weights import TrainingWeights
from zenflow.columns.upload_pool import UploadPool
from zenflow.config import ZenFlowConfig
from zenflow.controller import AbstractController
from zenflow.device.base import AbstractDevice, Arrival
from zenflow.device.stalls import StallClock
from zenflow.drive.lane import DriveLane
from zenflow.host.pool import HostPool
from zenflow.host.process import OwnProcess
from zenflow.lanes.completion import unique, wait_all
from zenflow.lanes.copies import CopyLane, PacedDirection
from zenflow.lanes.host_worker import HostWorker
from zenflow.rule.adamw import Hyper
from zenflow.rule.calendar import WindowCalendar
from zenflow.step.controller_probes import ControllerProbes
from zenflow.step.decisions import Decisions
from zenflow.step.device_step import measure, move_scores, resident_grads_of, update_device
from zenflow.step.fresh.steps import FreshSteps
from zenflow.step.gradients.collector import GradientCollector
from zenflow.step.gradients.ring import GradientRing
from zenflow.step.host.changed import ChangedUploads
from zenflow.step.host.rules import make_tasks
from zenflow.step.host.schedule import HostSchedule
from zenflow.step.host.tasks import Window
from zenflow.step.options import EngineOptions
from zenflow.step.reporter import DriveUse, Reporter, check_finite
from zenflow.step.same_gradients import SameGradients
from zenflow.step.step import Step
from zenflow.step.uploads import UploadGate
from zenflow.streaming.stream import WeightStream
from zenflow.streaming.transfers import Transfers
from zenflow.trace.recorder import Recorder
from zenflow.trace.timeline import Timeline

POOL_CALLERS = 2
"""Number of Python threads that call the pool: one prepares a call while the other's runs."""


class Engine:
    """The parts of the optimizer at work: collector, calendar, lanes, host threads.

    Attributes:
        step: Number of steps taken so far.
        under_way: Step under way; None until its first gradient comes in, or `finish_step`.
        in_flight: Updates in flight.
        windows: Open window of each block, by the block's index.
        process: The process that has its threads.
        transfers: Lanes of weights and sums that wait on the host; None where none do.
    """

    def __init__(
        self,
        layout: Layout,
        config: ZenFlowConfig,
        device: AbstractDevice,
        controller: AbstractController,
        options: EngineOptions,
        *,
        hypers: Callable[[], Sequence[Hyper]],
        largest_interval: int,
        ending: ExitStack,
        stream: WeightStream | None = None,
        drive: DriveLane | None = None,
    ) -> None:
        """Start lanes and host threads.

        Args:
            layout: Places of all parameters.
            config: Settings of the update rule.
            device: Device that the parameters are on.
            controller: Chooses the knobs.
            options: How the engine runs; the number of host threads is known.
            hypers: Function that returns AdamW's present settings of each parameter group.
            largest_interval: Largest S to allocate for.
            ending: Gets a callback to end each thread, so that all end if a later start fails.
            stream: Stream of the weights that visit the device; None where all stay there.
            drive: Lane of the drive that the host's states are on; None where memory has them.
        """
        self.layout = layout
        self.config = config
        self.device = device
        self.options = options
        self._ending = ending
        self.process = OwnProcess()
        self.step = 0
        self.under_way: Step | None = None
        self.in_flight = UpdatesInFlight()
        self.windows = [Window() for _ in layout.blocks]
        self._hypers = hypers
        self.calendar = WindowCalendar(config, [block.shape for block in layout.blocks])
        self.decisions = Decisions(controller, layout, self.calendar)
        self.probes = ControllerProbes(controller, layout, device, self.windows)
        self.recorder = Recorder(options.timeline_steps, device.seconds_of)
        self.drive = drive
        self.stalls = self._stall_clock()
        self.reporter = Reporter(device, self.stalls)
        self.stream = stream
        self._start_lanes()
        self._start_host(options.host_threads or 1, largest_interval)
        memories = [layout.slabs.staging, *self.schedule.tasks.pools]
        self.training = TrainingWeights(layout.splits, memories)
        self.fresh: FreshSteps | None = None
        if config.is_exact and layout.splits:
            self.fresh = FreshSteps(
                *(layout, self.calendar, device),
                packs=self._packs,
                divides=config.is_factored,
                rounds_gradients=config.rounds_gradients,
                still=frozenset() if self.changed is None else self.changed.still,
            )
        self.gate = UploadGate(
            *(device, self.h2d, self.stalls, self.calendar, options.wait_timeout),
            *(layout.gather, self.in_flight, self.fresh),
        )
        self.ring = self._gradient_ring() if self._packs else None
        self.same: SameGradients | None = None
        if layout.shares.group is not None and not options.releases:
            self.same = SameGradients(layout.shares, device)
        self.collector = GradientCollector(
            device,
            layout,
            self.d2h,
            self.schedule.tasks.stage,
            self.gate,
            self.fresh,
            self.probes.sketch,
            self.ring,
            partial(self.stalls.waiting, "d2h"),
        )

    def _stall_clock(self) -> StallClock:
        """Return the clock of stalls, which tells the host's waits for a drive from its work."""
        if self.drive is None:
            return StallClock(self.device, self.recorder)
        self.drive.recorder = self.recorder
        return StallClock(self.device, self.recorder, self.drive.starved_seconds)

    def _start_lanes(self) -> None:
        """Start the lanes of both directions, and those of weights and sums that wait at home.

        Lanes end last: a copy may wait for a host task, which fails when the worker ends.
        """
        link = self.options.link
        h2d = PacedDirection(link.h2d_bytes_per_second) if link else None
        d2h = PacedDirection(link.d2h_bytes_per_second) if link else None
        self.h2d, self.d2h = self._lane("h2d", "params", h2d), self._lane("d2h", "grads", d2h)
        self.transfers: Transfers | None = None
        if self.stream is not None:
            self.transfers = self.stream.transfers
            pages = self.layout.pages
            self.stream.write_newer({p: partial(_write_important, s) for p, s in pages.items()})
        elif self.options.offload_sums:
            self.transfers = Transfers(self.device, wait_timeout=self.options.wait_timeout)
            self._ending.callback(self.transfers.close)
        if self.transfers is not None:
            waiting = partial(self.stalls.waiting, "weights")
            self.transfers.work_for(self.recorder, waiting, up=h2d, down=d2h)

    def _gradient_ring(self) -> GradientRing:
        """Return the device memory that packed gradients leave from."""
        rows = [(split.slot_width, split.slab_rows.staging) for split in self.layout.splits]
        sizes = [(len(staging), width * staging.itemsize) for width, staging in rows]
        return GradientRing(self.device, sizes, wait_timeout=self.options.wait_timeout)

    def _start_host(self, num_threads: int, largest_interval: int) -> None:
        """Start the host's threads, and allocate the upload buffers."""
        callers = min(POOL_CALLERS, num_threads)
        has_work = bool(self.layout.splits)
        self.host_threads = num_threads if has_work else 0
        self.pool = HostPool.open(num_threads - callers) if has_work else None
        if self.pool is not None:
            self._ending.callback(self.pool.close)
        num_workers = num_threads if self.pool is None else callers
        self.worker = HostWorker(self.recorder, self.device.enter_thread)
        self._ending.callback(self.worker.close)
        if has_work:
            self.worker.start(num_workers)
        self.uploads = UploadPool(
            *(self.device, self.config, self.layout.blocks, self.calendar),
            self.options.wait_timeout,
        )
        self.changed: ChangedUploads | None = None
        if self.config.uploads_changes:
            self.changed = ChangedUploads(self.layout)
        parts = (
            *(self.layout, self.calendar, self.worker, self.pool),
            *(self.uploads, self.in_flight, self.windows),
        )
        tasks = make_tasks(
            parts,
            config=self.config,
            device=self.device,
            largest_interval=largest_interval,
            changed=self.changed,
        )
        self.schedule = HostSchedule(
            *(self.layout, self.config, self.calendar, tasks, self.device),
            *(self.options.wait_timeout, self.changed),
        )

    def _lane(self, name: str, span_name: str, paced: PacedDirection | None) -> CopyLane:
        lane = CopyLane(
            name,
            span_name,
            self.recorder,
            paced=paced,
            wait_timeout=self.options.wait_timeout,
            enter_thread=self.device.enter_thread,
        )
        self._ending.callback(lane.close)
        if self.layout.splits:
            lane.start()
        return lane

    @property
    def may_write_states(self) -> bool:
        """Whether the host's states are this optimizer's: no checkpoint of a drive, not loaded."""
        return self.drive is None or self.drive.folder.is_claimed

    @property
    def _packs(self) -> bool:
        """Whether compute packs gradients into a ring."""
        return self.options.releases and self.device.has_ring

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has come in since the last step."""
        return self.under_way is not None and bool(self.under_way.gradients)

    def begin_step(self) -> Step:
        """Return the step under way; the first call begins it."""
        if self.under_way is None:
            number = self.step + 1
            self.under_way = Step(number=number, lag=self.calendar.lag(number))
            self.use(self._hypers(), 1.0)
        return self.under_way

    def use(self, hypers: Sequence[Hyper], inverse_scale: float) -> None:
        """Let the step under way have these settings.

        Where some weights have moved already, all fresh steps keep to the former settings.

        Args:
            hypers: AdamW's settings of each parameter group.
            inverse_scale: Factor that undoes the loss scale.
        """
        step = self.begin_step()
        if (step.hypers, step.inverse_scale) == (hypers, inverse_scale):
            return
        step.hypers, step.inverse_scale = hypers, inverse_scale
        if self.fresh is not None and not step.gradients.copied:
            self.fresh.begin(step, self.gate.landing(step.number))

    def take(
        self, place: SplitParam | Resident, grad: Tensor, *, at_once: bool, is_own: bool
    ) -> None:
        """Take a gradient into the step under way, as `GradientCollector.take` does."""
        step = self.under_way or self.begin_step()
        self.collector.take(step, place, grad, at_once=at_once, is_own=is_own)

    def measure_rest(self) -> None:
        """Measure all gradients that have come in."""
        self.collector.measure_rest(self.begin_step())

    def complete_step(self) -> Step:
        """Return the step under way, for which no more gradients come in."""
        step = self.begin_step()
        self.collector.complete(step)
        return step

    def abandon_step(self) -> None:
        """Forget the step under way; copies under way end in staging, which is overwritten."""
        self.under_way = None
        if self.ring is not None:
            self.ring.restart()

    @torch.no_grad()
    def discard(self) -> None:
        """Forget the gradients of the step under way, which will not be taken.

        Updates that land in the step may be on their way: the next forward waits for them. Weights
        that a fresh step has moved become the true ones: all gradients of steps that were taken.
        """
        step = self.begin_step()
        # A full bucket has moved weights, here as where no other rank has to be waited for.
        self.collector.send_added(step)
        self.abandon_step()
        self.schedule.tasks.drop(self.layout.blocks)
        self._undo(step.gradients.sent)

    @torch.no_grad()
    def drop(self, places: Collection[SplitParam | Resident]) -> None:
        """Drop these parameters' gradients from the step under way."""
        step = self.begin_step()
        self.collector.send_added(step)
        moved = self.collector.drop(step, places)
        splits = [place for place in places if isinstance(place, SplitParam)]
        self.schedule.tasks.drop([block for split in splits for block in split.blocks])
        self._undo(moved)

    def _undo(self, moved: Sequence[SplitParam]) -> None:
        """Write the true weights over those that a fresh step has moved."""
        self.gate.order_after_uploads(self.in_flight)
        if self.fresh is None or not moved:
            return
        self.drain()
        for split in moved:
            for update in map(self.in_flight.of, split.blocks):
                if update is not None:
                    self.in_flight.end(update)
            self.show_true(split)
            split.show_important()
            if self.changed is not None:
                self.changed.forget(split.blocks)

    def show_true(self, split: SplitParam) -> None:
        """Write a drained parameter's masters into its deferred columns on the device."""
        with split.held(changes=True):
            for columns, rows in split.host_pieces():
                arrival = Arrival(rows.weights(split.param.dtype), columns, split.weight())
                self.device.unpack([arrival], self.device.mark(), self.layout.gather)
                self.device.synchronize()  # the values are read until then

    def finish_step(self, max_norm: float | None) -> None:
        """Turn the gradients that came in into one step of the rule, by the settings of `use`.

        Args:
            max_norm: L2 norm to which the gradients are clipped together; None does not clip.

        Raises:
            GradientError: The gradient norm is not finite, or ranks have different gradients. On a
                CPU nothing has changed; on a GPU the error comes one step late and the optimizer
                can't go on.
            WorkerError: A copy or a host task failed.
        """
        started = self.device.timing_mark()
        step = self.begin_step()
        hypers, inverse_scale = step.hypers, step.inverse_scale
        gradients, number = step.gradients, step.number
        if self.same is not None:
            self.same.check()
        self.collector.complete(step)
        resident_grads = resident_grads_of(self.layout, gradients)
        measured = measure(
            self.layout,
            self.device,
            resident_grads,
            max_norm=max_norm,
            inverse_scale=inverse_scale,
            sketch=self.probes.watching,
        )
        step.values = measured.values
        if self.same is not None:  # before uploads begin: they meet other ranks too
            self.same.compare(measured.norm, number)
        if self.device.is_synchronous:
            check_finite(measured.values.get()[1], number, self.device)
        self.collector.send_rest(step)
        move_scores(self.layout, gradients, self.config.importance_decay, inverse_scale)
        # What launches nothing comes while the device has large kernels to run. Behind AdamW's
        # small ones it would soon have none.
        topk_ratio = self.layout.topk_ratio  # a selection may change it
        probed = self.probes.read(list(gradients.important), self.calendar.next_due, number)
        if self.fresh is not None:
            self.fresh.count(step)
        landed = self.gate.take_landings(number)
        selecting = self.schedule.begin(step)
        kernels = self.device.kernels
        applied = inverse_scale if self.config.is_factored else 1.0
        update_device(self.layout, gradients, resident_grads, hypers, measured, kernels, applied)
        if self.fresh is not None:
            self.fresh.finish(step, measured.factor)
        self.recorder.add("device", "step", started, self.device.timing_mark(), number)
        landed += self._land_and_select(step, landed, selecting)
        moved = (0, 0) if self.transfers is None else self.transfers.take_bytes(number)
        self.reporter.note(
            *(step, landed, self.calendar.knobs, topk_ratio, *probed, moved), self._wear()
        )
        self.recorder.forget_before(number)
        self.abandon_step()
        self.step = number
        if self.stream is not None:
            self.stream.end_step()
        self.decisions.ask(number, self.reporter.report)
        self.probes.follow()

    def _wear(self) -> DriveUse | None:
        """Return the drive's part in the step that ends; None without a drive."""
        if self.drive is None:
            return None
        tbw = self.options.drive_tbw
        worn = None if tbw is None else self.drive.folder.all_written_bytes / (tbw * 1e12)
        return DriveUse(*self.drive.take_bytes(), worn)

    def _land_and_select(
        self, step: Step, landed: Sequence[PendingUpload], selecting: Sequence[Block]
    ) -> list[PendingUpload]:
        """Wait for updates that land, and select; return further ones, of the step itself."""
        self.gate.wait(landed)
        if selecting:
            if self.same is not None:
                self.same.check()
            with self.stalls.waiting("select"):
                self.schedule.select(step, selecting)
        if step.lag > 0:
            return []
        self._start_all_uploads(step.number)
        at_once = self.gate.take_landings(step.number)
        self.gate.wait(at_once)
        return at_once

    def _start_all_uploads(self, step: int) -> None:
        """Queue all uploads that land in a step whose backward is over."""
        staying = [b for b in self.layout.blocks if b.split.page is None]
        self.gate.start_uploads(staying, self.device.mark(), step)
        for page, splits in reversed(self.layout.pages.items()):
            blocks = [block for split in reversed(splits) for block in split.blocks]
            if self.gate.awaited(blocks, step):
                with page.held(changes=True):
                    self.gate.start_uploads(blocks, self.device.mark(), step)
                page.stream.send_home(page)

    @property
    def timeline(self) -> Timeline:
        """Spans of the last steps; on a GPU this waits for their events."""
        emulated = self.d2h.paced is not None
        device = str(self.device.torch_device)
        return self.recorder.timeline(
            {
                "source": "measured",
                "device": device,
                "emulated_link": emulated,
                "started_at": self.recorder.started_at,
            }
        )

    def resize(self, topk_ratio: float) -> None:
        """Lay drained blocks out for another ratio k; gradients in open windows are lost.

        Called before a state is loaded.
        """
        resize(self.layout, topk_ratio, self.config.hysteresis)
        self.schedule.tasks.renew()
        self.calendar.open_all([block.shape for block in self.layout.blocks], self.step)

    def drain(self) -> None:
        """Apply all gradients that wait: the host's state is then that of the last step's end."""
        blocks = self.layout.blocks
        self.schedule.tasks.flush(blocks)
        # Copies nothing waits for too: those of gradients that were dropped end in staging.
        users = self.schedule.tasks.users_of(blocks)
        wait_all(unique([self.d2h.last, self.h2d.last, *users]), self.options.wait_timeout)
        self.device.synchronize()

    def close(self) -> None:
        """End all threads; queued work that has not started is dropped.

        A forked process has no threads and copies of closed locks: there the call does nothing.
        """
        if self.process.is_here:
            self._ending.close()


def _write_important(splits: Sequence[SplitParam]) -> None:
    for split in splits:
        split.write_important()
