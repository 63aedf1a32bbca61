"""What a cell of the GPU benchmark says of the project's aims. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEAST_SHARE, MOST_STALL = 0.95, 0.05
"""Least share of the device's speed and most of a step stalled, where the host's work fits.

It fits where it takes no longer than the device's work of the same steps.
"""
MOST_SLOWEST = 1.1
"""Slowest position in a rolling window, over the median step."""
LEAST_GONE = 0.85
"""Share of zero_offload's stalled seconds per step."""
MOST_APART = 0.02
"""Share of a step between two measures: stalls by events and idle time by the profiler."""
MOST_LOSS = 0.01
"""Share of the device's loss."""
_LAST = 8
"""Steps whose losses are compared."""


@dataclass(frozen=True, slots=True)
class Aim:
    """An aim, and whether it is reached."""

    text: str
    value: float
    holds: bool | None
    """None where the aim does not apply."""

    def __str__(self) -> str:
        """Return one line."""
        verdict = {True: "holds", False: "MISSED", None: "does not apply"}[self.holds]
        return f"{self.text}: {self.value:.3f}, {verdict}"


def aims(runs: Sequence[Mapping[str, Any]]) -> Iterator[Aim]:
    """Yield every aim that a cell's runs decide."""
    by_name = {run["name"]: run for run in runs}
    device, offload = by_name.get("on_device"), by_name.get("zero_offload")
    for name, run in by_name.items():
        if run["profiled"] is not None:
            apart = abs(run["profiled"]["idle_share"] - run["profiled"]["stall_share"])
            text = f"{name}: idle time by the profiler is the stalls, within {MOST_APART:.0%}"
            yield Aim(text, apart, apart <= MOST_APART)
    for name, run in by_name.items():
        if not name.startswith("zenflow") or name.startswith("zenflow_paper"):
            continue
        yield from _of_zenflow(name, run, device, offload)
    kept, released = by_name.get("zenflow, keep"), by_name.get("zenflow")
    if kept and released and kept["peak_device_bytes"] is not None:
        spared = kept["peak_device_bytes"] - released["peak_device_bytes"]
        copies = spared / released["memory"]["model_bytes"]
        yield Aim("release mode spares copies of the gradients, at least 1", copies, copies >= 1)


def _of_zenflow(
    name: str,
    run: Mapping[str, Any],
    device: Mapping[str, Any] | None,
    offload: Mapping[str, Any] | None,
) -> Iterator[Aim]:
    if device is not None:
        share = run["tokens_per_second"] / device["tokens_per_second"]
        fits = _fits_behind(run)
        text = f"{name}: share of on_device's speed, at least {LEAST_SHARE}"
        yield Aim(text, share, share >= LEAST_SHARE if fits else None)
        stall = run["stall_fraction"]
        text = f"{name}: stalled share, under {MOST_STALL}"
        yield Aim(text, stall, stall < MOST_STALL if fits else None)
        excess = _excess(run, device)
        text = f"{name}: loss above on_device's, at most {MOST_LOSS:.0%}"
        yield Aim(text, excess, excess <= MOST_LOSS)
    if run["config"]["rolling"]:
        slowest = run["slowest_position"]
        text = f"{name}: slowest position of a window, at most {MOST_SLOWEST} medians"
        yield Aim(text, slowest, slowest <= MOST_SLOWEST)
    if offload is not None and offload["stall_fraction"] > 0:
        gone = 1 - _stalled(run) / _stalled(offload)
        text = f"{name}: share of zero_offload's stall gone, over {LEAST_GONE}"
        yield Aim(text, gone, gone > LEAST_GONE)


def _fits_behind(run: Mapping[str, Any]) -> bool:
    """Whether the host's update and its upload fit behind the device: T_cpu + T_up <= S T_step."""
    lanes = run["lanes"]
    busy = sum(lanes.get(lane, {}).get("busy_share", 0.0) for lane in ("host", "h2d"))
    return bool(busy <= 1.0)


def _stalled(run: Mapping[str, Any]) -> float:
    return float(sum(run["stall_seconds_per_step"].values()))


def _excess(run: Mapping[str, Any], device: Mapping[str, Any]) -> float:
    """Return by what share a run's loss is above the device's, over the last steps of both."""
    end = min(len(run["losses"]), len(device["losses"]))
    ours, theirs = (sum(each["losses"][:end][-_LAST:]) for each in (run, device))
    return float(ours / theirs - 1)


def shown_aims(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the aims, one a line."""
    return "\n".join(str(aim) for aim in aims(runs))
