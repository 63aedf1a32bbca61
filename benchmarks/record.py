"""What the benchmarks' records share: provenance, medians with spread, speeds of copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from experiments.output.provenance import percentile, provenance


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


def copy_bandwidth(num_bytes: int = 1 << 27, repeats: int = 7) -> float:
    """Return the speed of a plain copy in this process, bytes read plus written a second."""
    source = torch.ones(num_bytes // 4)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), repeats)


def scale_bandwidth(num_bytes: int = 1 << 27, repeats: int = 7) -> float:
    """Return the speed of scaling in place in this process, bytes read plus written a second.

    Unlike a copy it reads nothing that it does not use, so it shows what the memory really moves.
    """
    values = torch.ones(num_bytes // 4)
    return 2 * values.nbytes / _median_seconds(lambda: values.mul_(1.0), repeats)


def _median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the median time of some runs, behind one that counts for nothing."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def link_bandwidth(device: torch.device, num_bytes: int, repeats: int = 10) -> dict[str, float]:
    """Return bytes/s of pinned copies from and to the device; on a CPU, of plain ones."""
    on_gpu = device.type == "cuda"
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    found = {}
    for way, target, source in (("d2h", host, there), ("h2d", there, host)):
        seconds = []
        for _ in range(repeats + 2):
            if on_gpu:
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
        found[way] = num_bytes / statistics.median(seconds[2:])
    return found
