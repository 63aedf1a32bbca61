"""Grid: the settings that a search looks at, for one step's tokens and for fewer of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sim.models.recomputation import Recomputation
from sim.models.workload import MOST_MICRO_BATCHES, Workload
from sim.planning.rules import FEW_BYTES, WORTH
from sim.simulate import Strategy
from zenflow.config import ZenFlowConfig

KS = (0.1, 0.0, 0.01, 0.02, 0.05, 0.2, 0.3, 0.45, 0.6, 0.8)
"""Values of k that are tried, the default first: it stays where nothing is faster."""
_FINE = 16
"""Number of sequences up to which shares of them lie close together."""
_LARGE = 1 << 17
"""Tokens of a micro-batch beyond which none is tried that was not asked for: it would not be
faster."""
INTERVALS = (4, 8, 16)
"""Values of S that are tried, in steps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedSetting:
    """One setting of the grid."""

    workload: Workload
    """Step, cut into this setting's micro-batches."""
    strategy: Strategy
    """Preset with this setting's knobs."""
    changes: tuple[str, ...]
    """Differences from the preset and from the workload that was asked for, in words."""
    seconds: float
    """Estimate of a step's seconds, which the simulated step is never below."""
    distance: int
    """Distance of the update rule from AdamW; see `sim.planning.rules.distance`."""

    @property
    def score(self) -> float:
        """Seconds of a step, times `WORTH` for each unit of distance from AdamW."""
        return self.seconds * WORTH**self.distance


def fewer_tokens(workload: Workload) -> Iterator[Workload]:
    """Yield steps of fewer and fewer tokens: fewer sequences, then shorter ones."""
    count = workload.batch_size * workload.accumulation
    sizes = range(count - 1, 0, -1) if count <= 4 else _shares(count)
    for size in sizes:
        yield replace(workload, batch_size=size, accumulation=1)
    length = workload.sequence // 2
    while length >= 128:
        yield replace(workload, batch_size=1, accumulation=1, sequence=length)
        length //= 2


def _shares(count: int) -> list[int]:
    """Return 3/4 and 1/2 of a number, then of its half, and so on down to 1.

    Large numbers are quartered first.

    >>> _shares(8), _shares(100)
    ([6, 4, 3, 2, 1], [25, 6, 4, 3, 2, 1])
    """
    found: list[int] = []
    while count > _FINE:
        count //= 4
        found.append(count)
    while count > 1:
        found += [3 * count // 4, count // 2]
        count //= 2
    return list(dict.fromkeys(size for size in found if size))


def splits(workload: Workload, recomputes: Collection[Recomputation]) -> Iterator[Workload]:
    """Yield the step's sequences in micro-batches of every size, the one asked for first."""
    count = workload.batch_size * workload.accumulation
    sizes = [size for size in range(count, 0, -1) if count % size == 0]
    sizes = [
        size for size in sizes
        if (count // size <= MOST_MICRO_BATCHES and size * workload.sequence <= _LARGE)
        or size == workload.batch_size
    ]  # fmt: skip
    sizes.sort(key=lambda size: size != workload.batch_size)
    for checkpointing in recomputes:
        for size in sizes:
            yield replace(
                workload, batch_size=size, accumulation=count // size, checkpointing=checkpointing
            )


def strategies(
    names: Collection[str], knobs: Mapping[str, Any], *, releases: bool
) -> Iterator[tuple[Strategy, tuple[str, ...]]]:
    """Yield each preset, zenflow with every setting of the grid, and the changes in words.

    Args:
        names: Presets.
        knobs: Settings of the update rule that are held. Formats of few bytes are zenflow's alone:
            other presets are there for AdamW exactly, or to compare with.
        releases: Whether gradients may leave during backward.
    """
    others = {key: v for key, v in knobs.items() if key not in ("host_state", *FEW_BYTES)}
    for name in names:
        default = ZenFlowConfig.preset(name)
        grid = [(k, interval) for k in KS for interval in INTERVALS] if name == "zenflow" else []
        tried: dict[tuple[Any, ...], dict[str, Any]] = {}
        for k, interval in grid or [(default.topk_ratio, default.update_interval)]:
            held = knobs if name == "zenflow" else others
            chosen = {"topk_ratio": k, "update_interval": interval, **held}
            tried[tuple(chosen.values())] = chosen
        for chosen in tried.values():
            changed = {key: v for key, v in chosen.items() if v != getattr(default, key)}
            text = tuple(f"{key}={value}" for key, value in changed.items())
            yield Strategy.of(name, releases=releases, **changed), text


def changes_of(work: Workload, asked: Workload) -> tuple[str, ...]:
    """Return the differences of a step from the one asked for, in words."""
    changes = []
    if work.checkpointing != asked.checkpointing:
        changes.append("checkpointing" if work.checkpointing else "no checkpointing")
    if work.batch_size != asked.batch_size:
        count, size = work.accumulation, work.batch_size
        changes.append(f"{count} micro-batch{'es' if count > 1 else ''} of {size}")
    return tuple(changes)
