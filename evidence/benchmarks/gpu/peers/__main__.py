"""One model under many optimizers, with equal data, batches and clipping, in one table.

    python -m evidence.benchmarks.gpu.peers [--out DIR] [--engines NAME ...]
    python -m evidence.benchmarks.gpu.peers --device cpu   a small model, what a CPU can run
    python -m evidence.benchmarks.gpu.peers --smoke        a tiny model on the CPU

Each engine runs in a process of its own, ours first and last so that a drift of the machine shows.
An engine that is not installed, needs a GPU, does not fit or is killed is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from evidence.benchmarks.gpu.loan.bring import missing_of
from evidence.benchmarks.gpu.loan.guard import guarded
from evidence.benchmarks.gpu.peers.engines import ENGINES
from evidence.benchmarks.gpu.peers.measure import LEAST, LOSS_STEP, MOST, WARM, measure
from evidence.benchmarks.gpu.peers.resume import verdict
from evidence.benchmarks.gpu.peers.table import ending, shares, table
from evidence.benchmarks.gpu.setup import SERIES, SMOKE, Bench, Cell
from evidence.benchmarks.record import setting
from experiments.output.files import write_json, write_text

_NAME = "evidence.benchmarks.gpu.peers"
_SMALL = (Cell(model="3m", batch=2, sequence=128),)
_MOST, _LEAST = 45.0, 12.0
"""Most seconds of an engine's process, and the fewest that it is begun with."""
_START, _RESUME = 8.0, 5.0
"""Seconds of a process before its first cell, and for its checkpoint behind the last."""
_COMPILING = 150.0
"""Most seconds in which a package compiles what it needs."""
_BUILDS = Path(tempfile.gettempdir()) / "zenflow-peers"
"""Folder of what has been compiled."""
_COMPILE = "from evidence.benchmarks.gpu.peers import deepspeed; deepspeed.compile_kernels()"


def parse(arguments: Sequence[str] | None) -> Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(prog=f"python -m {_NAME}", description="Optimizers compared.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/gpu_peers"), help="for record.json, table.txt")
    add("--engines", nargs="+", choices=list(ENGINES), metavar="NAME", help="these only")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--limit", type=float, default=500, help="seconds for all engines together")
    add("--smoke", action="store_true", help="tiny, on the CPU: tests the script")
    add("--engine", choices=list(ENGINES), help=argparse.SUPPRESS)  # one, in this process
    add("--rows", type=Path, help=argparse.SUPPRESS)  # file for its rows
    options = parser.parse_args(arguments)
    options.knobs = SMOKE["knobs"] if options.smoke else {}
    options.device = "cpu" if options.smoke else options.device
    return options


def cells_of(options: Namespace) -> Sequence[Cell]:
    """Return the cells that all engines run."""
    if options.smoke:
        return SERIES["smoke"]
    return _SMALL if options.device == "cpu" else SERIES["1b-short"][:2]


def run_engine(name: str, options: Namespace) -> None:
    """Measure one engine in this process; append a JSON line for each cell, and how it resumes."""
    peer, cells = ENGINES[name], cells_of(options)
    end = time.monotonic() + options.limit - _START - _RESUME
    took = 0.0
    for index, cell in enumerate(cells):
        started = time.monotonic()
        left = end - started
        if left < took:
            _append(options, {"engine": name, "cell": str(cell), "failed": "no time left"})
            continue
        bench = Bench(cell, options, left, end=end, device=options.device)
        share = left / (len(cells) - index) / 2  # its warm-up and the rest take the other half
        made = _attempt(partial(measure, name, peer, bench, share))
        found = made if isinstance(made, dict) else {"failed": made}
        _append(options, {"engine": name, "cell": str(cell), **found})
        took = time.monotonic() - started
    tiny = Namespace(**{**vars(options), "knobs": SMOKE["knobs"]})
    bench = Bench(SERIES["smoke"][0], tiny, _RESUME, end=end, device=options.device)
    _append(options, {"resume": str(_attempt(partial(verdict, peer, bench)))})


def _attempt(work: Callable[[], Any]) -> Any:
    """Return the result of some work, or how it failed."""
    try:
        return work()
    except torch.OutOfMemoryError:
        return "does not fit"
    except Exception as error:  # noqa: BLE001 - named in the row
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        return f"fails with {type(error).__name__}: {first[:120]}"


def _append(options: Namespace, found: dict[str, Any]) -> None:
    with open(options.rows, "a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def command_of(name: str, options: Namespace, rows: Path, limit: float) -> list[str]:
    """Return the command line of an engine's process."""
    command = [sys.executable, "-m", _NAME, "--engine", name, "--rows", str(rows)]
    command += ["--device", options.device, "--limit", f"{limit:.1f}"]
    return [*command, *(["--smoke"] if options.smoke else [])]


def rows_of(name: str, options: Namespace, limit: float) -> list[dict[str, Any]]:
    """Run one engine in a process of its own; return a row for each cell, whatever happens."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        command = guarded(command_of(name, options, file, limit), limit)
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    rows = [each for each in found if "engine" in each]
    reason = ending(code, limit)
    told = next((each["resume"] for each in found if "resume" in each), f"not tried: {reason}")
    return [
        *({**row, "resume": told} for row in rows),
        *_failed(name, options, reason, skipped=len(rows)),
    ]


def _failed(name: str, options: Namespace, reason: str, skipped: int = 0) -> list[dict[str, Any]]:
    cells = cells_of(options)[skipped:]
    return [{"engine": name, "cell": str(cell), "failed": reason} for cell in cells]


def reason_against(name: str, options: Namespace) -> str:
    """Return why an engine can't run here; nothing if it may."""
    peer = ENGINES[name]
    if missing_of([peer.package]):
        return f"not installed ({peer.package})"
    return "needs a GPU" if peer.needs_gpu and options.device == "cpu" else ""


def compiled(limit: float) -> str:
    """Have DeepSpeed compile its kernels; return why it did not, nothing if it did."""
    is_own = os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_BUILDS)) == str(_BUILDS)
    command = guarded([sys.executable, "-c", _COMPILE], limit)
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if not code:
        return ""
    if is_own:  # a lock that is left there would hold all later builds up
        shutil.rmtree(_BUILDS, ignore_errors=True)
    return f"its kernels don't compile: {ending(code, limit)}"


def run_all(options: Namespace, whole: dict[str, Any]) -> None:
    """Run engines one after another, and write the record behind each."""
    end = time.monotonic() + options.limit
    names = options.engines or list(ENGINES)
    reasons = {name: reason_against(name, options) for name in names}
    for name in names:
        waiting = [each for each in names[names.index(name) :] if not reasons[each]]
        if not reasons[name] and ENGINES[name].package == "deepspeed" and "kernels" not in whole:
            whole["kernels"] = compiled(min(_COMPILING, (end - time.monotonic()) / 2))
            same = (each for each in names if ENGINES[each].package == "deepspeed")
            reasons |= {each: reasons[each] or whole["kernels"] for each in same}
        left = end - time.monotonic()
        # Most engines need less than their part of the time, so one may take more.
        limit = min(_MOST, left, 1.5 * left / max(1, len(waiting)))
        if not reasons[name] and limit < _LEAST:
            reasons[name] = "no time left"
        if reasons[name]:
            whole["rows"] += _failed(name, options, reasons[name])
        else:
            whole["rows"] += rows_of(name, options, limit)
        _save(options, whole)


def _save(options: Namespace, whole: dict[str, Any]) -> None:
    rows = whole["rows"]
    write_json(options.out / "record.json", whole)
    write_text(options.out / "table.txt", table(rows) + "\n")
    shown = {
        f"{row['cell']}: {row['engine']}, ms a step": row.get("failed")
        or 1e3 * row["step_seconds"]["median"]
        for row in rows
    }
    speeds = {f"{cell}: {name}, of fused": share for (name, cell), share in shares(rows).items()}
    write_json(options.out / "figures.json", {**shown, **speeds})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all engines, or one in this process; return the exit code."""
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device: --device cpu runs what a CPU can", file=sys.stderr)
        return 2
    if options.device == "cpu":
        torch.set_num_threads(1)  # faster on tensors this small
    if options.engine is not None:
        run_engine(options.engine, options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    counts = {"warm": WARM, "least": LEAST, "most": MOST, "loss_step": LOSS_STEP}
    whole = setting(smoke=options.smoke, device=options.device, steps=counts, rows=[])
    run_all(options, whole)
    print(table(whole["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
