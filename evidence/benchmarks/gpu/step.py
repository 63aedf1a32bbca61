"""Decoders on a GPU under every preset: step times, stalls, traffic, memory, against their bounds.

    python -m evidence.benchmarks.gpu.step 3b [--out DIR] [--steps N] [--limit SECONDS]
    python -m evidence.benchmarks.gpu.step --smoke   on a tiny model and the CPU

A series is a model with batches from link-bound to compute-bound. Runs of a cell take turns one
after another in one process, `on_device` first and last, so that a drift of the machine shows.
Weights are random, the text is Python's own source. Each run leaves a compressed trace;
record.json has every step, and is written after each run. Ends with code 2 where there is no CUDA
device.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from evidence.benchmarks.gpu.baselines import (
    compute_seconds,
    distinct_gradients,
    fused_baseline,
)
from evidence.benchmarks.gpu.figures import (
    BASELINES,
    FUSED_MASTERS,
    TRACED_STEPS,
    complete,
    device_seconds,
    figures,
    host_bytes,
    lane_figures,
    shown_aims,
    shown_figures,
    slowest_position,
    table,
)
from evidence.benchmarks.gpu.setup import SERIES, Bench, host_peak_bytes, parse, speeds_of
from evidence.benchmarks.gpu.training import CLIP_NORM, LR, Training, num_steps, take_steps
from evidence.benchmarks.record import setting
from experiments.calibration.parts import synchronize
from experiments.output.files import write_json, write_text
from sim.hardware.unknown import generic_gpu
from sim.memory.need import memory_of
from sim.schedules.streams import Streams, layers_of
from sim.simulate import Strategy
from zenflow import Timeline, ZenFlowAdamW, ZenFlowConfig, stream_weights
from zenflow.config import PRESETS
from zenflow.device.kernels.choice import KernelChoice
from zenflow.host import kernel
from zenflow.rule.sizes import STREAMED_ELEMENTS
from zenflow.streaming.layers import find_layers
from zenflow.streaming.stream import WeightStream

RELEASE, KEEP = "release", "keep"
DRIFT = "on_device again"
_LEAST_SECONDS = 40.0
"""Seconds that must be left for another cell to be begun."""
_BESIDE_STEPS = 15.0
"""Seconds of a run beside its steps, at most: state is laid out, columns are chosen first."""


@dataclass(frozen=True)
class Run:
    """One strategy to measure."""

    name: str
    preset: str
    mode: str = RELEASE
    knobs: Mapping[str, Any] = field(default_factory=dict)
    kernels: KernelChoice = "auto"
    threads: float = 1.0
    """Number of the host's threads, over that of the command's options."""
    staying: float | None = None
    """Fraction of the layers that stay on the device while the others visit; None streams none."""

    def stream(self, model: nn.Module, bench: Bench) -> WeightStream | None:
        """Let the layers that don't stay visit the device."""
        if self.staying is None:
            return None
        layers = round(self.staying * len(find_layers(model)))
        least = 1 if bench.options.smoke else STREAMED_ELEMENTS
        return stream_weights(model, bench.device, resident_layers=layers, least_elements=least)

    def config(self, options: Namespace) -> ZenFlowConfig:
        """Return the configuration under a command's options."""
        config = ZenFlowConfig.preset(self.preset, **{**options.knobs, **self.knobs})
        if options.queue_depth is None or not config.is_exact:
            return config
        return ZenFlowConfig(**{**config.to_dict(), "queue_depth": options.queue_depth})


RUNS = (
    *(Run(preset, preset) for preset in PRESETS),
    Run("zenflow, S 2", "zenflow", knobs={"update_interval": 2}),
    Run("zenflow, S 16", "zenflow", knobs={"update_interval": 16}),
    Run("zenflow, keep", "zenflow", KEEP),
    Run("zenflow, torch's kernels", "zenflow", kernels="torch"),
    Run(DRIFT, "on_device"),
)
ALL_DEFERRED = Run("zenflow, k 0", "zenflow", knobs={"topk_ratio": 0.0})
"""A run for cards that have no room for important columns; only where it is asked for."""
_COMPACT = {"topk_ratio": 0.0, "host_state": "compact"}  # or the host had no room for homes
VISITS = (
    Run("all stay", "zenflow", knobs=_COMPACT),
    Run("half visit", "zenflow", knobs=_COMPACT, staying=0.5),
    Run("all visit", "zenflow", knobs=_COMPACT, staying=0.0),
)
"""Runs of streamed weights, with equal losses; only where they are asked for."""
FEWER_THREADS = Run("zenflow, half the threads", "zenflow", threads=0.5)
"""A run whose host leaves cores to the threads that launch kernels; only where it is asked for."""
_ASKED = (ALL_DEFERRED, FEWER_THREADS, *VISITS)
NAMES = (*BASELINES, *(run.name for run in (*RUNS, *_ASKED)))


def chosen(names: Sequence[str] | None) -> list[Run]:
    """Return the runs of some names, in their own order; without names those of `RUNS`."""
    return [run for run in (*RUNS, *_ASKED)
            if (run not in _ASKED if names is None else run.name in names)]  # fmt: skip


def measure(bench: Bench, run: Run, num_left: int) -> tuple[dict[str, Any], Timeline]:
    """Train under one strategy and return its record and the timeline of its last steps."""
    bench.free()
    made = time.perf_counter()
    model = bench.model()
    stream = run.stream(model, bench)
    config = run.config(bench.options)
    optimizer = ZenFlowAdamW(
        model.named_parameters(),
        lr=LR,
        config=config,
        offload_gradients="release" if run.mode == RELEASE else "keep",
        max_grad_norm=CLIP_NORM if run.mode == RELEASE else None,
        host_threads=max(1, round(run.threads * bench.options.host_threads)),
        kernels=run.kernels,
        timeline_steps=TRACED_STEPS,
    )
    try:
        synchronize(bench.device)
        bench.forget_peak()
        made = time.perf_counter() - made
        training = Training(bench, model, optimizer)
        budget = (bench.deadline - time.monotonic()) / num_left - made
        timed = take_steps(training, config.update_interval, bench.options, budget)
        reports = training.in_order()
        timeline = optimizer.timeline
        blocks = optimizer._running.layout.blocks
        deferred = sum(block.shape.deferred_elements for block in blocks)
        record = {
            "name": run.name,
            "preset": run.preset,
            "mode": run.mode,
            "kernels": optimizer._running.device.kernels.name,
            "config": config.to_dict(),
            "setup_seconds": made,
            "first_timed_step": timed.first,
            "wall_seconds": timed.wall_seconds,
            "garbage_collection": dict(timed.pauses),
            "thread_seconds": dict(timed.thread_seconds),
            "memory": optimizer.memory.to_dict(),
            "visiting_layers": 0 if stream is None else len(stream.pages),
            "peak_device_bytes": bench.peak_bytes(),
            "predicted_device_bytes": predicted_peak(bench, run),
            "peak_host_bytes": host_peak_bytes(),
            "deferred_params": deferred,
            **figures(reports, first=timed.first, tokens=bench.tokens),
            "slowest_position": slowest_position(reports, timed.first, config.update_interval),
            "lanes": lane_figures(timeline),
            "device_seconds": device_seconds(timeline),
            "host_bytes_per_step": host_bytes(config, deferred, optimizer.memory.queue_depth),
            "peaks": training.peaks(config.update_interval),
            "profiled": training.profiled(TRACED_STEPS),
            "step_ends": training.ends,
            "reports": [report.to_dict() for report in reports],
            "losses": [float(loss) for loss in training.losses],
        }
    finally:
        optimizer.close()
        if stream is not None:
            stream.close()
    return record, timeline


def predicted_peak(bench: Bench, run: Run) -> float | None:
    """Return the device memory that the simulator predicts, its context aside; None on a CPU."""
    if bench.device.type == "cpu":
        return None
    work, streams = bench.cell.workload(), None
    if run.staying is not None:
        streams = Streams(resident_layers=round(run.staying * len(layers_of(work.layers))))
    strategy = Strategy(
        name=run.preset, config=run.config(bench.options), releases=run.mode == RELEASE,
        streams=streams,
    )  # fmt: skip
    need = memory_of(work, strategy, generic_gpu())
    parts = (part for part in need.parts if part.place == "device" and part.name != "framework")
    return float(sum(part.num_bytes for part in parts))


def run_cell(
    bench: Bench, runs: Sequence[Run], cell: dict[str, Any], save: Callable[[], None]
) -> list[str]:
    """Measure a cell's runs one after another into its record.

    One that fails, or does not fit, doesn't take the others with it.

    Returns:
        The names of runs that time did not suffice for, judged by their own steps.
    """
    slowest = cell["speeds"]["compute_seconds"]["median"]
    left_out = []
    for index, run in enumerate(runs):
        steps = num_steps(run.config(bench.options).update_interval, bench.options)
        expected = _BESIDE_STEPS + steps * slowest
        if index and time.monotonic() + expected > bench.end:
            left_out.append(f"{bench.cell}: {run.name}")
            continue
        try:
            record, timeline = measure(bench, run, len(runs) - index)
        except torch.OutOfMemoryError:
            cell["does_not_fit"].append(run.name)
            print(f"{bench.cell}: {run.name} does not fit", flush=True)
        except Exception as error:  # noqa: BLE001 - named in the record and in the exit code
            traceback.print_exc()
            cell["failures"][run.name] = f"{type(error).__name__}: {error}"
        else:
            complete(record, cell["speeds"])
            cell["runs"].append(record)
            name = f"{bench.cell} {run.name}".replace(", ", "_").replace(" ", "_")
            timeline.write(bench.options.out / f"{name}.trace.json.gz")
            median = record["step_seconds"]["median"]
            slowest = max(slowest, median)
            print(f"{bench.cell}: {run.name}: {1e3 * median:.1f} ms a step", flush=True)
        save()
    return left_out


def run_series(options: Namespace, runs: Sequence[Run], whole: dict[str, Any]) -> None:
    """Measure cell after cell; those that time does not suffice for are named in the record."""
    deadline = time.monotonic() + options.limit
    cells = SERIES[options.series]

    def save() -> None:
        write_json(options.out / "record.json", whole)
        write_json(options.out / "figures.json", shown_figures(whole["cells"]))

    for index, cell in enumerate(cells):
        left = deadline - time.monotonic()
        if index and left < _LEAST_SECONDS:
            whole["not_reached"] += [str(cell) for cell in cells[index:]]
            break
        bench = Bench(cell, options, left / (len(cells) - index), end=deadline)
        own: dict[str, Any] = {
            "cell": bench.describe(), "runs": [], "failures": {}, "does_not_fit": [],
        }  # fmt: skip
        whole["cells"].append(own)
        try:
            own["speeds"] = {**whole["speeds"], "compute_seconds": compute_seconds(bench)}
            own["gradients"] = distinct_gradients(bench)
        except torch.OutOfMemoryError:  # no optimizer could train it here
            own["does_not_fit"].append("forward and backward")
            continue
        for name in BASELINES:
            if options.runs is None or name in options.runs:
                has_masters = name == FUSED_MASTERS
                own[name] = fused_baseline(bench, LR, CLIP_NORM, has_masters=has_masters)
                save()
        whole["not_reached"] += run_cell(bench, runs, own, save)
        own["compute_seconds_after"] = compute_seconds(bench)
    save()


def report_of(whole: Mapping[str, Any]) -> str:
    """Return every cell's table and what it says of the aims."""
    parts = []
    for cell in whole["cells"]:
        compute = cell.get("speeds", {}).get("compute_seconds", {}).get("median")
        title = cell["cell"]["name"]
        if compute is not None:
            title += f": forward and backward {1e3 * compute:.1f} ms"
        fused = cell.get("torch_fused")
        if fused is not None:
            title += f", torch's fused AdamW {1e3 * fused['step_seconds']['median']:.1f} ms a step"
        parts.append("\n".join([title, table(cell["runs"]), shown_aims(cell["runs"])]))
        parts += [f"{name} does not fit" for name in cell["does_not_fit"]]
        parts += [f"{name} FAILED: {why}" for name, why in cell["failures"].items()]
    parts += [f"not reached in time: {name}" for name in whole["not_reached"]]
    return "\n\n".join(parts)


def repeat_bits() -> None:
    """Let torch take kernels that repeat every bit; where it has none, it raises an error.

    With a mere warning cuDNN's attention would still add up in no fixed order.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # To fill new memory would cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a series; return the process's exit code."""
    options = parse(arguments, NAMES)
    if not options.smoke and not torch.cuda.is_available():
        print(
            "this benchmark needs a CUDA device and torch sees none; --smoke runs the script on "
            "a tiny model and the CPU",
            file=sys.stderr,
        )
        return 2
    if options.smoke:
        torch.set_num_threads(1)  # faster on tensors this small
    if options.device_gib is not None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.device_gib * 2**30 / total))
    if options.deterministic:
        repeat_bits()
    runs = chosen(options.runs)
    options.out.mkdir(parents=True, exist_ok=True)
    speeds = speeds_of(options)
    whole = setting(
        smoke=options.smoke,
        options={key: str(value) for key, value in vars(options).items()},
        kernel=kernel.active_kernel(),
        speeds=speeds,
        cells=[],
        not_reached=[],
    )
    link = ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in speeds["link"].items())
    print(
        f"{whole['hardware']['gpu'] or 'CPU, emulating a device'}, commit {whole['commit']}, "
        f"{whole['kernel']} kernel on {options.host_threads} threads, link: {link}, host "
        f"memory {speeds['host_bytes_per_second'] / 1e9:.1f} GB/s",
        flush=True,
    )
    run_series(options, runs, whole)
    text = report_of(whole)
    write_text(options.out / "table.txt", text + "\n")
    print(f"\n{text}\n\nrecord, traces and this table: {options.out}")
    return 1 if any(cell["failures"] for cell in whole["cells"]) else 0


if __name__ == "__main__":
    sys.exit(main())
