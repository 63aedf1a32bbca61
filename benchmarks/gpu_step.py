"""A decoder of 1B parameters on a GPU under every preset: step times, stalls, traffic, memory.

    python -m benchmarks.gpu_step [--out DIR] [--steps N] [--layers 18 --hidden 2048 ...]
    python -m benchmarks.gpu_step --smoke        the same script on a tiny model and the CPU

Runs take turns one after another in one process, `on_device` first and last, so that a drift of
the machine shows. Tokens are random: losses say that the weights move, not how well. Each run
writes its trace; record.json has every step. Ends with code 2 where there is no CUDA device.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.gpu_figures import (
    TRACED_STEPS,
    complete,
    figures,
    host_bytes,
    lane_figures,
    table,
)
from benchmarks.gpu_setup import Bench, compute_seconds, parse, speeds_of
from benchmarks.record import setting
from experiments.records import write_json
from zenflow import StepReport, Timeline, ZenFlowAdamW, ZenFlowConfig, kernel
from zenflow.config import PRESETS

RELEASE, KEEP = "release", "keep"
CLIP_NORM, LR = 1.0, 1e-4
DRIFT = "on_device again"


@dataclass(frozen=True)
class Run:
    """One strategy to measure."""

    name: str
    preset: str
    mode: str = RELEASE


RUNS = (
    *(Run(preset, preset) for preset in PRESETS),
    Run("zenflow, keep", "zenflow", KEEP),
    Run(DRIFT, "on_device"),
)


@dataclass
class Measured:
    """What a run's steps gave; the warm-up's come first."""

    reports: dict[int, StepReport] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)

    def note(self, optimizer: ZenFlowAdamW) -> None:
        """Keep the last finished step's report; on a GPU that is the step before the last."""
        if optimizer.report is not None:
            self.reports[optimizer.report.step] = optimizer.report


def train(
    bench: Bench, model: nn.Module, optimizer: ZenFlowAdamW, budget: float
) -> tuple[Measured, int]:
    """Take the warm-up and the timed steps; fewer of them, whole windows, if time runs out.

    Nothing here waits for the device: losses are read at the end.

    Returns:
        What was measured, and the first timed step.
    """
    measured = Measured()
    options = bench.options
    started, taken = time.monotonic(), 0
    last = options.warm_steps + options.steps
    least = options.warm_steps + TRACED_STEPS
    while taken < last:
        with optimizer.span("forward"):
            loss = bench.loss(model, taken)
        with optimizer.span("backward"):
            loss.backward()
        if not optimizer.releases_gradients:
            optimizer.clip_grad_norm_(CLIP_NORM)
        optimizer.step()
        measured.losses.append(loss.detach())
        measured.note(optimizer)
        taken += 1
        is_late = time.monotonic() - started > budget
        if is_late and taken >= least and (taken - least) % TRACED_STEPS == 0:
            break
    optimizer.synchronize()
    measured.note(optimizer)
    return measured, options.warm_steps + 1


def measure(bench: Bench, run: Run, num_left: int) -> tuple[dict[str, Any], Timeline]:
    """Train under one strategy and return its record and the timeline of its last steps."""
    bench.free()
    made = time.perf_counter()
    model = bench.model()
    optimizer = ZenFlowAdamW(
        model.named_parameters(),
        lr=LR,
        config=ZenFlowConfig.preset(run.preset, **bench.options.knobs),
        max_grad_norm=CLIP_NORM if run.mode == RELEASE else "keep",
        host_threads=bench.options.host_threads,
        timeline_steps=TRACED_STEPS,
    )
    try:
        bench.synchronize()
        bench.forget_peak()
        made = time.perf_counter() - made
        budget = (bench.deadline - time.monotonic()) / num_left - made
        measured, first = train(bench, model, optimizer, budget)
        timeline = optimizer.timeline
        layout = optimizer._running.layout
        deferred = sum(block.shape.deferred_elements for block in layout.blocks)
        record = {
            "name": run.name,
            "mode": run.mode,
            "config": optimizer.config.to_dict(),
            "setup_seconds": made,
            "first_timed_step": first,
            "memory": optimizer.memory.to_dict(),
            "peak_device_bytes": bench.peak_bytes(),
            "host_resident_bytes": psutil.Process().memory_info().rss,
            "deferred_params": deferred,
            "losses": [float(loss) for loss in measured.losses],
            "reports": [report.to_dict() for report in measured.reports.values()],
            **figures(list(measured.reports.values()), first=first, tokens=bench.tokens),
            "lanes": lane_figures(timeline),
            "host_bytes_per_step": host_bytes(optimizer.config, deferred),
        }
    finally:
        optimizer.close()
    return record, timeline


def run_all(bench: Bench, runs: Sequence[Run], whole: dict[str, Any]) -> bool:
    """Measure one run after another; return whether all went well.

    The record is written after each, and one that fails doesn't take the others with it.
    """
    out: Path = bench.options.out
    for index, run in enumerate(runs):
        try:
            record, timeline = measure(bench, run, len(runs) - index)
        except Exception as error:  # noqa: BLE001 - named in the record and in the exit code
            traceback.print_exc()
            whole["failures"][run.name] = f"{type(error).__name__}: {error}"
        else:
            complete(record, whole["speeds"])
            whole["runs"].append(record)
            file_name = run.name.replace(", ", "_").replace(" ", "_")
            timeline.write(out / f"{file_name}.trace.json")
            print(
                f"{run.name}: {1e3 * record['step_seconds']['median']:.1f} ms a step", flush=True
            )
        write_json(out / "record.json", whole)
    return not whole["failures"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print(
            "this benchmark needs a CUDA device and torch sees none; --smoke runs the script on "
            "a tiny model and the CPU",
            file=sys.stderr,
        )
        return 2
    if options.smoke:
        torch.set_num_threads(1)  # faster on tensors this small
    bench = Bench(options)
    runs = [run for run in RUNS if run.preset in options.presets]
    options.out.mkdir(parents=True, exist_ok=True)
    speeds = speeds_of(bench)
    whole = setting(
        smoke=options.smoke,
        options={key: str(value) for key, value in vars(options).items()},
        kernel=kernel.active_kernel(),
        speeds=speeds,
        runs=[],
        failures={},
    )
    link = ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in speeds["link"].items())
    print(
        f"{whole['hardware']['gpu'] or 'CPU, emulating a device'}, commit {whole['commit']}, "
        f"{whole['kernel']} kernel on {options.host_threads} threads, link: {link}, host copy "
        f"{speeds['host_copy_bytes_per_second'] / 1e9:.1f} GB/s, forward and backward "
        f"{1e3 * speeds['compute_seconds']['median']:.1f} ms",
        flush=True,
    )
    went_well = run_all(bench, runs, whole)
    whole["compute_seconds_after"] = compute_seconds(bench)
    text = table(whole["runs"])
    (options.out / "table.txt").write_text(text + "\n", encoding="utf-8")
    write_json(options.out / "record.json", whole)
    print(f"\n{text}\n\nrecord, traces and this table: {options.out}")
    return 0 if went_well else 1


if __name__ == "__main__":
    sys.exit(main())
