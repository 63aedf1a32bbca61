"""Statistics of the GPU benchmark's runs: numbers, floors, a table, the aims. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from evidence.benchmarks.record import spread
from experiments.lab.losses import excess
from sim.timing.host_passes import window_bytes
from zenflow import StepReport, Timeline, ZenFlowConfig

TRACED_STEPS = 8  # at the end of each run: two windows
WIDTH = 11  # of a column
FUSED, FUSED_MASTERS = BASELINES = ("torch_fused", "torch_fused, float32 masters")
"""Names of torch's own AdamW, in the model's dtype and with float32 masters."""
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


def figures(reports: Sequence[StepReport], *, first: int, tokens: int) -> dict[str, Any]:
    """Return statistics over the timed steps, those from `first` on.

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


def host_bytes(config: ZenFlowConfig, deferred: int, depth: int, size: int = 2) -> float:
    """Return the bytes that the host must read and write per step, on average.

    A pass over an element's state reads and writes master and both moments, and reads the
    gradients that it takes in; a window's last pass writes the weight, too. The published rule
    adds gradients to a sum, which is written once, read and written after that, and read by the
    update.

    Args:
        config: The update rule's settings.
        deferred: Number of elements that the host owns.
        depth: Number of gradients that wait for a pass, q.
        size: Bytes of an element of the model.
    """
    return deferred * sum(window_bytes(config, size, depth)) / config.update_interval


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


def device_seconds(timeline: Timeline) -> dict[str, float]:
    """Return the device's seconds in each part of a step: forward, backward and step()."""
    by_name = timeline.by_name()
    return {
        name: by_name["device", name] / TRACED_STEPS
        for name in ("forward", "backward", "step")
        if ("device", name) in by_name
    }


LAUNCHING = ("MainThread", "pt_autograd")
"""Threads that launch kernels: in forward and `step()`, and in backward."""


def shown_figures(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the few numbers of each run that a short table shows, by cell and run."""
    found: dict[str, float] = {}
    for cell in cells:
        name = cell["cell"]["name"]
        baselines = [{"name": key, **cell[key]} for key in BASELINES if cell.get(key)]
        for run in [*baselines, *cell["runs"]]:
            own = f"{name}: {run['name']}"
            found[f"{own}, ms a step"] = 1e3 * run["step_seconds"]["median"]
            if run["peak_device_bytes"] is not None:
                found[f"{own}, peak GiB"] = run["peak_device_bytes"] / 2**30
            if "device_seconds" in run:
                found[f"{own}, ms of step()"] = 1e3 * run["device_seconds"].get("step", 0.0)
                found[f"{own}, stalled %"] = 100 * run["stall_fraction"]
            for thread in LAUNCHING:
                if seconds := run.get("thread_seconds", {}).get(thread):
                    found[f"{own}, CPU ms of {thread}"] = 1e3 * seconds
        if repeated := cell.get("gradients"):
            again = f"gradients of one batch, computed {repeated['times']} times: distinct ones"
            found[f"{name}: {again}"] = repeated["distinct"]
        visits = [run["losses"] for run in cell["runs"] if "visit" in run["name"]]
        stays = next((run["losses"] for run in cell["runs"] if run["name"] == "all stay"), None)
        if visits and stays is not None:
            found[f"{name}: losses that visits change"] = sum(
                own != usual
                for losses in visits
                for own, usual in zip(losses, stays, strict=False)  # as many as time sufficed for
            )
    return found


def _shown(value: float | None, form: str = ".1f", unit: float = 1e9) -> str:
    """Return a value in a unit; a dash where there is none."""
    return "-" if value is None else format(value / unit, form)


def _lane(record: dict[str, Any], lane: str, name: str = "bytes_per_second") -> float | None:
    found: float | None = record["lanes"].get(lane, {}).get(name)
    return found


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("ms/step", lambda r: f"{1e3 * r['step_seconds']['median']:.1f}"),
    ("p95", lambda r: f"{1e3 * r['step_seconds']['p95']:.1f}"),
    ("slowest", lambda r: f"{r['slowest_position']:.2f}"),
    ("x compute", lambda r: f"{r['times_compute']:.2f}"),
    ("x floor", lambda r: f"{r['times_floor']:.2f}"),
    ("tokens/s", lambda r: f"{r['tokens_per_second']:.0f}"),
    ("stall %", lambda r: f"{100 * r['stall_fraction']:.1f}"),
    ("idle %", lambda r: _shown(r["profiled"] and 100 * r["profiled"]["idle_share"], unit=1)),
    ("MB down", lambda r: f"{r['d2h_bytes_per_step'] / 1e6:.0f}"),
    ("MB up", lambda r: f"{r['h2d_bytes_per_step'] / 1e6:.0f}"),
    ("GB/s down", lambda r: _shown(_lane(r, "d2h"))),
    ("GB/s up", lambda r: _shown(_lane(r, "h2d"))),
    ("host GB/s", lambda r: _shown(_lane(r, "host"))),
    ("Mparam/s", lambda r: _shown(_lane(r, "host", "updated_params_per_second"), ".0f", 1e6)),
    ("host %", lambda r: f"{100 * (_lane(r, 'host', 'busy_share') or 0.0):.0f}"),
    ("peak GB", lambda r: _shown(r["peak_device_bytes"])),
    ("predicted", lambda r: _shown(r["predicted_device_bytes"])),
    ("host GB", lambda r: _shown(r["peak_host_bytes"])),
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
        above = excess(run["losses"], device["losses"])
        text = f"{name}: loss above on_device's, at most {MOST_LOSS:.0%}"
        yield Aim(text, above, above <= MOST_LOSS)
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


def shown_aims(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the aims, one a line."""
    return "\n".join(str(aim) for aim in aims(runs))
