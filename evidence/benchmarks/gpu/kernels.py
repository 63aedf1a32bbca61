"""Time of a GPU in a step of the 1B decoder, kernel by kernel.

    python -m evidence.benchmarks.gpu.kernels [--out DIR]
    python -m evidence.benchmarks.gpu.kernels --smoke    a tiny model and the CPU's operations

Leaves torch's table of the kernels that take longest, and its trace for Perfetto.
"""

from __future__ import annotations

import gzip
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from evidence.benchmarks.gpu.setup import SERIES, Bench, parse
from evidence.benchmarks.gpu.training import CLIP_NORM, LR, Training
from evidence.benchmarks.record import setting
from experiments.output.files import write_json, write_text
from zenflow import ZenFlowAdamW, ZenFlowConfig

_WARM, _STEPS, _ROWS = 10, 4, 30


def profiled(bench: Bench) -> profile:
    """Return the profiler's results for a window of steps under the defaults."""
    model = bench.model()
    config = ZenFlowConfig(**bench.options.knobs)
    optimizer = ZenFlowAdamW(
        model.named_parameters(), lr=LR, config=config, max_grad_norm=CLIP_NORM,
        offload_gradients="release", host_threads=bench.options.host_threads,
    )  # fmt: skip
    on_gpu = bench.device.type == "cuda"
    seen = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with closing(optimizer):
        training = Training(bench, model, optimizer)
        training.take(_WARM)
        training.finish()
        found = profile(activities=seen)
        with found:
            training.take(_STEPS)
            training.finish()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile a window of steps; return the process's exit code."""
    options = parse(arguments, ())
    if not options.smoke and not torch.cuda.is_available():
        print("torch sees no CUDA device: install a CUDA build of torch", file=sys.stderr)
        return 2
    cell = SERIES["smoke" if options.smoke else "1b-short"][0]
    options.out.mkdir(parents=True, exist_ok=True)
    found = profiled(Bench(cell, options, options.limit, end=options.limit))
    averages = found.key_averages()
    key = "self_cpu_time_total" if options.smoke else "self_device_time_total"
    table = averages.table(sort_by=key, row_limit=_ROWS, max_name_column_width=90)
    write_text(options.out / "table.txt", f"{cell}, {_STEPS} steps\n{table}\n")
    rows = [
        {"name": row.key, "seconds": 1e-6 * getattr(row, key), "count": row.count}
        for row in sorted(averages, key=lambda row: -getattr(row, key))[:_ROWS]
    ]
    write_json(options.out / "record.json",
               setting(smoke=options.smoke, cell=str(cell), steps=_STEPS, rows=rows))  # fmt: skip
    shown = {
        f"{place}. {row['name'][:40]}, ms a step": 1e3 * row["seconds"] / _STEPS
        for place, row in enumerate(rows[:10], start=1)
    }
    write_json(options.out / "figures.json", shown)
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        found.export_chrome_trace(str(trace))
        with (
            open(trace, "rb") as source,
            gzip.open(options.out / "kernels.trace.json.gz", "wb") as target,
        ):
            shutil.copyfileobj(source, target)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
