"""Closed forms of the engine's schedule: steps in turn, and steps that overlap the host's work.

They hold in release mode, where nothing slows anything else down and the host keeps up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.closed_forms.parts import (
    Array,
    Jobs,
    Released,
    RingJobs,
    WindowPhase,
    served,
    windows_of,
)
from sim.closed_forms.step import Axes, Steady, StepTimes
from sim.simulate import selects_every
from sim.timing.block_plan import structure_of
from sim.timing.costs import StepCosts
from sim.timing.fresh_steps import late_bytes, measured_bytes, moved_bytes
from zenflow.config import ZenFlowConfig

EXACT = 1 + 1e-9
"""Factor by which rounding may raise a time."""


class EngineTimes(StepTimes):
    """The formulas for one model and one setting of the engine."""

    def __init__(self, costs: StepCosts, config: ZenFlowConfig) -> None:
        """Prepare what no machine changes."""
        super().__init__(costs)
        self._config = config
        self._interval = selects_every(config)
        self._adds = not config.is_exact
        windows = windows_of(structure_of(costs, config))
        self._plan, self._phases, self._moved = windows.plan, windows.phases, windows.moved
        shares = self._plan.shares[::-1]
        self._grads = np.array([float(s.deferred * costs.dtype_bytes) for s in shares])
        overheads = costs.hardware.overheads
        copy = overheads.copy.value + costs.hardware.link.latency.value
        self._ring = RingJobs.of(self._grads, copy, self._plan.ring)
        late = late_bytes(config, costs.dtype_bytes, is_packed=True, is_cpu=False)
        late_seconds = late / costs.dtype_bytes / costs.elementwise_bandwidth
        self._unpack_rate = 1.0 / (1.0 / self._scatter_rate + late_seconds)
        self._uploads = [Jobs.of(p.uploads, copy, self._unpack_rate) for p in self._phases]

    def in_turn(self, axes: Axes) -> Steady:
        """Return steps without overlap: updates start as copies arrive; one upload ends a step."""
        step = self._released(axes)
        stepped, copied = step.stepped, step.copied
        (phase,) = self._phases
        tasks = self.host_seconds(phase.update, axes)
        ready = np.maximum(copied, stepped[:, None])
        done = served(ready, tasks)[:, -1]
        total = phase.uploads.sum(keepdims=True)
        upload = self.copy_seconds(total, axes["h2d"], self._unpack_rate)[:, 0]
        stall = done - stepped + upload
        alone = copied[:, -1] <= stepped
        rates = self.rates
        used = rates.host_sharing * axes["host"] + rates.sharing * axes["d2h"]
        room = used <= axes["dram"]
        applies = self.copies_are_free(axes, both_ways=False) & (alone | room) & step.is_free
        selection = np.zeros_like(stall)
        if self._interval and (chosen := phase.selected > 0).any():
            # No update of a block that selects begins before all that do have their gradients.
            selected = ready[:, chosen].max(axis=1) + self._selecting(phase)
            others = np.where(chosen, 0.0, tasks)
            applies &= (others.sum(axis=1) == 0) | (served(ready, others)[:, -1] <= selected)
            after = selected + np.where(chosen, tasks, 0.0).sum(axis=1)
            selection = (after - done) / self._interval
        return Steady(
            stepped + stall + selection, stall + step.pressed + selection, selection, applies
        )

    def overlapped(self, axes: Axes, *, is_least: bool) -> Steady:
        """Steady step when host and links keep up with backward: only the last uploads can stall.

        Args:
            axes: What differs from machine to machine.
            is_least: Whether selections are to wait as little as they can for the host, or as
                long as they may.
        """
        step = self._released(axes)
        passed, stepped, copied = step.passed, step.stepped, step.copied
        config = self._config
        is_fused = config.effective_lag() == 1
        applies = self.copies_are_free(axes, both_ways=True) & step.is_free
        applies &= self._uploads_leave_in_time(axes, step)
        stalls = [
            np.maximum(0.0, uploads.ended(passed, axes["h2d"]) - stepped)
            for uploads in self._uploads
        ]
        selection = np.zeros_like(stepped)
        for index, uploads in enumerate(self._uploads):
            before, end = self._phases[index - 1], stepped + stalls[index - 1]
            ends = [(stepped, end)]  # from which on the host works, and the step's own
            if self._interval and before.selected.any():
                selected = self._selected(before, axes, step, end, is_least=is_least)
                selection += (selected - end) / self._interval
                ends.append((selected, selected))
            for begun, ended in ends:
                done = self._host_done(before, axes, begun, copied, is_fused)
                free = done - ended[:, None]
                # A gradient whose place on the host is free late would hold backward up.
                applies &= ((free <= step.begun) | (self._grads == 0)).all(axis=1)
                if is_fused:
                    delayed = uploads.ended(np.maximum(passed, free), axes["h2d"])
                    applies &= delayed <= (stepped + stalls[index]) * EXACT
        if not is_fused:
            applies &= self._keeps_up(axes, stepped, copied, config)
        mean: Array = np.mean(stalls, axis=0) + selection
        return Steady(stepped + mean, mean + step.pressed, selection, applies)

    def _selecting(self, phase: WindowPhase) -> float:
        """Return the seconds in which a step's blocks choose columns and hand them over."""
        return float(phase.selected.sum()) * self.costs.hardware.overheads.select.value

    def _selected(
        self, phase: WindowPhase, axes: Axes, step: Released, end: Array, *,
        is_least: bool,
    ) -> Array:  # fmt: skip
        """Return the end of a step that selects, which ends at ``end`` otherwise, (N,).

        The device waits until the gradients of all blocks that select are on the host; under the
        published rule until they have been added up, too, which bounds are known for only.
        """
        chosen = phase.selected > 0
        ready = step.copied
        adds = phase.intake.num_bytes > 0
        if self._adds and (adds & chosen).any():
            if is_least:
                lengths = self.host_seconds(phase.intake, axes)
                added = served(np.maximum(ready, step.stepped[:, None]), lengths)
            else:
                added = self._host_done(phase, axes, step.stepped, ready, is_fused=False)
            ready = np.where(adds, np.maximum(ready, added), ready)
        selected: Array = np.maximum(end, ready[:, chosen].max(axis=1)) + self._selecting(phase)
        return selected

    def _uploads_leave_in_time(self, axes: Axes, step: Released) -> NDArray[np.bool_]:
        """Return whether the ring never waits for an upload that reads from it, (N,)."""
        in_time = np.ones(len(step.stepped), bool)
        # Uploads read the tails: that of segment l is copy 2 l + 1.
        (waiting,) = np.nonzero(self._ring.room >= 1)
        if not len(waiting):
            return in_time
        last = (self._ring.room[waiting] - 1) // 2
        going_on = step.passed.copy()
        going_on[:, -1] += step.pressed
        for phase in self._phases:
            lengths = self.copy_seconds(phase.uploads, axes["h2d"], self._unpack_rate)
            ended = served(step.passed, lengths)[:, last]
            in_time &= (ended <= going_on[:, waiting] * EXACT).all(axis=1)
        return in_time

    def _host_done(
        self,
        phase: WindowPhase,
        axes: Axes,
        stepped: Array,
        copied: Array,
        is_fused: bool,
    ) -> Array:
        """Return the latest end of the host's work on each segment of a step, (N, L).

        It takes each segment's gradients in, and updates what is due there. Each byte that is
        copied meanwhile, the rest of this step's and the next one's, costs it a byte of DRAM at
        most.
        """
        intake = self.host_seconds(phase.intake, axes)
        copies = 2 * (self._grads.sum() + phase.uploads.sum())
        lost = copies / np.minimum(axes["host"], axes["dram"] / self.rates.host_sharing)
        start = np.maximum(copied[:, -1], stepped) + lost
        if is_fused:
            intake = intake + self.host_seconds(phase.update, axes)
        done: Array = start[:, None] + np.cumsum(intake, axis=1)
        return done

    def _keeps_up(
        self, axes: Axes, stepped: Array, copied: Array, config: ZenFlowConfig
    ) -> NDArray[np.bool_]:
        """Return whether updates with a lag of several steps end in time despite intake, (N,)."""
        lag = config.effective_lag()
        intake = sum(self.host_seconds(p.intake, axes).sum(axis=1) for p in self._phases)
        update = sum(self.host_seconds(p.update, axes).sum(axis=1) for p in self._phases)
        mean_intake = intake / len(self._phases)
        late = np.maximum(copied[:, -1] - stepped, 0.0)
        copies = self._grads.sum() + max(phase.uploads.sum() for phase in self._phases)
        rate = np.minimum(axes["host"], axes["dram"] / self.rates.host_sharing)
        lost = (lag + 1) * copies / rate
        enough: NDArray[np.bool_] = late + lost + update + (lag + 1) * mean_intake <= lag * stepped
        return enough

    @property
    def _scatter_rate(self) -> float:
        overheads = self.costs.hardware.overheads
        return (overheads.unpack_bandwidth or overheads.pack_bandwidth).value

    def _released(self, axes: Axes) -> Released:
        """Return the ends of a step's parts whose gradients leave through the ring."""
        overheads, size = self.costs.hardware.overheads, self.costs.dtype_bytes
        shares = self._plan.shares[::-1]
        intake = np.array([s.split * size / overheads.intake_bandwidth.value for s in shares])
        moved = np.array([float(elements) for elements in self._moved[::-1]]) * moved_bytes(size)
        moved += [s.split * measured_bytes(self._plan.config, size) for s in shares]
        intake += moved / self.costs.elementwise_bandwidth
        passed = self.passed(axes, intake + self._grads / overheads.pack_bandwidth.value)
        start = self.costs.accumulation * axes["forward"]
        start = start + (self.costs.accumulation - 1) * axes["backward"]
        begun = np.concatenate([start[:, None], passed[:, :-1]], axis=1)
        ended = self._ring.ended(begun, passed, axes["d2h"])
        waits = np.where(self._ring.room >= 0, ended[:, self._ring.room], -np.inf)
        pressed = np.maximum(0.0, waits[:, -1] - passed[:, -1])
        rate = overheads.column_update or overheads.device_update
        seconds = overheads.step.value + self._plan.important / rate.value
        seconds += self._plan.resident / overheads.device_update.value
        return Released(
            begun=begun,
            passed=passed,
            stepped=passed[:, -1] + pressed + seconds,
            copied=np.maximum.accumulate(ended[:, 1::2], axis=1),
            pressed=pressed,
            is_free=np.all(waits[:, :-1] <= passed[:, :-1] * EXACT, axis=1),
        )
