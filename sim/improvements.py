"""Improvements: what another part in a machine would save, by predicting again with it. No torch.

Faster parts are tried under the recommended strategy. More memory is tried under every preset of
the engine that it would make fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sim.catalog import find_link, find_nvme
from sim.hardware import HardwareProfile
from sim.memory import MemoryNeed, memory_of
from sim.memory_parts import gib
from sim.options import BASELINES, Option, Planner
from sim.workload import Workload

_NEXT_LINK = {"pcie3-x16": "pcie4-x16", "pcie4-x16": "pcie5-x16"}
_DEVICE_SIZES = tuple(size << 30 for size in (16, 24, 32, 40, 48, 80, 96, 141, 192, 288))
"""Of devices that are sold, bytes."""
_DRIVES = "4x-gen4"
_DRIVEN = "zero_infinity"
"""The strategy that needs drives."""
_Sizes = tuple[float, float]
"""Of device and host memory, bytes."""
_GAIN = 0.001
"""Share of a step below which a change is no gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """What a change of the machine would bring."""

    change: str
    strategy: str
    """Whose step it is, with its changes."""
    is_ours: bool
    step_seconds: float
    """With the change."""
    saved_seconds: float | None
    """Of the recommended strategy's step; None where no preset fits without the change."""
    saved_share: float | None

    @property
    def helps(self) -> bool:
        """Whether it saves anything, or makes something fit at all."""
        return self.saved_share is None or self.saved_share >= _GAIN

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, and whether it helps."""
        return {**asdict(self), "helps": self.helps}


def improvements(
    workload: Workload, options: Sequence[Option], now: Option | None, planner: Planner
) -> list[Improvement]:
    """Return what each change of the machine would save, the most helpful first.

    Args:
        workload: As asked for.
        options: On the machine as it is.
        now: The one that is recommended.
        planner: Of the machine as it is.
    """
    changed = [*_more_memory(workload, options, planner), *_drives(workload, options, planner)]
    if now is not None:
        changed += _faster_parts(now, planner.hardware)
    found = [_improvement(change, option, now) for change, option in changed]
    return sorted(found, key=lambda item: (-(item.saved_seconds or 0.0), item.step_seconds))


def _improvement(change: str, option: Option, now: Option | None) -> Improvement:
    saved = None if now is None else max(0.0, now.step_seconds - option.step_seconds)
    return Improvement(
        change=change,
        strategy=option.label,
        is_ours=option.is_ours,
        step_seconds=option.step_seconds,
        saved_seconds=saved,
        saved_share=None if now is None or saved is None else saved / now.step_seconds,
    )


def _faster_parts(now: Option, hardware: HardwareProfile) -> Iterator[tuple[str, Option]]:
    """Yield a faster link, faster host memory and more cores under the recommended strategy."""
    for change, other in _faster(hardware):
        option = Planner(other).option(now.need.workload, now.strategy)
        yield change, replace(option, changes=now.changes)


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


def _more_memory(
    workload: Workload, options: Sequence[Option], planner: Planner
) -> Iterator[tuple[str, Option]]:
    """Yield sizes of memory with which a preset fits that does not now, the fastest first.

    Each is looked at as asked for and with activation checkpointing; what takes as much memory as
    a faster one is left out.
    """
    presets = {
        option.strategy.name: option.strategy
        for option in reversed(options)
        if option.is_ours and option.strategy.name not in BASELINES
    }
    tried: list[tuple[Option, _Sizes]] = []
    for strategy in presets.values():
        for other, changes in planner.variants(workload)[:2]:
            sizes = _sizes_sold(memory_of(other, strategy, planner.hardware), planner.hardware)
            if sizes is not None:
                option = planner.option(other, strategy)
                tried.append((replace(option, changes=changes), sizes))
    cheapest: list[_Sizes] = []
    for option, sizes in sorted(tried, key=lambda item: item[0].step_seconds):
        if not any(sizes[0] >= device and sizes[1] >= host for device, host in cheapest):
            cheapest.append(sizes)
            yield _in_words(option, sizes), option


def _sizes_sold(need: MemoryNeed, hardware: HardwareProfile) -> _Sizes | None:
    """Return device and host memory that are sold and suffice, bytes.

    None if there is enough already, or no such device.
    """
    device, host = hardware.device.memory.value, hardware.host.dram_bytes.value
    short = need.short_of(hardware)
    for place, (needed, _) in short.items():
        if place == "device":
            device = next((size for size in _DEVICE_SIZES if size >= needed), 0.0)
        elif place == "host":
            host = 1 << 34
            while host < needed:
                host *= 2
    return (device, host) if short and device else None


def _in_words(option: Option, sizes: _Sizes) -> str:
    whole = {
        "device": f"a device with {gib(sizes[0])}",
        "host": f"{gib(sizes[1])} of host memory",
    }
    return " and ".join(f"{whole[s.place]} (it needs {gib(s.needed)})" for s in option.shortfalls)


def _drives(
    workload: Workload, options: Sequence[Option], planner: Planner
) -> Iterator[tuple[str, Option]]:
    """Yield what drives would do; no preset of the engine uses them."""
    if planner.hardware.nvme is not None or not any(o.strategy.name == _DRIVEN for o in options):
        return
    other = Planner(replace(planner.hardware, nvme=find_nvme(_DRIVES)))
    option = other.options(workload, _DRIVEN)[0]
    if option.fits:
        yield f"NVMe drives ({_DRIVES}), which only {_DRIVEN} uses", option
