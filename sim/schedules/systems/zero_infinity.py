"""Optimizer state on NVMe drives (Rajbhandari et al. 2021, section 5): ZeRO-Infinity's update.

Gradients leave inside backward and wait in host memory. Then the state passes through it tile by
tile: master and both moments are read, updated and written back, while other tiles are read and
written, as many at once as there are buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import simpy

from sim.machine import Machine
from sim.memory_parts import STATE_BYTES, Part, SystemCase, SystemParts
from sim.schedules.schedule import AbstractSchedule, Step, System, refuse_below_1
from sim.timing.costs import StepCosts
from zenflow.errors import ConfigError


class ZeroInfinity(AbstractSchedule):
    """ZeRO-Offload whose update reads its state from the drives and writes it back.

    Weights go up tile by tile. Writes of a step's last tiles run on behind the next forward: what
    reads them, or needs their buffers, waits. Each device has its own tiles (ZeRO-2), and all
    devices share the drives.
    """

    def __init__(
        self, machine: Machine, costs: StepCosts, *, tile: int = 1 << 25, buffer_count: int = 3
    ) -> None:
        """Cut each device's state into tiles.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            tile: Elements that are read, updated and written together.
            buffer_count: Tiles that host memory holds at once. With 1 nothing overlaps, with 3 one
                is read, one updated and one written at the same time.

        Raises:
            ConfigError: The machine has no drives, or an option is below 1.
        """
        super().__init__(machine, costs)
        if machine.hardware.nvme is None:
            raise ConfigError(
                "published_zero_infinity keeps optimizer state on NVMe drives and "
                f"{machine.hardware.name} has none: add nvme to the profile, or take "
                "published_zero_offload"
            )
        refuse_below_1("buffer_count", buffer_count)
        self._sizes = self.pieces("tile", tile)
        # A read waits for its own tile's last write, and for the one that frees its buffers.
        self._waits_for = sorted({len(self._sizes), buffer_count})
        self._written: deque[simpy.Event] = deque(maxlen=self._waits_for[-1])

    def _step(self, step: int) -> Step:
        machine = self.machine
        copied = self.send(self.compute(step), step, self.costs.dtype_bytes)
        yield machine.compute("step", self.step_overhead, step)
        since = machine.env.now
        yield from self.wait(copied, "d2h", step)
        tiles = list(self._update(step))
        for read, updated, _ in tiles:
            yield from self.wait([read], "nvme", step)
            yield from self.wait([updated], "host", step)
        *_, last_uploaded = tiles[-1]
        yield from self.wait([self.gather(step, last_uploaded)], "h2d", step)
        return since

    def _update(self, step: int) -> Iterator[tuple[simpy.Event, simpy.Event, simpy.Event]]:
        """Queue every tile's way through the update; yield when it is read, updated, uploaded."""
        machine, size = self.machine, self.costs.dtype_bytes
        for elements in self._sizes:
            state, written = elements * STATE_BYTES, self._written
            before = [written[-ago] for ago in self._waits_for if ago <= len(written)]
            read = machine.nvme_read.submit("state", step, machine.from_drives(state), before)
            work = machine.host_work(elements * (2 * STATE_BYTES + 2 * size))
            updated = machine.host.submit("adam", step, work, [read])
            write = machine.to_drives(state)
            written.append(machine.nvme_write.submit("state", step, write, [updated]))
            uploaded = machine.h2d.submit("params", step, machine.up(elements * size), [updated])
            yield read, updated, uploaded


def _memory(case: SystemCase) -> SystemParts:
    """Return tiles in host memory and state on the drives (Rajbhandari et al. 2021, section 5)."""
    tile = min(case.params / case.total, case.options["tile"])
    tiles = float(case.options["buffer_count"] * tile * case.count)
    host = [
        Part("gradients", "pinned", case.size * case.hosted),
        Part("tiles of state", "pinned", STATE_BYTES * tiles),
        Part("tiles of weights", "pinned", case.size * tiles),
        Part("optimizer state", "nvme", STATE_BYTES * case.hosted),
    ]
    return case.device(), host


PUBLISHED_ZERO_INFINITY = System(
    name="published_zero_infinity", rule="AdamW exactly", schedule=ZeroInfinity, memory=_memory
)
