"""What the benchmarks' records share: provenance, medians with spread, the machine's copy speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from experiments.records import percentile, provenance


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
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return 2 * source.nbytes / statistics.median(seconds[1:])
