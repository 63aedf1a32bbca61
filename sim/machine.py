"""Machine: a hardware profile turned into lanes and fluid resources, ready to run a schedule.

All devices of all hosts do the same at the same time, so one of them is simulated. A resource that
n devices share costs n times as much: with equal flows max-min fairness gives each the same.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import simpy

from sim.fluid import FlowKind, FluidNetwork, Resource
from sim.hardware.profile import HardwareProfile
from sim.lanes import HostLane, Recording, SerialLane, Work
from sim.starved import Starved

Process = Generator[simpy.Event, Any, None]

_FAULTING_THREADS = 4
"""Number of threads of one process whose page faults go on side by side. PyTorch's AdamW takes 7.3
of 14.8 s for 80 GB of temporaries on 48 cores (ZeRO-Offload, arXiv 2101.06840, table 4: 10 billion
parameters, less what its bytes take): that many threads' pages."""
_HOSTS = ("d2h", "host")
"""Causes of stalls behind which the host's work may be."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bandwidths that bound one device's share of the machine, bytes/s, as plain numbers."""

    d2h: float
    """Bandwidth of the link to the host, bytes/s."""
    h2d: float
    """Bandwidth of the link to the device, bytes/s."""
    duplex: float
    """Bandwidth of both directions together, bytes/s."""
    dram: float
    """Bandwidth of the host memory that the device uses, for all its users, bytes/s."""
    sharing: int
    """Number of devices that share that memory: DRAM bytes charged for one byte of a copy."""
    host_sharing: float
    """DRAM bytes charged for one byte of the AdamW kernel. More than `sharing`, because the kernel
    reaches only `adam_share` of the bandwidth that a copy reaches."""
    reach: float
    """Factor on links and memory: below 1 where memory may lie on another socket."""
    host: float
    """Largest rate of all host threads of one device, bytes/s."""
    core: float
    """Bytes/s that one host thread moves."""
    steps: float
    """Largest rate of AdamW steps of an element, per second, of all host threads of one device."""
    cores: float
    """Number of hardware threads at work at once for one device, where a CPU plays it."""

    @classmethod
    def of(
        cls,
        hardware: HardwareProfile,
        *,
        pinned: bool = True,
        quantities: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rates:
        """Return the rates of a profile, or of many that differ in some quantities.

        Args:
            hardware: The machine.
            pinned: Whether copies use pinned memory on the host.
            quantities: Values or arrays in place of the profile's own d2h, h2d, duplex, dram,
                core_bandwidth, core_update (of its link and host) and threads (for one device).

        Examples:
            >>> from sim.hardware.catalog import find_machine
            >>> rates = Rates.of(find_machine("dgx-a100-80"))
            >>> rates.sharing  # devices that share one socket's memory
            4
        """
        link, host = hardware.link, hardware.host
        own = {
            "d2h": link.d2h.value,
            "h2d": link.h2d.value,
            "duplex": link.duplex.value,
            "dram": host.dram.value,
            "core_bandwidth": host.core_bandwidth.value,
            "core_update": host.core_update.value,
            "threads": hardware.threads_per_device,
            **quantities,
        }
        copies = 1.0 if pinned else link.pageable.value
        # Unbound, memory lies on either socket: half of all accesses hop.
        is_far = not hardware.binds_cores and host.sockets > 1
        reach = (1.0 + host.numa_hop.value) / 2 if is_far else 1.0
        d2h, h2d = own["d2h"] * copies * reach, own["h2d"] * copies * reach
        return cls(
            d2h=d2h,
            h2d=h2d,
            duplex=(d2h + h2d) * own["duplex"],
            dram=hardware.sockets_reached * own["dram"] * reach,
            sharing=hardware.dram_sharers,
            host_sharing=hardware.dram_sharers / host.adam_share.value,
            reach=reach,
            host=own["threads"] * own["core_bandwidth"] * reach,
            core=own["core_bandwidth"] * reach,
            steps=own["threads"] * own["core_update"],
            cores=hardware.total_cores * host.core_sharing.value / 2 / hardware.num_devices,
        )


class Machine:
    """A simulated machine: lanes of one device and its share of the host, on one clock.

    Attributes:
        env: SimPy's environment; time in seconds.
        network: Flows under way.
        device: Compute, in launch order.
        launch: Launches of a GPU's kernels by the host's training thread.
        d2h: Copies to the host.
        h2d: Copies to the device.
        weights_up: Copies of streamed weights to the device.
        weights_down: Copies of streamed weights to the host.
        host: The host worker.
        fabric: Collectives among the devices.
        nvme_read: Drives to host memory.
        nvme_write: The other way.
        recording: Spans so far.
        starved: Times in which the host had nothing to work on, for want of states that a drive
            has; None without such states.

    Examples:
        >>> from sim.hardware.catalog import find_machine
        >>> machine = Machine(find_machine("hgx-h100", 1))
        >>> copied = machine.d2h.submit("copy", 1, machine.down(1e9))
        >>> machine.env.run(copied)
        >>> round(machine.env.now, 3)  # seconds of 1 GB to the host
        0.018
    """

    def __init__(
        self, hardware: HardwareProfile, *, pinned: bool = True, keeps_spans: bool = True
    ) -> None:
        """Set the machine up at time 0, idle.

        Args:
            hardware: The profile to simulate.
            pinned: Whether copies use pinned memory.
            keeps_spans: Whether to record spans; busy seconds always are.
        """
        self.hardware = hardware
        self.rates = rates = Rates.of(hardware, pinned=pinned)
        self.env = simpy.Environment()
        self.network = FluidNetwork(self.env)
        self.recording = Recording(keeps=keeps_spans)
        self.starved: Starved | None = None
        self.device = self._lane("device")
        self.launch = self._lane("launch")
        self.d2h = self._lane("d2h")
        self.h2d = self._lane("h2d")
        self.weights_up = self._lane("weights h2d")
        self.weights_down = self._lane("weights d2h")
        self.fabric = self._lane("fabric")
        self.nvme_read = self._lane("nvme read")
        self.nvme_write = self._lane("nvme write")
        self.host = HostLane("host", self.network, self.recording)
        overheads = hardware.overheads
        self.pack_rate = overheads.pack_bandwidth.value
        self.unpack_rate = (overheads.unpack_bandwidth or overheads.pack_bandwidth).value
        self.copy_seconds = overheads.copy.value + hardware.link.latency.value
        self.dram = Resource("dram", rates.dram)
        self._bound_kinds: dict[float, FlowKind] = {}
        self._make_kinds()

    def _lane(self, name: str) -> SerialLane:
        return SerialLane(name, self.network, self.recording)

    def _make_kinds(self) -> None:
        hardware, rates, pack, unpack = self.hardware, self.rates, self.pack_rate, self.unpack_rate
        down, up = Resource("d2h", rates.d2h), Resource("h2d", rates.h2d)
        both = Resource("duplex", rates.duplex)
        dram = {self.dram: float(rates.sharing)}
        if hardware.total_devices > 1 or hardware.fabric is not None:
            self.fabric_kind = FlowKind("fabric", _ring_uses(hardware, down, up, both))
        if hardware.nvme is not None:
            # The drives are the whole host's, and what they move passes through its DRAM.
            count = float(hardware.num_devices)
            reads = Resource("nvme read", hardware.nvme.read.value)
            writes = Resource("nvme write", hardware.nvme.write.value)
            shared = dict(dram)
            if (most := hardware.nvme.most_both) is not None:
                shared[Resource("nvme both", most)] = count
            self.nvme_read_kind = FlowKind("nvme read", {reads: count, **shared})
            self.nvme_write_kind = FlowKind("nvme write", {writes: count, **shared})
        self.compute_kind: FlowKind | None = None
        if not hardware.device.is_cpu:
            self.host_kind = FlowKind("host", {self.dram: rates.host_sharing}, rates.host)
            self.d2h_kind = FlowKind("d2h", {down: 1.0, both: 1.0, **dram})
            self.h2d_kind = FlowKind("h2d", {up: 1.0, both: 1.0, **dram})
            return
        # A copy is a lane thread's work and then a wait for the link, so it costs cores; a
        # thread's share of them is in proportion to what it would do alone. A collective is all
        # work: processes copy into and out of the system's buffers.
        cores = Resource("cores", rates.cores)
        if hardware.fabric is not None:
            rate = hardware.fabric.bandwidth.value
            uses = {**self.fabric_kind.uses, cores: 1.0 / rate}
            self.fabric_kind = FlowKind("fabric", uses, rate, rate)
        self.compute_kind = FlowKind("compute", {cores: 1.0}, 1.0)
        self.host_kind = FlowKind("host", {cores: 1.0 / rates.core}, rates.host, rates.core)
        self.d2h_kind = FlowKind("d2h", {down: 1.0, both: 1.0, cores: 1.0 / pack}, pack, pack)
        self.h2d_kind = FlowKind("h2d", {up: 1.0, both: 1.0, cores: 1.0 / unpack}, unpack, unpack)

    def compute(
        self, name: str, seconds: float, step: int, after: Iterable[simpy.Event] = ()
    ) -> simpy.Event:
        """Queue work on the device, to start after these events; return that of its end."""
        return self.device.submit(name, step, self.device_work(seconds), after)

    def compute_all(self, name: str, seconds: Iterable[float], step: int) -> simpy.Event:
        """Queue works on the device, at least one; return the event of the end of the last."""
        return self.device.submit_all(name, step, [self.device_work(each) for each in seconds])

    def device_work(self, seconds: float) -> Work:
        """Return work that an undisturbed device takes so many seconds for."""
        if self.compute_kind is None:
            return Work(seconds=seconds)
        return Work(kind=self.compute_kind, num_bytes=seconds)

    def down(self, num_bytes: float, *, packs: bool = False) -> Work:
        """Return a copy to the host as work; ``packs`` where columns are gathered first."""
        seconds = self._copy_seconds(num_bytes, self.pack_rate if packs else None)
        return Work(seconds=seconds, kind=self.d2h_kind, num_bytes=num_bytes, counted=num_bytes)

    def up(self, num_bytes: float, *, packs: bool = False, late: float = 0.0) -> Work:
        """Return a copy to the device as work.

        Args:
            num_bytes: Its size.
            packs: Whether it is written into columns.
            late: Seconds that the device's stream of copies works on it besides.
        """
        seconds = self._copy_seconds(num_bytes, self.unpack_rate if packs else None) + late
        return Work(seconds=seconds, kind=self.h2d_kind, num_bytes=num_bytes, counted=num_bytes)

    def from_drives(self, num_bytes: float) -> Work:
        """Return a read from the NVMe drives, which the profile must have, as work."""
        return Work(kind=self.nvme_read_kind, num_bytes=num_bytes, counted=num_bytes)

    def to_drives(self, num_bytes: float) -> Work:
        """Return a write to the NVMe drives, which the profile must have, as work."""
        return Work(kind=self.nvme_write_kind, num_bytes=num_bytes, counted=num_bytes)

    def collective(
        self, name: str, num_bytes: float, step: int, after: simpy.Event, *, blocks: bool = False
    ) -> simpy.Event:
        """Queue a collective over all devices of all hosts; with one there is nothing to do.

        A ring passes (n - 1) / n of the bytes through each device in a reduce-scatter or an
        all-gather, and twice that in an all-reduce (Thakur et al. 2005). It enters and leaves each
        host once, however many devices the host has, so the slowest link on its way sets its pace.

        Args:
            name: Of its span.
            num_bytes: Of what is gathered or reduced, twice as many for an all-reduce.
            step: Its step.
            after: What must have happened before it starts.
            blocks: Whether a CPU that plays the device waits for it: only a GPU has a stream for
                what its training thread calls.
        """
        if self.hardware.total_devices == 1 or num_bytes == 0:
            return after
        lane = self.device if blocks and self.hardware.device.is_cpu else self.fabric
        return lane.submit(name, step, self.ring_work(num_bytes), [after])

    def ring_work(self, num_bytes: float) -> Work:
        """Return a collective of several devices as work, in whatever lane it is to be."""
        hardware = self.hardware
        count = hardware.total_devices
        seconds, moved = 0.0, num_bytes * (count - 1) / count
        if hardware.fabric is not None:
            seconds += hardware.fabric.latency.value
        if hardware.network is not None:
            seconds += (hardware.num_hosts - 1) * hardware.network.latency.value
        return Work(seconds=seconds, kind=self.fabric_kind, num_bytes=moved, counted=moved)

    def _copy_seconds(self, num_bytes: float, packing: float | None) -> float:
        """Return the seconds of a copy beside those of its bytes on the link.

        A GPU's stream packs the bytes first; a CPU's lane thread packs them while they move.
        """
        if packing is None or self.hardware.device.is_cpu:
            return self.copy_seconds
        return self.copy_seconds + num_bytes / packing

    def host_work(
        self, num_bytes: float, steps: float = 0.0, kind: FlowKind | None = None
    ) -> Work:
        """Return a host task as work.

        Args:
            num_bytes: Bytes of DRAM that it moves.
            steps: Number of AdamW steps of an element that it takes meanwhile.
            kind: Of its flow; None is that of the AdamW kernel.
        """
        task, kind = self.hardware.overheads.host_task.value, kind or self.host_kind
        if steps * kind.max_rate > num_bytes * self.rates.steps:
            kind = self._bound_kind(self.rates.steps * num_bytes / steps)
        return Work(seconds=task, kind=kind, num_bytes=num_bytes)

    def _bound_kind(self, rate: float) -> FlowKind:
        """Return the host's kind of flow where arithmetic holds it down to this rate, bytes/s."""
        found = self._bound_kinds.get(rate)
        if found is None:
            kind, slower = self.host_kind, self.host_kind.max_rate / rate
            found = replace(kind, max_rate=rate)
            if self.compute_kind is not None:  # a byte takes more of the cores' time
                uses = {resource: share * slower for resource, share in kind.uses.items()}
                found = replace(found, uses=uses, weight=kind.weight / slower)
            self._bound_kinds[rate] = found
        return found

    def fresh_pages(self, num_bytes: float) -> Work:
        """Return the first touch of memory that a process of the host has just been given.

        The kernel zeroes each page, for a few threads of a process at a time.
        """
        threads = min(_FAULTING_THREADS, self.hardware.threads_per_device)
        rate = threads * self.hardware.host.page_bandwidth.value
        kind = replace(self.host_kind, name="pages", max_rate=min(self.host_kind.max_rate, rate))
        return Work(kind=kind, num_bytes=num_bytes)

    def bounded_host(self, rate: float) -> FlowKind:
        """Return the host's kind of flow for work that is slower than AdamW's kernel.

        Args:
            rate: Bytes/s of DRAM that all devices' such work moves at most.
        """
        most = Resource("cpu code", rate * self.rates.reach / self.hardware.num_devices)
        return replace(self.host_kind, uses={**self.host_kind.uses, most: 1.0})

    def stall(self, cause: str, since: float, step: int) -> None:
        """Record that the device has waited since a moment until now.

        The part in which the host itself waits for a drive is the drive's.
        """
        now = self.env.now
        if self.starved is not None and cause in _HOSTS:
            turn = since + self.starved.seconds(since, now)
            self.recording.add_stall("drive", since, turn, step)
            since = turn
        self.recording.add_stall(cause, since, now, step)

    def run(self, process: Process) -> float:
        """Run a schedule until nothing is left to do; return the time."""
        self.env.process(process)
        self.env.run()
        return float(self.env.now)


def _ring_uses(
    hardware: HardwareProfile, down: Resource, up: Resource, both: Resource
) -> dict[Resource, float]:
    """Return the cost on each link of one byte that a ring passes through a device.

    Args:
        hardware: The machine.
        down: The device's link to the host.
        up: Its link from the host.
        both: Both ways of that link together.
    """
    uses: dict[Resource, float] = {}
    each_way = 0.0
    if hardware.fabric is not None:
        uses[Resource("fabric", hardware.fabric.bandwidth.value)] = 1.0
        if "pcie" in hardware.fabric.name.lower():
            # What one device sends goes up and down the same links.
            each_way, uses[both] = 1.0, 2.0
    if hardware.network is not None and hardware.num_hosts > 1:
        network = hardware.network
        uses[Resource("network", network.adapters * network.bandwidth.value)] = 1.0
        # A device's link has its part of what leaves the host. It goes to an adapter, and not to
        # the host's memory, which is what holds both ways of a link down together.
        each_way += 1.0 / hardware.num_devices
    return {**uses, down: each_way, up: each_way}


def least_seconds(machine: Machine, kind: FlowKind, num_bytes: float) -> float:
    """Return the seconds of a flow that nothing competes with."""
    rate = min([kind.max_rate, *(r.capacity / share for r, share in kind.uses.items())])
    return num_bytes / rate if math.isfinite(rate) else 0.0
