"""Speed of the host's update, compared with the memory's own.

    python -m evidence.benchmarks.host_update [--params N] [--threads 1 2] [--repeats R]

Each job updates the same N parameters: bfloat16 gradients in, float32 masters and moments,
bfloat16 weights out. A replay takes q gradients in, an AdamW step for each, in one pass; what
counts is therefore steps of an element. Jobs and the floors they are compared with (copy, triad,
scaling in place) take turns in one process for each number of threads. Bytes are counted as in
STREAM: what the job must read and write, not the line that a write to fresh memory reads first.
Scaling in place has no such read, so it shows what the memory really moves.

On a machine with AVX-512 the kernel can be built as for one without:
`CFLAGS="-DWIDEST=256" python setup.py build_ext --inplace --force`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from evidence.benchmarks.host_cached import PLAIN, cached_rate, coding_steps
from evidence.benchmarks.host_jobs import (
    BITSANDBYTES,
    CAST,
    COLUMNS,
    DEEPSPEED,
    DEPTHS,
    FLOORS,
    OURS,
    SCALE,
    TRIAD,
    State,
    compact_replay_of,
    factored_replay_of,
    floor_jobs,
    optimizer_jobs,
    our_jobs,
    replay_of,
)
from evidence.benchmarks.record import median_seconds, setting, spread, take_turns
from zenflow.host.library import description

TARGETS = (
    (OURS, "bandwidth", TRIAD, 0.8),
    (OURS, "steps/s", CAST, 1.3),
    (OURS, "steps/s", DEEPSPEED, 1.5),
    (compact_replay_of(1), "steps/s", OURS, 0.85),
    (compact_replay_of(4), "steps/s", replay_of(4), 0.85),
    (compact_replay_of(1), "steps/s", BITSANDBYTES, 5.0),
    (factored_replay_of(1), "steps/s", OURS, 0.85),
    (factored_replay_of(4), "steps/s", replay_of(4), 0.85),
)


def measure(params: int, threads: int, repeats: int) -> dict[str, Any]:
    """Return the record of one number of threads."""
    torch.set_num_threads(threads)
    state = State(params)
    peers, missing = optimizer_jobs(state)
    jobs = [*our_jobs(state, threads), *peers, *floor_jobs(params)]
    # The first call of a turn brings memory back that a system took in the long turns of others.
    turns = {job.name: partial(median_seconds, job.run, repeats=1, warm=1) for job in jobs}
    seconds = take_turns(turns, repeats, warm_rounds=1)
    rows = {}
    for job in jobs:
        quartiles = spread(seconds[job.name])["quartiles"]
        rows[job.name] = {
            "seconds": seconds[job.name],
            "seconds_quartiles": quartiles,
            "bytes_per_step": job.bytes_per_param / job.gradients,
            "traffic_bytes_per_step": job.traffic / job.gradients,
            "steps_per_second": job.gradients * params / quartiles[1],
            "bytes_per_second": params * job.bytes_per_param / quartiles[1],
        }
    record = {"threads": threads, "jobs": rows, "missing": missing}
    record["cached_steps_per_second"] = {
        str(depth): cached_rate(threads, depth) for depth in DEPTHS
    }
    record["compact_state"] = coding_steps()
    record["targets"] = verdicts(rows)
    return record


def verdicts(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each target what was measured; a target without its peer has no verdict."""
    found = []
    for job, quantity, against, least in TARGETS:
        name = "bytes_per_second" if quantity == "bandwidth" else "steps_per_second"
        ratio = rows[job][name] / rows[against][name] if against in rows else None
        reached = None if ratio is None else ratio >= least
        target = {"job": job, "quantity": quantity, "against": against, "least": least}
        allowed = None
        if against in rows and quantity != "bandwidth":
            traffic = "traffic_bytes_per_step"
            allowed = rows[against][traffic] / rows[job][traffic]
        found.append({**target, "ratio": ratio, "reached": reached, "memory_allows": allowed})
    return found


def show(record: dict[str, Any]) -> None:
    """Print one number of threads: the jobs, the targets, and what bounds ours."""
    rows = record["jobs"]
    triad = rows[TRIAD]["bytes_per_second"]
    print(f"\n{record['threads']} thread(s)")
    print(f"{'job':<44}{'ms median (quartiles)':>26}{'Mstep/s':>10}{'B/step':>9}"
          f"{'GB/s':>7}{'of triad':>10}")  # fmt: skip
    for name, row in rows.items():
        low, middle, high = (1e3 * value for value in row["seconds_quartiles"])
        rate = "" if name in FLOORS else f"{row['steps_per_second'] / 1e6:.0f}"
        print(
            f"{name:<44}{f'{middle:.1f} ({low:.1f}..{high:.1f})':>26}{rate:>10}"
            f"{row['bytes_per_step']:>9.1f}{row['bytes_per_second'] / 1e9:>7.1f}"
            f"{row['bytes_per_second'] / triad:>10.2f}"
        )
    for target in record["targets"]:
        aim = f"{target['job']}: {target['quantity']} at least "
        aim += f"{target['least']} x {target['against']}"
        if target["reached"] is None:
            print(f"{aim}: not measured; {record['missing']}")
        else:
            word = "reached" if target["reached"] else "NOT reached"
            allowed = target["memory_allows"]
            bounded = "" if allowed is None else f"; {allowed:.2f} where memory bounds both"
            print(f"{aim}: {word} ({target['ratio']:.2f}{bounded})")
    for depth, cached in record["cached_steps_per_second"].items():
        print(bound(rows, int(depth), cached))
    coding = record["compact_state"]
    print(
        f"compact state is coded in {1e9 * coding['coding_seconds']:.2f} ns a pass and element, "
        f"{coding['coding_steps']:.2f} steps of {1e9 * coding['step_seconds']:.3f} ns; a gradient "
        f"of 8 bits is decoded in {1e9 * coding['decoding_seconds']:.3f} ns, "
        f"{coding['decoding_steps']:.2f} steps"
    )
    marking = [f"{steps:.2f} over {name} state" for name, steps in coding["marking_steps"].items()]
    print(f"an upload is marked, and the one before found, in steps: {', '.join(marking)}")
    allowed = ", ".join(f"{ratio:.2f} at q = {q}" for q, ratio in coding["of_float32"].items())
    print(
        "without second moments a step takes in cache, of one with them: "
        f"{coding['factored_steps']:.2f} over {PLAIN} state"
    )
    print(f"from cache, without uploads, compact state has {allowed} of float32's steps/s")


def bound(rows: dict[str, Any], depth: int, cached: float) -> str:
    """Return the sentence on what keeps our pass over so many gradients from being faster."""
    row = rows[replay_of(depth)]
    rate = row["steps_per_second"]
    moved = rate * row["traffic_bytes_per_step"] / rows[SCALE]["bytes_per_second"]
    what = "arithmetic" if cached <= 1.25 * rate else "memory" if moved >= 0.7 else "neither alone"
    return (
        f"q = {depth} is bound by {what}: {cached / 1e6:.0f} Mstep/s from cache is "
        f"{cached / rate:.2f} x the rate from memory, whose traffic is {moved:.2f} of what "
        "scaling in place moves"
    )


def deepspeed_version() -> str:
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def in_own_process(params: int, threads: int, repeats: int) -> dict[str, Any]:
    """Measure in a fresh process: DeepSpeed's OpenMP reads its threads from the environment."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "evidence.benchmarks.host_update", "--worker", str(out)]
        command += ["--params", str(params), "--threads", str(threads), "--repeats", str(repeats)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        record: dict[str, Any] = json.loads(out.read_text())
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=1 << 26, help="60 bytes of memory each")
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
    whole = setting(params=params, repeats=options.repeats, kernel=description())
    whole["versions"]["deepspeed"] = deepspeed_version()
    print(f"{params} parameters, {options.repeats} repeats, kernel in {whole['kernel']},", end=" ")
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
