"""How fast the host's update is, and how far from the memory's own speed.

    python -m benchmarks.host_update [--params N] [--threads 1 2] [--repeats R] [--out FILE]

Each job updates the same N parameters: bfloat16 gradients in, float32 masters and moments,
bfloat16 weights out. Jobs and the floors they are compared with (copy, triad, scaling in place)
take turns in one process for each number of threads. Bytes are counted as in STREAM: what the job
must read and write, not the line that a write to fresh memory reads first. Scaling in place has no
such read, so it shows what the memory really moves.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from experiments.records import provenance
from zenflow import kernel

COLUMNS = 4096
PART_PARAMS = 1 << 18  # in one call: Python's part of a call is then a hundredth
CACHED_PARAMS = 1 << 15  # 0.9 MB of counted bytes: fits a core's second-level cache
BETAS, EPS, LR, DECAY = (0.9, 0.999), 1e-8, 1e-4, 0.01
OURS, CAST, FUSED, DEEPSPEED = (
    "zenflow host update",
    "cast + torch fused AdamW + cast",
    "torch fused AdamW alone (float32)",
    "cast + DeepSpeed CPUAdam + cast",
)
COPY, TRIAD, SCALE = "copy", "triad", "scale in place"
FLOORS = (COPY, TRIAD, SCALE)
TARGETS = (
    (OURS, "bandwidth", TRIAD, 0.8),
    (OURS, "parameters/s", CAST, 1.3),
    (OURS, "parameters/s", DEEPSPEED, 1.5),
)


@dataclass(frozen=True)
class Job:
    """Something timed: a call over all parameters, and the bytes it must move for each."""

    name: str
    bytes_per_param: int
    run: Callable[[], Any]


class State:
    """Memory of one optimizer, rows of COLUMNS parameters; all jobs continue one training."""

    def __init__(self, params: int) -> None:
        self.rows = params // COLUMNS
        generator = torch.Generator().manual_seed(0)
        shape = (self.rows, COLUMNS)
        self.master = torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02)
        self.exp_avg, self.exp_avg_sq = torch.zeros(shape), torch.zeros(shape)
        self.grad = (torch.randn(shape, generator=generator) * 0.01).bfloat16()
        self.out = torch.empty(shape, dtype=torch.bfloat16)
        self.step_size = torch.full((self.rows,), LR)
        self.denom_scale = torch.ones(self.rows)
        self.active = torch.ones(self.rows, dtype=torch.uint8)

    def update(self, first: int, last: int) -> None:
        """Run our kernel on rows first..last-1."""
        part = slice(first, last)
        kernel.adamw(
            self.master.data[part],
            self.exp_avg[part],
            self.exp_avg_sq[part],
            self.out[part],
            grad=self.grad[part],
            grad_scale=1.0,
            acc=None,
            count=1,
            step_size=self.step_size[part],
            denom_scale=self.denom_scale[part],
            active=self.active[part],
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            decay=1 - LR * DECAY,
            prediction=1.0,
        )

    def adopt(self, optimizer: torch.optim.Optimizer, step: Tensor | int) -> None:
        """Give the optimizer our moments, so that all jobs walk over the same memory."""
        moments = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        optimizer.state[self.master] = {"step": step, **moments}


def our_job(state: State, threads: int) -> Job:
    """Return our update: each thread walks its share of the rows in parts."""
    pool = ThreadPoolExecutor(threads)
    part = max(1, PART_PARAMS // COLUMNS)
    cuts = [state.rows * index // threads for index in range(threads + 1)]

    def walk(first: int, last: int) -> None:
        for row in range(first, last, part):
            state.update(row, min(row + part, last))

    return Job(OURS, 28, lambda: list(pool.map(walk, cuts[:-1], cuts[1:])))


def optimizer_jobs(state: State) -> tuple[list[Job], str]:
    """Return the peers' jobs, and why DeepSpeed is missing if it is."""
    settings: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    fused = torch.optim.AdamW([state.master], fused=True, **settings)
    state.adopt(fused, torch.tensor(100.0))
    wide_grad = state.grad.float()

    def cast_around(step: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            wide_grad.copy_(state.grad)
            step()
            state.out.copy_(state.master.data)

        return run

    state.master.grad = wide_grad
    jobs = [Job(CAST, 40, cast_around(fused.step)), Job(FUSED, 28, fused.step)]
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        cpu_adam = DeepSpeedCPUAdam([state.master], **settings)
    except ImportError as error:
        return jobs, f"DeepSpeed is not installed ({error})"
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return jobs, f"DeepSpeed's CPUAdam does not build here ({error})"
    state.adopt(cpu_adam, 100)
    return [*jobs, Job(DEEPSPEED, 40, cast_around(cpu_adam.step))], ""


def floor_jobs(params: int) -> list[Job]:
    """Return the memory's own speeds; torch's loops, as fast as hand-written ones here."""
    a, b, c = (torch.full((params,), float(value)) for value in (1, 2, 3))
    return [
        Job(COPY, 8, lambda: a.copy_(b)),
        Job(TRIAD, 12, lambda: torch.add(b, c, alpha=0.5, out=a)),
        Job(SCALE, 8, lambda: c.mul_(1.0)),
    ]


def take_turns(jobs: list[Job], repeats: int) -> dict[str, list[float]]:
    """Return each job's seconds; the order turns with every round, the first one is warm-up."""
    seconds: dict[str, list[float]] = {job.name: [] for job in jobs}
    for turn in range(repeats + 1):
        first = turn % len(jobs)
        for job in jobs[first:] + jobs[:first]:
            started = time.perf_counter()
            job.run()
            if turn > 0:
                seconds[job.name].append(time.perf_counter() - started)
    return seconds


def cached_rate(threads: int) -> float:
    """Return our parameters/s on data in each core's own cache: the speed of the arithmetic.

    The best of short bursts, less the time of calls without rows: Python's part of a call is
    nothing beside PART_PARAMS, but much of so small a piece.
    """

    def best(state: State) -> float:
        bursts = []
        for _ in range(60):
            started = time.perf_counter()
            for _ in range(20):
                state.update(0, state.rows)
            bursts.append((time.perf_counter() - started) / 20)
        return min(bursts)

    with ThreadPoolExecutor(threads) as pool:
        states = [State(CACHED_PARAMS) for _ in range(threads)]
        busy = list(pool.map(best, states))
    overhead = best(State(0))
    return sum(CACHED_PARAMS / (seconds - overhead) for seconds in busy)


def measure(params: int, threads: int, repeats: int) -> dict[str, Any]:
    """Return the record of one number of threads."""
    torch.set_num_threads(threads)
    state = State(params)
    peers, missing = optimizer_jobs(state)
    jobs = [our_job(state, threads), *peers, *floor_jobs(params)]
    seconds = take_turns(jobs, repeats)
    rows = {}
    for job in jobs:
        quartiles = statistics.quantiles(seconds[job.name], n=4, method="inclusive")
        rows[job.name] = {
            "seconds": seconds[job.name],
            "seconds_quartiles": quartiles,
            "bytes_per_param": job.bytes_per_param,
            "params_per_second": params / quartiles[1],
            "bytes_per_second": params * job.bytes_per_param / quartiles[1],
        }
    record = {"threads": threads, "jobs": rows, "missing": missing}
    record["cached_params_per_second"] = cached_rate(threads)
    record["targets"] = verdicts(rows)
    return record


def verdicts(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each target what was measured; a target without its peer has no verdict."""
    found = []
    for job, quantity, against, least in TARGETS:
        name = "bytes_per_second" if quantity == "bandwidth" else "params_per_second"
        ratio = rows[job][name] / rows[against][name] if against in rows else None
        reached = None if ratio is None else ratio >= least
        target = {"quantity": quantity, "against": against, "least": least}
        found.append({**target, "ratio": ratio, "reached": reached})
    return found


def show(record: dict[str, Any]) -> None:
    """Print one number of threads: the jobs, the targets, and what bounds ours."""
    rows = record["jobs"]
    triad = rows[TRIAD]["bytes_per_second"]
    print(f"\n{record['threads']} thread(s)")
    print(f"{'job':<34}{'ms median (quartiles)':>26}{'Mparam/s':>10}{'B/param':>9}"
          f"{'GB/s':>7}{'of triad':>10}")  # fmt: skip
    for name, row in rows.items():
        low, middle, high = (1e3 * value for value in row["seconds_quartiles"])
        rate = "" if name in FLOORS else f"{row['params_per_second'] / 1e6:.0f}"
        print(
            f"{name:<34}{f'{middle:.1f} ({low:.1f}..{high:.1f})':>26}{rate:>10}"
            f"{row['bytes_per_param']:>9}{row['bytes_per_second'] / 1e9:>7.1f}"
            f"{row['bytes_per_second'] / triad:>10.2f}"
        )
    for target in record["targets"]:
        aim = f"{target['quantity']} at least {target['least']} x {target['against']}"
        if target["reached"] is None:
            print(f"{aim}: not measured; {record['missing']}")
        else:
            word = "reached" if target["reached"] else "NOT reached"
            print(f"{aim}: {word} ({target['ratio']:.2f})")
    print(bound(rows, record["cached_params_per_second"]))


def bound(rows: dict[str, Any], cached: float) -> str:
    """Return the sentence on what keeps our update from being faster."""
    rate = rows[OURS]["params_per_second"]
    # Of 28 counted bytes the 2 of the output are written to fresh lines, which are read first.
    moved = rate * 30 / rows[SCALE]["bytes_per_second"]
    what = "memory" if cached > 1.25 * rate else "arithmetic"
    return (
        f"bound by {what}: {cached / 1e6:.0f} Mparam/s from cache is {cached / rate:.2f} x the "
        f"rate from memory, whose traffic is {moved:.2f} of what scaling in place moves"
    )


def setting(params: int, repeats: int) -> dict[str, Any]:
    """Return hardware, versions and commit, without which no number means anything."""
    found = provenance()
    try:
        found["versions"]["deepspeed"] = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        found["versions"]["deepspeed"] = "not installed"
    return {
        **found,
        "params": params,
        "repeats": repeats,
        "kernel": kernel.active_kernel(),
        "load_average": psutil.getloadavg()[0],  # of others: nothing of ours has run yet
    }


def in_own_process(params: int, threads: int, repeats: int) -> dict[str, Any]:
    """Measure in a fresh process: DeepSpeed's OpenMP reads its threads from the environment."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "benchmarks.host_update", "--worker", str(out)]
        command += ["--params", str(params), "--threads", str(threads), "--repeats", str(repeats)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        record: dict[str, Any] = json.loads(out.read_text())
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=1 << 26, help="32 bytes of memory each")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="JSON file for the whole record")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    params = max(1, options.params // COLUMNS) * COLUMNS
    if options.worker is not None:
        record = measure(params, options.threads[0], options.repeats)
        options.worker.write_text(json.dumps(record))
        return
    whole = setting(params, options.repeats)
    print(f"{params} parameters, {options.repeats} repeats, {whole['kernel']} kernel,", end=" ")
    print(f"{whole['hardware']['cpu']},", end=" ")
    print(f"commit {whole['commit']}, load average before {whole['load_average']:.2f}")
    whole["measurements"] = []
    for threads in options.threads:
        whole["measurements"].append(in_own_process(params, threads, options.repeats))
        show(whole["measurements"][-1])
    if options.out is not None:
        options.out.write_text(json.dumps(whole, indent=1) + "\n")
        print(f"\nrecord: {options.out}")


if __name__ == "__main__":
    main()
