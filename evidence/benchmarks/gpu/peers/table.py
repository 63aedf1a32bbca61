"""The benchmark's table, and how an engine that has no row ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evidence.benchmarks.gpu.figures import FUSED
from evidence.benchmarks.gpu.loan.guard import OUT_OF_TIME

Row = Mapping[str, Any]
_NONE = "-"


def shares(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Return each row's speed over that of no offload, torch's fused AdamW, in its own cell."""
    rates = {(row["engine"], row["cell"]): row.get("tokens_per_second") for row in rows}
    found = {}
    for (engine, cell), rate in rates.items():
        whole = rates.get((FUSED, cell))
        if rate and whole:
            found[engine, cell] = rate / whole
    return found


def _scaled(*keys: str, by: float, digits: int) -> Callable[[Row], str]:
    """Return a function that shows a row's number, found by a path of keys."""

    def show(row: Row) -> str:
        value: Any = row
        for key in keys:
            value = None if value is None else value[key]
        return _NONE if value is None else f"{by * value:.{digits}f}"

    return show


_COLUMNS: Mapping[str, tuple[int, Callable[[Row], str]]] = {
    "median ms": (11, _scaled("step_seconds", "median", by=1e3, digits=1)),
    "p95 ms": (9, _scaled("step_seconds", "p95", by=1e3, digits=1)),
    "slowest": (9, _scaled("window_seconds", "slowest", by=1e3, digits=1)),
    "others": (9, _scaled("window_seconds", "others", by=1e3, digits=1)),
    "tokens/s": (10, _scaled("tokens_per_second", by=1, digits=0)),
    "of fused": (10, _scaled("share", by=1, digits=3)),
    "idle %": (8, _scaled("idle_share", by=100, digits=1)),
    "d2h MB": (8, _scaled("traffic", "d2h_bytes", by=1e-6, digits=1)),
    "h2d MB": (8, _scaled("traffic", "h2d_bytes", by=1e-6, digits=1)),
    "device GB": (11, _scaled("peak_device_bytes", by=1e-9, digits=2)),
    "host GB": (9, _scaled("peak_host_bytes", by=1e-9, digits=2)),
    "loss": (8, _scaled("loss", by=1, digits=4)),
}
"""Width of each column, and what it shows of a row."""


def table(rows: Sequence[Row]) -> str:
    """Return a line for each row, and a note on what the columns are."""
    heads = "".join(f"{name:>{width}}" for name, (width, _) in _COLUMNS.items())
    lines = [f"{'engine':<30}{'cell':<18}{heads}  resumes; state"]
    found = shares(rows)
    for row in rows:
        start = f"{row['engine']:<30}{row['cell']:<18}"
        if "failed" in row:
            lines.append(f"{start}{row['failed']}")
            continue
        own = {**row, "share": found.get((row["engine"], row["cell"]))}
        shown = "".join(f"{show(own):>{width}}" for width, show in _COLUMNS.values())
        lines.append(f"{start}{shown}  {row['resume']}; {row['state']}")
    return "\n".join([*lines, "", *_NOTES])


_NOTES = (
    "slowest, others: ms of a step at a window's slowest position, and elsewhere",
    f"of fused: tokens/s over those of {FUSED} in the cell; idle: of the device, under a profiler",
    "resumes: whether two steps behind its own checkpoint repeat bit for bit, on a tiny model",
)


def ending(code: int, limit: float) -> str:
    """Return how a process ended that has left no row, in words.

    >>> ending(247, 30.0), ending(124, 30.0), ending(3, 30.0)
    ('killed by SIGKILL', 'stopped after 30 s', 'ended with code 3')
    """
    if code == OUT_OF_TIME:
        return f"stopped after {limit:.0f} s"
    number = 256 - code  # the guard ends with a signal's number below zero
    if number in {each.value for each in signal.Signals}:
        return f"killed by {signal.Signals(number).name}"
    return f"ended with code {code}"
