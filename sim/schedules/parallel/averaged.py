"""The engine's schedule under DDP: each rank has all weights, and its host some deferred elements.

Gradients are averaged bucket by bucket behind backward. In release mode a bucket is taken when
backward hands the next one over, and the last one when backward ends, as the communication hook of
`zenflow.surface.data_parallel` does it. The device measures and moves all of it, and sends its own
part. In keep mode all of that waits for `step()`. New weights go up in parts, which an all-gather
in the lane of uploads completes. It has a communicator of its own: no average waits for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import simpy

from sim.machine import Machine
from sim.schedules.parallel.ddp import buckets_of
from sim.schedules.zenflow import EngineSchedule, Landing
from sim.timing.costs import StepCosts
from sim.timing.framework import ddp_hooks
from zenflow.config import ZenFlowConfig

_Averaged = tuple[list[int], simpy.Event]
"""Indices of a bucket's segments, and the end of its average."""
_PASSES_OF_GATHERED = 2
"""Number of times that the device writes columns which it has gathered: once put together, once
into the weights."""


class AveragedEngineSchedule(EngineSchedule):
    """The engine's rule on averaged gradients, with the host's part divided among devices."""

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        config: ZenFlowConfig,
        *,
        releases: bool = True,
        bucket_bytes: int | None = None,
        **settings: Any,
    ) -> None:
        """Lay out the blocks and DDP's buckets.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            config: The update rule's settings.
            releases: Whether gradients leave during backward, or at ``step()``.
            bucket_bytes: Bytes at which a bucket is full; None is DDP's default.
            settings: As of `EngineSchedule`.
        """
        costs = ddp_hooks(costs, in_buckets=releases)
        super().__init__(machine, costs, config, releases=releases, **settings)
        self._buckets = buckets_of(costs, bucket_bytes)

    def _compute(self, step: int) -> list[simpy.Event]:
        """Queue forward and backward in release mode; return what the step waits for."""
        ended, room = self._passes_before_the_last(step), list[simpy.Event]()
        waiting: _Averaged | None = None
        for bucket in self._buckets:
            self._waits.watch(ended, [("d2h", room)], step)
            after, room = [ended, *room], []
            for index in bucket:
                ended = self.backward_of(index, step, after=after)
            average = self._average(bucket, step, ended)
            if waiting is not None:
                ended, room = self._take(waiting, step, ended, room)
            waiting = bucket, average
        assert waiting is not None
        ended, room = self._take(waiting, step, ended, room)
        self._waits.watch(ended, [("d2h", room)], step)
        return [ended, *room]

    def _keep(self, step: int) -> list[simpy.Event]:
        """Queue forward and backward in keep mode; return the ends of all averages."""
        self._passes_before_the_last(step)
        averages = []
        for bucket in self._buckets:
            for index in bucket:
                self.computed = self.backward_of(index, step)
            averages.append(self._average(bucket, step, self.computed))
        return averages

    def _passes_before_the_last(self, step: int) -> simpy.Event:
        """Queue all but the last backward, whose gradients alone are averaged."""
        for _ in range(self.costs.accumulation - 1):
            self.forward(step)
            self.backward(step)
        return self.forward(step)

    def _average(self, bucket: list[int], step: int, passed: simpy.Event) -> simpy.Event:
        """Queue the all-reduce of a bucket's gradients, two passes of a ring; return its end."""
        size = sum(self.costs.segments[index].numel for index in bucket) * self.costs.dtype_bytes
        return self.machine.collective("reduce", 2.0 * size, step, passed)

    def _take(
        self, averaged: _Averaged, step: int, ended: simpy.Event, room: list[simpy.Event]
    ) -> tuple[simpy.Event, list[simpy.Event]]:
        """Queue what becomes of a bucket's averages on the device.

        Args:
            averaged: The bucket.
            step: The step.
            ended: The end of the device's work before.
            room: What else the device waits for: room in the ring.

        Returns:
            The end of the device's work, and what its next work waits for.
        """
        bucket, average = averaged
        begun: simpy.Event = self.machine.env.all_of([ended, average])
        for index in bucket:
            self._waits.watch(ended, [("d2h", room), ("reduce", [average])], step)
            seconds = self._taken[index]
            ended = self.machine.compute("backward", seconds, step, [average, *room])
            room = self._send(index, step, ended, begun)
            begun = ended
        return ended, room

    def _upload(
        self, landings: list[Landing], step: int, after: list[simpy.Event]
    ) -> list[simpy.Event]:
        """Queue one copy of all these updates' parts, and the all-gather of all devices' parts."""
        uploaded = super()._upload(landings, step, after)
        if not uploaded:
            return []
        machine = self.machine
        whole = self._division.host * sum(item.num_bytes for item in landings)
        work = machine.ring_work(whole)
        seconds = work.seconds + _PASSES_OF_GATHERED * whole / machine.unpack_rate
        work, lane, before = replace(work, seconds=seconds), machine.h2d, uploaded
        if machine.hardware.device.is_cpu:  # whose lane gathers, and then waits for the link
            lane, before = machine.fabric, [*after, *(item.computed for item in landings)]
        gathered = machine.env.all_of([*uploaded, lane.submit("all-gather", step, work, before)])
        for item in landings:
            item.uploaded = gathered
        return [gathered]
