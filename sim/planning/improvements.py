"""Improvements: the gain from another part in a machine, by predicting again with it.

Where something fits, other parts are tried with the recommended setting, and more memory with the
setting that is then best. Where nothing fits, more of the host's memory comes before another
device.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sim.hardware.catalog import find_link, most_memory
from sim.hardware.profile import HardwareProfile
from sim.memory_parts import gib
from sim.planning.options import Option, Planner
from sim.planning.search import Search, groups_of
from zenflow.config import PRESETS

_NEXT_LINK = {"pcie3-x16": "pcie4-x16", "pcie4-x16": "pcie5-x16"}
_DEVICE_SIZES = tuple(size << 30 for size in (16, 24, 32, 40, 48, 80, 96, 141, 192, 288))
"""Bytes of devices that are sold."""
_HOST_SIZES = tuple(
    size << 30
    for size in (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144)
)
"""Bytes of hosts that are sold."""
_GAIN = 0.03
"""Share of a step that a faster part must save to be named."""
_WORTH_MEMORY = 0.1
"""Share of a step that more memory must save to be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """A change of the machine, and the step that it would bring."""

    change: str
    """Change of the machine in words."""
    setting: str
    """Strategy and changes with which it was predicted."""
    num_devices: int
    """Number of devices for which it was predicted."""
    tokens: int
    """Number of tokens of a step over all devices."""
    step_seconds: float
    """Predicted seconds of a step with the change."""
    host_memory: float | None = None
    """Bytes of the host's memory with the change; None unless it is all that changes."""
    device_memory: float | None = None
    """Bytes of the device's memory with the change; None unless that changes."""
    saved_share: float | None
    """Share of the recommended setting's time for a token that the change saves; None where
    nothing fits without it."""

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens per second with the change, over all devices."""
        return self.tokens / self.step_seconds

    @property
    def helps(self) -> bool:
        """Whether the change saves anything worth naming, or makes something fit at all."""
        return self.saved_share is None or self.saved_share >= _GAIN

    def is_worth(self, shown: Option | None) -> bool:
        """Whether the change is as fast as an option that needs none."""
        return shown is None or self.tokens_per_second >= shown.tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, and whether it helps."""
        found = {**asdict(self), "tokens_per_second": self.tokens_per_second}
        return {**found, "helps": self.helps}


def _improvement(change: str, option: Option, now: Option | None) -> Improvement:
    saved = None
    if now is not None:
        saved = max(0.0, 1.0 - now.tokens_per_second / option.tokens_per_second)
    return Improvement(
        change=change,
        setting=option.label,
        num_devices=option.need.num_devices,
        tokens=option.tokens,
        step_seconds=option.step_seconds,
        saved_share=saved,
    )


def faster_parts(now: Option, search: Search) -> list[Improvement]:
    """Return the savings by faster parts and more memory, the most helpful first.

    Args:
        now: The recommended option.
        search: The search that found it.
    """
    usual = search.estimate(now)
    estimates: list[float] = []
    found = []
    for change, other in _faster(search.planner.hardware):
        about = search.estimate(now, other)
        if " and " in change:  # two parts at once must be worth more than one
            usual = min(usual, *estimates)
        estimates.append(about)
        if about < (1 - _GAIN) * usual:
            option = Planner(other).option_of(now.need)
            found.append(_improvement(change, replace(option, changes=now.changes), now))
    found += _larger_memory(now, search)
    return sorted(found, key=lambda item: -(item.saved_share or 0.0))


def _larger_memory(now: Option, search: Search) -> Iterator[Improvement]:
    """Yield larger memories, smallest first, each of which saves enough over the one before."""
    least = now.step_seconds
    for change, machine in _larger(search.planner.hardware):
        promised = next(search.fitting(hardware=machine), None)
        if promised is None or promised.seconds > (1 - _WORTH_MEMORY) * least:
            continue
        best = search.best(hardware=machine)
        if best is not None and best.step_seconds < (1 - _WORTH_MEMORY) * least:
            least = best.step_seconds
            yield _improvement(change, best, now)


def more_memory(
    searches: Sequence[Search],
    names: Collection[str] = PRESETS,
    shown: Option | None = None,
) -> Iterator[Improvement]:
    """Yield the memory that would make something fit: the host's, the device's, or both.

    Args:
        searches: Searches on the same devices: for the tokens asked for, then for fewer and fewer.
        names: Presets to look at.
        shown: Option that may fit the machine as it is; what is slower is not worth buying.
    """

    def first(
        searches: Sequence[Search], sizes: Sequence[tuple[float, float]]
    ) -> Improvement | None:
        found = _first_that_fits(searches, sizes, names)
        return found if found is not None and found.is_worth(shown) else None

    machine = searches[0].planner.hardware
    host, device = machine.host.dram_bytes.value, machine.device.memory.value
    hosts = _host_sizes(machine)
    devices = [size for size in _DEVICE_SIZES if size > 1.02 * device]
    if machine.device.is_cpu:
        devices = []
    own = first(searches, [(device, size) for size in hosts])
    other = first(searches[:1], [(size, host) for size in devices])
    both = None
    if own is None:  # a small device with a larger host may do what a far larger device does
        both = first(searches[:1], [(d, h) for d in devices for h in hosts])
    if both is not None and other is not None and both.device_memory == other.device_memory:
        both = None
    yield from (item for item in (own, both, other) if item is not None)


def _host_sizes(machine: HardwareProfile) -> list[int]:
    """Return the next sizes of the host's memory, up to the most that it takes."""
    most = most_memory(machine.host)
    own = machine.host.dram_bytes.value
    return [size for size in _HOST_SIZES if size > own and (most is None or size <= most)]


def _first_that_fits(
    searches: Sequence[Search], sizes: Sequence[tuple[float, float]], names: Collection[str]
) -> Improvement | None:
    machine = searches[0].planner.hardware
    ours, baselines = groups_of(names)
    for search, (device, host) in itertools.product(searches, sizes):
        other = machine.with_values({"device.memory": device, "host.dram_bytes": host})
        best = search.best(names=ours or baselines, hardware=other)
        if best is None:
            continue
        parts = []
        is_host = host != machine.host.dram_bytes.value
        if is_host:
            parts.append(f"{gib(host)} of host memory")
        is_device = device != machine.device.memory.value
        if is_device:
            parts.append(f"a device with {gib(device)}")
        return replace(
            _improvement(" and ".join(parts), best, None),
            host_memory=host if is_host and not is_device else None,
            device_memory=device if is_device else None,
        )
    return None


def _larger(hardware: HardwareProfile) -> Iterator[tuple[str, HardwareProfile]]:
    """Yield the machine with the next sizes of memory."""
    device = hardware.device.memory.value
    for size in _host_sizes(hardware)[:2]:
        yield f"{gib(size)} of host memory", hardware.with_values({"host.dram_bytes": size})
    if not hardware.device.is_cpu:
        for size in [size for size in _DEVICE_SIZES if size > 1.02 * device]:
            yield f"a device with {gib(size)}", hardware.with_values({"device.memory": size})


def _faster(hardware: HardwareProfile) -> Iterator[tuple[str, HardwareProfile]]:
    link = hardware.link
    if link.name in _NEXT_LINK:
        name = _NEXT_LINK[link.name]
        yield f"{name} in place of {link.name}", replace(hardware, link=find_link(name))
    else:
        rates = {"link.d2h": 2 * link.d2h.value, "link.h2d": 2 * link.h2d.value}
        yield f"a link twice as fast as {link.name}", hardware.with_values(rates)
    if hardware.num_devices > 1 and hardware.fabric is not None:
        rates = {"fabric.bandwidth": 2 * hardware.fabric.bandwidth.value}
        yield f"a fabric twice as fast as {hardware.fabric.name}", hardware.with_values(rates)
    if hardware.num_hosts > 1 and hardware.network is not None:
        rates = {"network.bandwidth": 2 * hardware.network.bandwidth.value}
        yield f"a network twice as fast as {hardware.network.name}", hardware.with_values(rates)
    dram = {"host.dram": 2 * hardware.host.dram.value}
    cores = f"{2 * hardware.total_cores} cores in place of {hardware.total_cores}"
    yield "host memory twice as fast", hardware.with_values(dram)
    yield cores, _more_cores(hardware)
    yield f"{cores}, and host memory twice as fast", _more_cores(hardware).with_values(dram)


def _more_cores(hardware: HardwareProfile) -> HardwareProfile:
    threads = hardware.host_threads
    return replace(
        hardware,
        host=replace(hardware.host, cores=2 * hardware.host.cores),
        host_threads=None if threads is None else 2 * threads,
    )
