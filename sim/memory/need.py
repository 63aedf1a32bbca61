"""Memory: a strategy's need on device, host and drives, part by part, and whether it fits.

The engine's own parts are those of its `MemoryPlan`, to the byte (`sim.memory.engine`). Other
systems' stand in their schedules' files, by papers and measurements. Activations are
`sim.models.workload`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from sim.hardware.profile import HardwareProfile
from sim.memory.chance import chance_to_fit, likely_need
from sim.memory.engine import engine_memory
from sim.memory.engine_parts import Visiting, engine_device_parts, engine_host_parts
from sim.memory.moments import cached_bytes, fullest, moments_of
from sim.memory_parts import PLACES, Part, SystemCase, gib
from sim.models.activations import Activations
from sim.models.workload import Workload
from sim.simulate import Strategy
from sim.timing.host_memory import PROCESS_BYTES
from zenflow.errors import ConfigError

Place = Literal["device", "host", "nvme"]

CONTEXT_BYTES = 0.8e9
"""Bytes of a GPU's context and libraries' workspaces.

Estimated: a context alone is 0.3 to 0.6 GB."""
ALLOCATOR_SHARE = 0.03
"""Bytes that PyTorch's allocator holds without use on a full GPU, over those in use.

Estimated: "reserved by PyTorch but unallocated" is 0.8 to 5.8 % in messages of memory running out
(stanford_alpaca issue 76, vllm issue 10637, compressed-tensors pull request 587, xTuring issue
140, starcoder issue 15); the middle one is 2.4 %. Of 15 of sharded training the middle one is
1.4 %, and the largest are 8 to 12 % (ParlAI issue 4452, s1 issue 106, LLaMA-Factory issue 7532)
and 23 % (LLaMA-Factory issue 5590). Where sizes vary much it is far more (litgpt issue 303)."""
COLLECTIVE_BYTES = 0.4e9
"""Bytes of a GPU's buffers for collectives, with several devices. Estimated."""

_RESERVE, _FRAMEWORK, _COLLECTIVES = "allocator's reserve", "framework", "collectives"
"""Names of the parts that are no tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A place whose memory is too small, and what would help. See `memory_of`."""

    place: Place
    needed: float
    """Bytes that are needed: of one device, or of the host or its drives for all devices."""
    available: float
    """Bytes of memory in that place."""
    remedies: tuple[str, ...]
    """Changes that would make it fit, or help."""

    @property
    def missing(self) -> float:
        """Bytes by which it is too small."""
        return self.needed - self.available

    def __str__(self) -> str:
        """Return place, need, what there is, and remedies, in one line."""
        what = {"device": "device memory", "host": "host memory", "nvme": "NVMe space"}[self.place]
        return (
            f"{what}: needs {gib(self.needed)}, has {gib(self.available)}, "
            f"{gib(self.missing)} too little ({'; '.join(self.remedies)})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, and what is missing."""
        return {
            "place": self.place,
            "needed": self.needed,
            "available": self.available,
            "missing": self.missing,
            "remedies": list(self.remedies),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes by place and part: of one device when it is fullest, of one host for its devices.

    See `memory_of`.
    """

    workload: Workload
    strategy: Strategy
    num_devices: int
    """Number of devices that share the work, on all hosts."""
    queue_depth: int = 1
    """Largest number of a column's gradients, q, that wait on the host: as many as the host has
    room for; 1 where the strategy has no queue."""
    parts: tuple[Part, ...]
    """Bytes by place and purpose."""
    cached_bytes: float = 0.0
    """Bytes that PyTorch's allocator holds besides where there is room, and can do without."""
    moment: str
    """Moment of a step at which the device is fullest: loss, backward or step."""

    def bytes_at(self, *places: str) -> float:
        """Return the bytes of these places: device, pageable, pinned, nvme."""
        return sum(part.num_bytes for part in self.parts if part.place in places)

    @property
    def device_bytes(self) -> float:
        """Bytes of one device at its fullest."""
        return self.bytes_at("device")

    @property
    def allocated_bytes(self) -> float:
        """Bytes of one device's tensors at its fullest."""
        return self.reserved_bytes - self.cached_bytes - self._bytes_named(_RESERVE)

    @property
    def reserved_bytes(self) -> float:
        """Bytes of one device that PyTorch's allocator holds at its fullest."""
        own = self.device_bytes - self._bytes_named(_FRAMEWORK, _COLLECTIVES)
        return own + self.cached_bytes

    def _bytes_named(self, *names: str) -> float:
        return sum(
            part.num_bytes for part in self.parts if part.place == "device" and part.name in names
        )

    @property
    def host_bytes(self) -> float:
        """Bytes of one host for its devices, pinned or not."""
        return self.bytes_at("pageable", "pinned")

    @property
    def pinned_bytes(self) -> float:
        """Pinned bytes, a part of ``host_bytes``."""
        return self.bytes_at("pinned")

    @property
    def nvme_bytes(self) -> float:
        """Bytes of the drives that are needed."""
        return self.bytes_at("nvme")

    def short_of(
        self, hardware: HardwareProfile, reserve: float = 0.0, chance: float = 0.0
    ) -> dict[Place, tuple[float, float]]:
        """Return need and room, bytes, of each place of a machine that is too small.

        A CPU in the role of the device has the host's memory and no other.

        Args:
            hardware: The machine.
            reserve: Bytes that have to stay free on the device and on the host.
            chance: Least chance to fit a device; 0 asks for the predicted bytes alone.
        """
        memory = hardware.device.memory.value
        room = min(memory - reserve, likely_need(memory, chance)) if chance else memory - reserve
        drives = hardware.nvme.capacity.value if hardware.nvme else 0.0
        device, host = self.device_bytes, self.host_bytes
        if hardware.device.is_cpu:
            device, host = 0.0, host + hardware.num_devices * device
        needs: dict[Place, tuple[float, float]] = {
            "device": (device, room),
            "host": (host, hardware.host.dram_bytes.value - reserve),
            "nvme": (self.nvme_bytes, drives),
        }
        return {place: (need, room) for place, (need, room) in needs.items() if need > room}

    def chance(self, hardware: HardwareProfile) -> float | None:
        """Return the chance that a device fits it, by published cases; None for a CPU."""
        if hardware.device.is_cpu:
            return None
        return chance_to_fit(self.device_bytes, hardware.device.memory.value)

    def fits(self, hardware: HardwareProfile) -> list[Shortfall]:
        """Return each place that is too small on a machine, with remedies."""
        return [
            Shortfall(
                place=place,
                needed=needed,
                available=available,
                remedies=tuple(self._remedies(place, needed, hardware)),
            )
            for place, (needed, available) in self.short_of(hardware).items()
        ]

    def _remedies(self, place: Place, needed: float, hardware: HardwareProfile) -> Iterable[str]:
        """Yield each change that saves memory in a place, and how much would do."""
        if place == "device" or hardware.device.is_cpu:
            most = 0.0
            for text, workload in _smaller(self.workload):
                other = memory_of(workload, self.strategy, hardware)
                saved = self.device_bytes - other.device_bytes
                if saved > most:
                    yield f"{text} saves {gib(saved)}"
                    most = saved
        weights = sum(part.num_bytes for part in self.parts if part.name == "weights")
        if place == "device" and weights > hardware.device.memory.value:
            yield (
                f"the weights alone are {gib(weights)}: shard them over more devices "
                "(--parallel fsdp), or let layers visit one (--stream with zenflow)"
            )
        config = self.strategy.config
        if place == "host" and config is not None:
            sizes = {part.name: part.num_bytes for part in self.parts}
            if "sums" in sizes:
                yield f"update_rule='exact' saves {gib(sizes['sums'])}"
            if "waiting gradients" in sizes:
                yield f"queue_depth=1 saves {gib(sizes['waiting gradients'])}"
            if (saved := self._saved_by_compact(hardware)) > 0:
                yield f"host_state='compact' saves {gib(saved)}"
            if (saved := self._saved_by_drive(hardware)) > 0:
                also = "topk_ratio=0 with " if config.topk_ratio else ""
                yield f"{also}states on a drive (state_on_drive) saves {gib(saved)}"
        if place == "device" and config is not None and config.topk_ratio == 1:
            yield "take a strategy that keeps optimizer state on the host"
        whole = {
            "device": "a device with at least {}",
            "host": "at least {} of host memory",
            "nvme": "NVMe drives with at least {}",
        }[place]
        yield whole.format(gib(needed))

    def _saved_by_compact(self, hardware: HardwareProfile) -> float:
        """Return the bytes of the host that compact state would save; 0 where it can't be had."""
        config = self.strategy.config
        if config is None or not config.is_exact or config.is_compact:
            return 0.0
        changed = replace(config, host_state="compact", queue_depth=self.queue_depth)
        return self._saved_by(replace(self.strategy, config=changed), hardware)

    def _saved_by_drive(self, hardware: HardwareProfile) -> float:
        """Return the bytes of the host that a drive would save; 0 where states can't be there."""
        config = self.strategy.config
        if config is None or not config.is_exact or self.strategy.state_on_drive:
            return 0.0
        changed = replace(config, topk_ratio=0.0, queue_depth=self.queue_depth)
        strategy = replace(self.strategy, config=changed, state_on_drive=True)
        return self._saved_by(strategy, hardware)

    def _saved_by(self, strategy: Strategy, hardware: HardwareProfile) -> float:
        """Return the bytes of the host that another strategy saves; 0 where it can't be had."""
        try:
            return self.host_bytes - memory_of(self.workload, strategy, hardware).host_bytes
        except ConfigError:  # so many devices would cut groups of rows, or divide a drive's states
            return 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return totals, bytes per parameter, and every part."""
        return {
            "strategy": self.strategy.name,
            "num_devices": self.num_devices,
            "queue_depth": self.queue_depth,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "pinned_bytes": self.pinned_bytes,
            "nvme_bytes": self.nvme_bytes,
            "bytes_per_param": {
                place: self.bytes_at(place) / self.workload.num_params for place in PLACES
            },
            "fullest_moment": self.moment,
            "parts": [asdict(part) for part in self.parts],
        }


def _smaller(workload: Workload) -> Iterable[tuple[str, Workload]]:
    """Yield ways to compute the step in less device memory, in words and as a workload."""
    smaller, text = workload, ""
    if not workload.recomputes_all:
        smaller, text = replace(workload, checkpointing=True), "activation checkpointing"
        yield text, smaller
    if workload.batch_size > 1:
        count = workload.batch_size * workload.accumulation
        text = f"{text} with {count} micro-batches of 1" if text else f"{count} micro-batches of 1"
        yield text, replace(smaller, batch_size=1, accumulation=count)


def memory_of(
    workload: Workload, strategy: Strategy | str, hardware: HardwareProfile
) -> MemoryNeed:
    """Return the memory that a strategy needs for a workload on a machine.

    Args:
        workload: Model and batch of each device.
        strategy: A `Strategy`, or its name.
        hardware: How many devices share the work, how much the host holds, and whether its link
            keeps up with backward.

    Raises:
        ConfigError: The strategy is unknown, the device has no peak for the workload's dtype, or
            devices would cut the groups of rows of compact state.

    Examples:
        A 7B model's AdamW states don't fit a device of 80 GB; on the host they do.

        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> machine = find_machine("dgx-a100-80", 1)
        >>> workload = Workload.of_config(*find_model("llama-2-7b"), checkpointing=True)
        >>> for name in ("on_device", "zenflow"):
        ...     print(name, not memory_of(workload, name, machine).fits(machine))
        on_device False
        zenflow True
    """
    if isinstance(strategy, str):
        strategy = Strategy.of(strategy)
    depth = 1
    if strategy.config is not None:
        shapes = [parameter.shape for parameter in workload.parameters]
        whole = engine_memory(
            shapes, strategy.config, workload.dtype_bytes, on_drive=strategy.state_on_drive
        )
        own = whole.divided(strategy.division(hardware)).on(hardware)
        device, depth = engine_device_parts(workload, strategy, own, hardware), own.depth
        weights = Visiting.of(workload, strategy.streams)
        host = engine_host_parts(own, hardware.num_devices, weights, workload.accumulation)
    else:
        system = strategy.system
        options = system.options(strategy.options)
        case = SystemCase(workload=workload, hardware=hardware, options=options)
        device, host = system.memory(case)
    held = moments_of(workload, device)
    moment, parts = fullest(workload, device, held)
    count, total = hardware.num_devices, hardware.total_devices
    fixed = []
    if not hardware.device.is_cpu:
        reserved = ALLOCATOR_SHARE * sum(part.num_bytes for part in parts)
        fixed.append(Part(_RESERVE, "device", reserved, "estimated"))
        fixed.append(Part(_FRAMEWORK, "device", CONTEXT_BYTES, "estimated"))
        if total > 1:
            fixed.append(Part(_COLLECTIVES, "device", COLLECTIVE_BYTES, "estimated"))
    away = count * sum(Activations(workload).leaving_bytes())
    fixed.append(Part("offloaded activations", "pinned", away, "between forward and backward"))
    fixed.append(Part("processes", "pageable", count * PROCESS_BYTES, "estimated"))
    return MemoryNeed(
        workload=workload,
        strategy=strategy,
        num_devices=total,
        queue_depth=depth,
        parts=tuple(part for part in (*parts, *host, *fixed) if part.num_bytes > 0),
        cached_bytes=cached_bytes(workload, device, held),
        moment=moment,
    )
