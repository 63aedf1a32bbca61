"""Common parts of the benchmarks' records: provenance, medians with spread, speeds of copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import psutil
import torch

from experiments.calibration.parts import synchronize
from experiments.output.provenance import percentile
from zenflow.provenance import provenance

Cost = TypeVar("Cost")
Name = TypeVar("Name")


def setting(**facts: Any) -> dict[str, Any]:
    """Return hardware, versions and commit, without which no number means anything, and facts."""
    return {**provenance(), "load_average": psutil.getloadavg()[0], **facts}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, quartiles and 95th percentile of at least one value.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])["quartiles"]
    [2.0, 3.0, 4.0]
    """
    if len(values) == 1:
        quartiles = [values[0]] * 3
    else:
        quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "median": quartiles[1],
        "quartiles": quartiles,
        "p95": percentile(values, 0.95),
        "count": len(values),
    }


def take_turns(
    turns: Mapping[Name, Callable[[], Cost]], repeats: int, warm_rounds: int
) -> dict[Name, list[Cost]]:
    """Return the cost of each contender's turns; who begins changes with every round.

    Args:
        turns: Take a turn and return its cost, by contender.
        repeats: Number of rounds that count.
        warm_rounds: Number of rounds before them that don't.
    """
    names = list(turns)
    costs: dict[Name, list[Cost]] = {name: [] for name in names}
    for turn in range(warm_rounds + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            cost = turns[name]()
            if turn >= warm_rounds:
                costs[name].append(cost)
    return costs


def seconds_of(run: Callable[[], Any]) -> float:
    """Return the time of a call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def copy_bandwidth(num_bytes: int = 1 << 27, repeats: int = 7) -> float:
    """Return the speed of a plain copy in this process, bytes read plus written a second."""
    source = torch.ones(num_bytes // 4)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), repeats)


def scale_bandwidth(num_bytes: int = 1 << 27, repeats: int = 7) -> float:
    """Return the speed of scaling in place in this process, bytes read plus written a second.

    Unlike a copy it reads nothing that it does not use, so it shows what the memory really moves.
    """
    values = torch.ones(num_bytes // 4)
    return 2 * values.nbytes / median_seconds(lambda: values.mul_(1.0), repeats)


def median_seconds(run: Callable[[], Any], repeats: int, warm: int = 1) -> float:
    """Return the median time of some runs, behind a few that count for nothing."""
    return statistics.median([seconds_of(run) for _ in range(warm + repeats)][warm:])


def link_bandwidth(device: torch.device, num_bytes: int, repeats: int = 10) -> dict[str, float]:
    """Return bytes/s of pinned copies from and to the device; on a CPU, of plain ones."""
    on_gpu = device.type == "cuda"
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        synchronize(device)

    synchronize(device)
    return {
        "d2h": num_bytes / median_seconds(lambda: copy(host, there), repeats, warm=2),
        "h2d": num_bytes / median_seconds(lambda: copy(there, host), repeats, warm=2),
    }
