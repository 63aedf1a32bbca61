"""Inputs of a report whose every figure is known, made without training anything."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from autotune.decisions.file import Decision, DecisionLog, Header, WindowRecord
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs
from zenflow.trace.timeline import Span, Timeline

STEP_SECONDS = 1.0
NUM_STEPS = 6
STALL = (0.6, 0.9)
"""Of every step, in seconds from its start: the device waits."""


def timeline(num_steps: int = NUM_STEPS, source: str = "measured") -> Timeline:
    """Return steps of a second: 0.2 forward, 0.4 backward, 0.4 step, of that 0.3 stalled."""
    spans = []
    for step in range(1, num_steps + 1):
        at = (step - 1) * STEP_SECONDS
        spans += [
            Span("device", "forward", at, at + 0.2, step),
            Span("device", "backward", at + 0.2, at + 0.6, step),
            Span("device", "stall:h2d", at + STALL[0], at + STALL[1], step),
            Span("device", "step", at + 0.6, at + 1.0, step),
            Span("d2h", "grads", at + 0.3, at + 0.6, step, 3_000_000),
            Span("host", "adam", at + 0.6, at + 0.7, step),
            Span("h2d", "params", at + 0.7, at + 0.9, step, 1_000_000),
        ]
    return Timeline(tuple(spans), {"source": source, "emulated_link": False})


def write_run(folder: Path, strategy: str = "zenflow", **changes: Any) -> Path:
    """Write a run of six steps, with a trace."""
    folder.mkdir(parents=True)
    timeline().write(folder / "trace.json")
    rows = [
        {"step": n, "loss": 4 - n / 4, "tokens": 100, "seconds": 1.0, "stall_seconds": 0.3,
         "skipped": False, "update_interval": 2}
        for n in range(1, NUM_STEPS + 1)
    ]  # fmt: skip
    rows[2]["eval_loss"] = 3.5
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"strategy": strategy, "seed": 7, "steps": NUM_STEPS, "link": None}
    config = {"settings": settings, "config": {"update_interval": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    summary = {
        "strategy": strategy, "config": {"update_interval": 2}, "emulated_link": None,
        "steps": NUM_STEPS, "planned_steps": NUM_STEPS, "mean_step_seconds": 1.0,
        "p95_step_seconds": 1.0, "stall_seconds": 1.8, "stall_fraction": 0.3,
        "d2h_bytes_per_step": 3e6, "h2d_bytes_per_step": 1e6, "tokens_per_second": 100.0,
        "final_train_loss": 2.6, "eval_loss": 2.5, "seed": 7, "commit": "c0ffee",
        "versions": {"python": "3.11"}, "hardware": {"cpu": "a CPU", "cores": 2, "gpu": None},
    } | changes  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def write_decisions(folder: Path) -> None:
    """Let a run have been tuned: S from 2 to 4 after step 3, expected at 0.8 s, then 0.9 s."""
    before = Knobs.of(ZenFlowConfig(update_interval=2))
    after = Knobs.of(ZenFlowConfig(update_interval=4))
    log = DecisionLog(folder / "decisions.jsonl")
    log.start(
        Header(settings={}, knobs=before, largest_interval=8, hardware={}, versions={}, commit="c")
    )
    for number, (step, knobs, seconds) in enumerate([(3, before, 1.0), (6, after, 0.9)]):
        if knobs is after:
            log.append(
                Decision(
                    step=3, window=0, by="twin", old=before, new=after,
                    predicted_step_seconds=0.8, measured_step_seconds=1.0, gain=0.2, error=0.01,
                    rho=0.5, reason="<b>a bold reason</b>",
                )
            )  # fmt: skip
        log.append(
            WindowRecord(
                step=step, window=number, knobs=knobs, step_seconds=seconds, stall_seconds=0.3,
                predicted_step_seconds=0.8 if number else None, goodput=1.0, rho=0.5,
                constants={}, search_seconds=0.5,
            )
        )  # fmt: skip
    log.end(step=6, search_seconds=0.5, run_seconds=6.0)
    log.close()


def write_sweep(folder: Path) -> Path:
    """Write a table of 3 x 2 x 2 points, one of which does not fit, with its provenance."""
    folder.mkdir(parents=True)
    rows = [
        {"gpu": gpu, "S": interval, "k": ratio, "status": "ok", "model": "llama",
         "step_seconds": speed / interval + ratio, "stall_share": 0.25}
        for gpu, speed in (("rtx4090", 4.0), ("a100", 2.0), ("h100", 1.0))
        for interval in (2, 10)
        for ratio in (0.1, 0.2)
    ]  # fmt: skip
    rows[0] |= {"step_seconds": "", "status": "does not fit"}
    with open(folder / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    record = {
        "question": "What helps most?",
        "answer": ["An H100 does."],
        "kind": "predicted: nothing here was measured",
        "sweep": {"axes": {"gpu": [], "S": [], "k": []}},
        "columns": {"step_seconds": "mean steady-state step"},
        "sessions": [{"commit": "deadbeef", "hardware": {"cpu": "a CPU"}, "versions": {}}],
    }
    (folder / "provenance.json").write_text(json.dumps(record))
    return folder


def write_profile(path: Path) -> Path:
    """Write what torch.profiler might have: two steps, calls in calls, a copy with bytes."""
    microseconds = [
        ("ProfilerStep#1", 1000.0, 400.0, {}), ("aten::linear", 1010.0, 100.0, {}),
        ("aten::addmm", 1020.0, 50.0, {}), ("ProfilerStep#2", 1400.0, 600.0, {}),
        ("Memcpy HtoD", 1500.0, 100.0, {"bytes": 4096}),
    ]  # fmt: skip
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": dur,
         "args": args} for name, ts, dur, args in microseconds
    ]  # fmt: skip
    events.append({"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans",
                   "tid": "PyTorch Profiler", "ts": 0.0, "dur": 9e9})  # fmt: skip
    events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "main"}})
    path.write_text(json.dumps({"deviceProperties": [], "traceEvents": events}))
    return path
