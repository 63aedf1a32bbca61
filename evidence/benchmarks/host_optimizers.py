"""Speed of frameworks' AdamW on a host, and what fresh memory costs it.

    python -m evidence.benchmarks.host_optimizers [--params N] [--threads 1 2] [--out FILE]

PyTorch's AdamW as a loop, with foreach and fused, and our pass, update as many parameters, in
tensors of 4 MiB and of 64 MiB. The passes that trainers and DeepSpeed run around an optimizer are
beside them. Each job is timed with its page faults: a temporary tensor above the largest threshold
of glibc's `malloc` (32 MiB) is fresh memory in every step, and the kernel zeroes each page of it.
A process with `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` raised keeps that memory. So
the difference is the pages' cost. The simulator takes its figures from here
(`sim.timing.host_optimizers`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evidence.benchmarks.host_jobs import State, our_jobs, replay_of
from evidence.benchmarks.record import setting, take_turns
from experiments.output.files import write_json

SIZES = {"large": 1 << 24, "small": 1 << 20}
"""Elements of a float32 tensor: of 64 MiB, and of 4 MiB. The large ones come first: afterwards the
heap has room that small ones have left, and no page is fresh."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}
"""PyTorch's AdamW by implementation: its arguments."""
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 40), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Environment in which glibc keeps all memory that was freed."""
OURS = "our pass, one gradient"
PAGE = resource.getpagesize()

Cost = tuple[float, float]
"""Seconds of a thread at work in a call, and bytes of the pages that were new in it."""


def cost_of(run: Callable[[], Any], threads: int) -> Cost:
    """Return a call's seconds of each thread at work, and the bytes of pages that it met first.

    Time at work, in the kernel too, is what a call takes of a machine that does nothing else.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    started = time.process_time()
    run()
    seconds = (time.process_time() - started) / threads
    return seconds, float(PAGE * (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))


def optimizer_jobs(params: int, size: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return the steps of each implementation on parameters of its own, and the passes around one.

    Args:
        params: Number of elements of all parameters together.
        size: Number of elements of one.
        dtype: Type of parameters, gradients and moments.
    """
    count = params // size
    weights = [nn.Parameter(torch.zeros(size, dtype=dtype)) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.full((size,), 0.01, dtype=dtype)
    jobs: dict[str, Callable[[], Any]] = {}
    moments: Mapping[Any, Any] = {}
    for name, flags in KINDS.items():
        optimizer = torch.optim.AdamW(weights, lr=1e-4, **flags)
        if not moments:
            optimizer.step()
            moments = optimizer.state
        optimizer.state.update(moments)  # all walk over the same memory
        jobs[name] = optimizer.step
    if dtype == torch.float32:
        grads = [weight.grad for weight in weights if weight.grad is not None]
        short = [torch.empty(size, dtype=torch.bfloat16) for _ in weights]
        jobs["clip"] = lambda: nn.utils.clip_grad_norm_(weights, 1e-3)
        jobs["unscale"] = lambda: [grad.mul_(1.0) for grad in grads]
        jobs["cast, kept"] = lambda: [
            out.copy_(weight.data) for out, weight in zip(short, weights, strict=True)
        ]
        jobs["cast, fresh"] = lambda: [weight.data.bfloat16() for weight in weights]
    return jobs


def floors(params: int) -> dict[str, Callable[[], Any]]:
    """Return a copy and a triad: the memory's own speed, of 8 and of 12 bytes an element."""
    a, b, c = (torch.full((params,), float(value)) for value in (1, 2, 3))
    return {"copy": lambda: a.copy_(b), "triad": lambda: torch.add(b, c, alpha=0.5, out=a)}


def measure(params: int, threads: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return for each job its seconds, and its bytes of fresh pages, of one element."""
    torch.set_num_threads(threads)
    found: dict[str, dict[str, list[float]]] = {}

    def run(jobs: Mapping[str, Callable[[], Any]], group: str) -> None:
        turns = {name: (lambda job=job: cost_of(job, threads)) for name, job in jobs.items()}
        for name, costs in take_turns(turns, repeats, warm_rounds=2).items():
            found[f"{group}{name}"] = {
                "seconds": [seconds / params for seconds, _ in costs],
                "fresh_bytes": [fresh / params for _, fresh in costs],
            }

    run(optimizer_jobs(params, SIZES["large"], torch.bfloat16), "large, bfloat16: ")
    for group, size in SIZES.items():
        run(optimizer_jobs(params, size, torch.float32), f"{group}: ")
    run(floors(params), "")
    state = State(params)
    ours = {job.name: job for job in our_jobs(state, threads)}[replay_of(1)]
    run({OURS: ours.run}, "")
    return found


def least(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Cost]:
    """Return each job's least nanoseconds of an element, and its median bytes of fresh pages.

    Others at the same memory only lengthen a call.
    """
    return {
        name: (1e9 * min(row["seconds"]), statistics.median(row["fresh_bytes"]))
        for name, row in rows.items()
    }


def page_nanoseconds(fresh: Mapping[str, Cost], kept: Mapping[str, Cost]) -> dict[str, float]:
    """Return the nanoseconds of a byte of fresh pages, by the jobs that have any.

    Args:
        fresh: Figures of a process as it is.
        kept: Figures of one that keeps what it frees.

    Examples:
        >>> page_nanoseconds({"loop": (6.0, 8.0), "fused": (1.0, 0.0)},
        ...                  {"loop": (2.0, 0.0), "fused": (1.0, 0.0)})
        {'loop': 0.5}
    """
    return {
        name: (seconds - kept[name][0]) / (pages - kept[name][1])
        for name, (seconds, pages) in fresh.items()
        if pages - kept[name][1] >= 1.0
    }


def table(threads: int, fresh: Mapping[str, Cost], kept: Mapping[str, Cost]) -> str:
    """Return one number of threads as text: each job in both processes, and its pages' cost."""
    pages = page_nanoseconds(fresh, kept)
    lines = [
        f"{threads} thread(s), ns an element",
        f"{'job':34}{'ns':>8}{'kept':>8}{'of fused':>10}{'fresh B':>9}{'ns a fresh B':>14}",
    ]
    for name, (seconds, new) in fresh.items():
        group = name.split(": ")[0] + ": fused"
        ratio = f"{kept[name][0] / kept[group][0]:.2f}" if group in kept else ""
        page = f"{pages[name]:.2f}" if name in pages else ""
        lines.append(f"{name:34}{seconds:8.3f}{kept[name][0]:8.3f}{ratio:>10}{new:9.2f}{page:>14}")
    return "\n".join(lines)


def in_own_process(
    params: int, threads: int, repeats: int, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Measure in a fresh process, whose allocator reads its thresholds from the environment."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "evidence.benchmarks.host_optimizers", "--worker"]
        command += [str(out), "--params", str(params), "--threads", str(threads)]
        command += ["--repeats", str(repeats)]
        # Threads that wait are not at work.
        own = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        own |= environment
        subprocess.run(command, check=True, env=own, stdout=subprocess.DEVNULL)
        record: dict[str, Any] = json.loads(out.read_text())
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=1 << 26, help="46 bytes of memory each")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file for the whole record")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    params = max(1, chosen.params // SIZES["large"]) * SIZES["large"]
    if chosen.worker is not None:
        found = measure(params, chosen.threads[0], chosen.repeats)
        chosen.worker.write_text(json.dumps(found))
        return
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    facts = setting(
        params=params,
        repeats=chosen.repeats,
        page_bytes=PAGE,
        huge_pages=pages.read_text().strip() if pages.exists() else "unknown",
    )
    whole = {**facts, "measurements": []}
    for threads in chosen.threads:
        fresh, kept = (
            in_own_process(params, threads, chosen.repeats, each) for each in ({}, KEPT)
        )
        whole["measurements"].append({"threads": threads, "fresh": fresh, "kept": kept})
        print(table(threads, least(fresh), least(kept)), flush=True)
    if chosen.out is not None:
        write_json(chosen.out, whole)


if __name__ == "__main__":
    main()
