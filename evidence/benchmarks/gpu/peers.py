"""Other optimizers on the model, weights, batches and clip norm of our own benchmark.

    python -m evidence.benchmarks.gpu.peers [--out DIR]
    python -m evidence.benchmarks.gpu.peers --smoke    a tiny model on the CPU

Each engine runs in a process of its own, ours first and last so that a drift of the machine shows.
Steps follow each other without a wait, with one at their end. An engine that is not installed, or
does not fit, is a row that says so. What an engine can't do, as to clip, is in its row.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from evidence.benchmarks.gpu.baselines import fused_steps
from evidence.benchmarks.gpu.loan.guard import guarded
from evidence.benchmarks.gpu.setup import SERIES, Bench, host_peak_bytes, parse
from evidence.benchmarks.gpu.training import CLIP_NORM, LR
from evidence.benchmarks.record import setting
from experiments.calibration.parts import synchronize
from experiments.output.files import write_json, write_text
from zenflow import ZenFlowAdamW, ZenFlowConfig

_WARM, _TIMED = 3, 10
_LIMIT = 45.0
"""Seconds of a process: one engine on all cells."""

Stepper = tuple[Callable[[], None], Callable[[], None]]
"""Function that takes a step behind backward, and one that ends the engine."""


def _nothing() -> None:
    return None


def _zenflow(model: nn.Module, bench: Bench) -> Stepper:
    config = ZenFlowConfig(**bench.options.knobs)
    optimizer = ZenFlowAdamW(
        model.named_parameters(), lr=LR, config=config, max_grad_norm=CLIP_NORM,
        offload_gradients="release",
    )  # fmt: skip

    def end() -> None:
        optimizer.synchronize()
        optimizer.close()

    return optimizer.step, end


def _fused(model: nn.Module, bench: Bench) -> Stepper:
    return fused_steps(model, LR, CLIP_NORM, has_masters=False), _nothing


def _fused_masters(model: nn.Module, bench: Bench) -> Stepper:
    return fused_steps(model, LR, CLIP_NORM, has_masters=True), _nothing


def _fsdp2(model: nn.Module, bench: Bench) -> Stepper:
    """Shard over one rank with float32 weights on the host, and step there."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    on_gpu = bench.device.type == "cuda"
    folder = tempfile.mkdtemp()
    init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=0,
        world_size=1,
    )
    mesh = init_device_mesh(bench.device.type, (1,))
    model.float()
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
    }
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    def end() -> None:
        destroy_process_group()
        shutil.rmtree(folder)

    return step, end


def _torchao(model: nn.Module, bench: Bench) -> Stepper:
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found]

    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, lr=LR
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step, _nothing


def _bitsandbytes(model: nn.Module, bench: Bench) -> Stepper:
    from bitsandbytes.optim import AdamW8bit

    optimizer = AdamW8bit(model.parameters(), lr=LR)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step, _nothing


ENGINES: Mapping[str, tuple[Callable[[nn.Module, Bench], Stepper], str]] = {
    "zenflow": (_zenflow, "float32 masters and moments, most of them on the host"),
    "torch_fused": (_fused, "all in bfloat16, on the device"),
    "torch_fused, float32 masters": (_fused_masters, "float32 masters and moments on the device"),
    "fsdp2, CPU offload": (_fsdp2, "float32 on the host"),
    "torchao, CPU offload": (_torchao, "bfloat16 on the host; can't clip"),
    "bitsandbytes, 8 bits": (_bitsandbytes, "moments of 8 bits on the device, no masters"),
    "zenflow again": (_zenflow, "float32 masters and moments, most of them on the host"),
}
"""Constructor of each engine, and the place of its state."""


def measure(name: str, bench: Bench) -> dict[str, Any]:
    """Return one engine's row for a cell."""
    bench.free()
    model = bench.model()
    make, state = ENGINES[name]
    bench.forget_peak()
    step, end = make(model, bench)
    try:
        for number in range(_WARM + _TIMED):
            if number == _WARM:
                synchronize(bench.device)
                started = time.perf_counter()
            loss = bench.loss(model, number)
            loss.backward()
            step()
        synchronize(bench.device)
        seconds = (time.perf_counter() - started) / _TIMED
    finally:
        end()
    return {
        "engine": name,
        "cell": str(bench.cell),
        "state": state,
        "step_seconds": seconds,
        "tokens_per_second": bench.tokens / seconds,
        "peak_device_bytes": bench.peak_bytes(),
        "peak_host_bytes": host_peak_bytes(),
        "last_loss": float(loss.detach()),
    }


def cells_of(options: Namespace) -> Sequence[Any]:
    """Return the cells that all engines run."""
    return SERIES["smoke"] if options.smoke else SERIES["1b-short"][:2]


def run_engine(name: str, options: Namespace) -> int:
    """Measure one engine in this process, a JSON line for each cell."""
    for cell in cells_of(options):
        bench = Bench(cell, options, _LIMIT, end=time.monotonic() + _LIMIT)
        try:
            row = measure(name, bench)
        except ModuleNotFoundError as error:
            row = {"engine": name, "cell": str(cell), "failed": f"not installed ({error.name})"}
        except torch.OutOfMemoryError:
            row = {"engine": name, "cell": str(cell), "failed": "does not fit"}
        except Exception as error:  # noqa: BLE001 - named in the row
            traceback.print_exc()
            row = {"engine": name, "cell": str(cell), "failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(row), flush=True)
    return 0


def rows_of(name: str, options: Namespace) -> list[dict[str, Any]]:
    """Run one engine in a process of its own and return its rows."""
    command = [sys.executable, "-m", "evidence.benchmarks.gpu.peers", "--engine", name]
    command += ["--smoke"] if options.smoke else []
    done = subprocess.run(guarded(command, _LIMIT), stdout=subprocess.PIPE, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    left = [str(cell) for cell in cells_of(options)[len(rows) :]]
    reason = f"ended with code {done.returncode}; 124 is {_LIMIT:.0f} s"
    return [*rows, *({"engine": name, "cell": cell, "failed": reason} for cell in left)]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each row."""
    lines = [f"{'engine':<30}{'cell':<18}{'ms a step':>10}{'device GB':>11}{'host GB':>9}  state"]
    for row in rows:
        start = f"{row['engine']:<30}{row['cell']:<18}"
        if "failed" in row:
            lines.append(f"{start}{row['failed']}")
            continue
        device, host = (
            "-" if row[key] is None else f"{row[key] / 1e9:.1f}"
            for key in ("peak_device_bytes", "peak_host_bytes")
        )
        seconds = 1e3 * row["step_seconds"]
        lines.append(f"{start}{seconds:>10.1f}{device:>11}{host:>9}  {row['state']}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all engines, or one in this process; return the exit code."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--engine", choices=list(ENGINES))
    chosen, rest = own.parse_known_args(arguments)
    options = parse(rest, ())
    if not options.smoke and not torch.cuda.is_available():
        print("torch sees no CUDA device: install a CUDA build of torch", file=sys.stderr)
        return 2
    if chosen.engine is not None:
        return run_engine(chosen.engine, options)
    options.out.mkdir(parents=True, exist_ok=True)
    whole = setting(smoke=options.smoke, warm=_WARM, timed=_TIMED, rows=[])
    for name in ENGINES:
        whole["rows"] += rows_of(name, options)
        write_json(options.out / "record.json", whole)
        write_text(options.out / "table.txt", table(whole["rows"]) + "\n")
        shown = {
            f"{row['cell']}: {row['engine']}, ms a step": row.get("failed")
            or 1e3 * row["step_seconds"]
            for row in whole["rows"]
        }
        write_json(options.out / "figures.json", shown)
    print(table(whole["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
