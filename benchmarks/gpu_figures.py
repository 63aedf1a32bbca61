"""What the GPU benchmark's runs say: figures, floors and a table. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.record import spread
from zenflow import StepReport, Timeline, ZenFlowConfig

TRACED_STEPS = 8  # at the end of each run: two windows
WIDTH = 11  # of a column


def figures(reports: Sequence[StepReport], *, first: int, tokens: int) -> dict[str, Any]:
    """Return what the timed steps, those from `first` on, say together.

    Step times are the device's own, from the end of one step to the end of the next, so their sum
    is the whole time.

    Args:
        reports: Of all steps.
        first: Number of the first timed step.
        tokens: Trained on in a step.
    """
    timed = [report for report in reports if report.step >= first]
    seconds = [report.seconds for report in timed]
    causes = sorted({cause for report in timed for cause in report.stalls})
    return {
        "timed_steps": len(timed),
        "step_seconds": spread(seconds),
        "stall_seconds_per_step": {
            cause: sum(report.stalls.get(cause, 0.0) for report in timed) / len(timed)
            for cause in causes
        },
        "stall_fraction": sum(report.stall_seconds for report in timed) / sum(seconds),
        "d2h_bytes_per_step": sum(report.d2h_bytes for report in timed) / len(timed),
        "h2d_bytes_per_step": sum(report.h2d_bytes for report in timed) / len(timed),
        "captured_energy": sum(report.captured_energy for report in timed) / len(timed),
        "tokens_per_second": tokens * len(timed) / sum(seconds),
    }


def slowest_position(reports: Sequence[StepReport], first: int, window: int) -> float:
    """Return the median of the slowest position in the window over that of all steps.

    Args:
        reports: Of all steps.
        first: Number of the first timed step.
        window: Steps of a window.
    """
    timed = [report for report in reports if report.step >= first]
    places = [
        [report.seconds for report in timed if report.step % window == place]
        for place in range(window)
    ]
    return max(median(own) for own in places if own) / median(r.seconds for r in timed)


def lane_figures(timeline: Timeline) -> dict[str, Any]:
    """Return busy seconds of every lane, and bytes/s while the copy lanes were busy."""
    found: dict[str, Any] = {}
    for lane in timeline.lanes:
        busy, num_bytes = timeline.busy(lane), timeline.num_bytes(lane)
        found[lane] = {"busy_seconds": busy, "busy_share": busy / timeline.makespan}
        if num_bytes and busy > 0:
            found[lane]["bytes_per_second"] = num_bytes / busy
            found[lane]["behind_compute_share"] = timeline.overlap(lane, "device") / busy
    return found


def host_bytes(config: ZenFlowConfig, deferred: int, size: int = 2) -> float:
    """Return the bytes that the host must read and write per step, on average.

    In a window of S steps, one update reads the last gradient, reads and writes master and
    moments, and writes the weight. Each gradient before is read and moves both moments; with
    moments of the window's mean it goes into a sum, which is written once, read and written S - 2
    times, and read by the update. Where the window's last gradient can't be fused into the
    update, it goes into the sum too.
    """
    window, lag = config.update_interval, config.effective_lag()
    if config.deferred_moments == "step":
        return deferred * ((window - 1) * (size + 16) + size + 24 + size) / window
    accumulated = window - 1 if lag <= 1 else window
    sums = accumulated * size + (4 + 8 * (accumulated - 1) + 4 if accumulated else 0)
    last = size if lag <= 1 else 0
    return deferred * (sums + last + 24 + size) / window


def floors(record: dict[str, Any], speeds: dict[str, Any]) -> dict[str, float]:
    """Return the least seconds a step takes of each resource, were it used without a gap."""
    return {
        "compute": speeds["compute_seconds"]["median"],
        "d2h": record["d2h_bytes_per_step"] / speeds["link"]["d2h"],
        "h2d": record["h2d_bytes_per_step"] / speeds["link"]["h2d"],
        "host": record["host_bytes_per_step"] / speeds["host_bytes_per_second"],
    }


def complete(record: dict[str, Any], speeds: dict[str, Any]) -> None:
    """Add what follows from a record and the machine's speeds."""
    record["floor_seconds"] = floors(record, speeds)
    step = record["step_seconds"]["median"]
    record["times_compute"] = step / record["floor_seconds"]["compute"]
    record["times_floor"] = step / max(record["floor_seconds"].values())
    host = record["lanes"].get("host")
    if host is not None and host["busy_seconds"] > 0:
        updated = record["deferred_params"] / record["config"]["update_interval"]
        host["updated_params_per_second"] = updated * TRACED_STEPS / host["busy_seconds"]
        host["bytes_per_second"] = (
            record["host_bytes_per_step"] * TRACED_STEPS / host["busy_seconds"]
        )


def _rate(record: dict[str, Any], lane: str) -> str:
    rate = record["lanes"].get(lane, {}).get("bytes_per_second")
    return "-" if rate is None else f"{rate / 1e9:.1f}"


def _idle(record: dict[str, Any]) -> str:
    profiled = record["profiled"]
    return "-" if profiled is None else f"{100 * profiled['idle_share']:.1f}"


def _gigabytes(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.1f}"


def _host_params(record: dict[str, Any]) -> str:
    rate = record["lanes"].get("host", {}).get("updated_params_per_second")
    return "-" if rate is None else f"{rate / 1e6:.0f}"


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("ms/step", lambda r: f"{1e3 * r['step_seconds']['median']:.1f}"),
    ("p95", lambda r: f"{1e3 * r['step_seconds']['p95']:.1f}"),
    ("slowest", lambda r: f"{r['slowest_position']:.2f}"),
    ("x compute", lambda r: f"{r['times_compute']:.2f}"),
    ("x floor", lambda r: f"{r['times_floor']:.2f}"),
    ("tokens/s", lambda r: f"{r['tokens_per_second']:.0f}"),
    ("stall %", lambda r: f"{100 * r['stall_fraction']:.1f}"),
    ("idle %", _idle),
    ("MB down", lambda r: f"{r['d2h_bytes_per_step'] / 1e6:.0f}"),
    ("MB up", lambda r: f"{r['h2d_bytes_per_step'] / 1e6:.0f}"),
    ("GB/s down", lambda r: _rate(r, "d2h")),
    ("GB/s up", lambda r: _rate(r, "h2d")),
    ("host GB/s", lambda r: _rate(r, "host")),
    ("Mparam/s", _host_params),
    ("host %", lambda r: f"{100 * r['lanes'].get('host', {}).get('busy_share', 0.0):.0f}"),
    ("peak GB", lambda r: _gigabytes(r["peak_device_bytes"])),
    ("predicted", lambda r: _gigabytes(r["predicted_device_bytes"])),
    ("host GB", lambda r: _gigabytes(r["peak_host_bytes"])),
    ("loss", lambda r: f"{r['losses'][-1]:.3f}"),
)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the runs, one a line, and what each waited for."""
    header = f"{'':<16}" + "".join(f"{name:>{WIDTH}}" for name, _ in COLUMNS)
    lines = [header]
    for record in records:
        cells = "".join(f"{cell(record):>{WIDTH}}" for _, cell in COLUMNS)
        lines.append(f"{record['name']:<16}{cells}")
    for record in records:
        waits = record["stall_seconds_per_step"].items()
        listed = ", ".join(f"{cause} {1e3 * s:.2f}" for cause, s in waits if s > 0)
        bounds = ", ".join(f"{part} {1e3 * s:.1f}" for part, s in record["floor_seconds"].items())
        lines.append(
            f"{record['name']}: ms a step waited for: {listed or 'nothing'}; floors: {bounds}"
        )
    return "\n".join(lines)
