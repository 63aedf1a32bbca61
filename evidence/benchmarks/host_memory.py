"""Memory of a process whose optimizer state is on the host, beside what its plan counts.

    python -m evidence.benchmarks.host_memory [--params N] [--out FILE]

Each format runs in a fresh process on a CPU in the role of the device: bfloat16 matrices that the
host owns whole (k = 0), S = q = 4. The process takes some windows' steps. What it holds then, and
held at most, is counted beside what it held with the model and a step's gradients alone. The
system counts pages, whoever asked for them, so no sum can leave anything out. Free memory in the
heaps of the process's threads is in it: the C library keeps up to 64 MB of each for their next
call. So the process is counted again once these heaps have been trimmed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evidence.benchmarks.record import setting
from experiments.output.files import write_json
from zenflow import ZenFlowAdamW, ZenFlowConfig

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "8-bit gradients": {"gradient_link": "e4m3"},
    "compact": {"host_state": "compact"},
    "compact, 8-bit gradients": {"host_state": "compact", "gradient_link": "e4m3"},
}
"""Settings of each format."""
SIDE = 4096
"""Rows and columns of a matrix."""
STEPS = 13
_EACH = ("state", "planned", "held", "trimmed")
"""Numbers of a row in bytes a parameter."""
MOST_STATE, MOST_ALL = 5.3, 8.2
"""Bytes a parameter that compact state may take, and all host memory with 8-bit gradients."""


def held(name: str) -> int:
    """Return the bytes that this process holds in memory now (VmRSS), or held at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"this system does not count {name}")


def trim() -> None:
    """Give the free memory of all heaps back to the system, where the C library can (glibc)."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def measure(kind: str, params: int) -> dict[str, Any]:
    """Return the bytes of one format, in this process."""
    config = ZenFlowConfig(topk_ratio=0.0, queue_depth=4, min_split_elements=1, **FORMATS[kind])
    _train(1, 64, config)  # what is loaded and compiled on the way is no optimizer's
    return _train(max(1, params // SIDE**2), SIDE, config)


def _train(count: int, side: int, config: ZenFlowConfig) -> dict[str, Any]:
    """Return the bytes of square matrices, after some steps."""
    shape = side, side
    model = nn.ParameterList(
        nn.Parameter(torch.full(shape, 0.02, dtype=torch.bfloat16)) for _ in range(count)
    )
    grads = [torch.full(shape, 0.01, dtype=torch.bfloat16) for _ in range(count)]
    before = held("VmRSS")
    with closing(ZenFlowAdamW(model.parameters(), lr=1e-4, config=config)) as optimizer:
        for _ in range(STEPS):
            for weight, grad in zip(model, grads, strict=True):
                weight.grad = grad
            optimizer.step()
        optimizer.synchronize()
        plan = optimizer.memory
        beside = plan.device_extra_bytes + plan.device_ring_bytes  # in RAM too, without a GPU
        now, most = held("VmRSS"), held("VmHWM")
        trim()
        trimmed = held("VmRSS")
    return {
        "params": plan.num_params,
        "state": plan.host_bytes - plan.pinned_bytes,
        "planned": plan.host_bytes,
        "held": now - before - plan.device_extra_bytes,
        "trimmed": trimmed - before - plan.device_extra_bytes,
        "held_at_most": most - before - beside,
    }


def row_of(found: dict[str, int]) -> dict[str, float]:
    """Return bytes a parameter, and the bytes that are held beyond the plan."""
    each = {name: found[name] / found["params"] for name in _EACH}
    beyond = {
        "beyond": found["held"] - found["planned"],
        "beyond_trimmed": found["trimmed"] - found["planned"],
        "beyond_at_most": found["held_at_most"] - found["planned"],
    }
    return {**each, **beyond}


def in_own_process(kind: str, params: int) -> dict[str, Any]:
    """Measure a format in a fresh process."""
    command = [sys.executable, "-m", "evidence.benchmarks.host_memory"]
    command += ["--kind", kind, "--params", str(params)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return the rows as text: bytes a parameter, and megabytes beyond the plan."""
    heads = ("format", "states", "plan", "held", "trimmed", "MB beyond", "trimmed", "at most")
    lines = ["{:<28}{:>9}{:>9}{:>9}{:>9}{:>12}{:>9}{:>9}".format(*heads)]
    for kind, row in rows.items():
        each = "".join(f"{row[name]:>9.2f}" for name in _EACH)
        beyond, trimmed, most = (
            row[name] / 1e6 for name in ("beyond", "beyond_trimmed", "beyond_at_most")
        )
        lines.append(f"{kind:<28}{each}{beyond:>12.0f}{trimmed:>9.0f}{most:>9.0f}")
    return "\n".join(lines)


def main() -> None:
    """Measure all formats, print a table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=1 << 28)
    parser.add_argument("--out", type=Path, help="JSON file for the record")
    parser.add_argument("--kind", choices=FORMATS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind is not None:
        print(json.dumps(measure(options.kind, options.params)))
        return
    rows = {kind: row_of(in_own_process(kind, options.params)) for kind in FORMATS}
    print(f"{options.params:,} parameters, k = 0, S = q = 4; bytes a parameter on the host")
    print(table(rows))
    state, whole = rows["compact"]["state"], rows["compact, 8-bit gradients"]["trimmed"]
    for said, value, most in (
        ("compact state", state, MOST_STATE),
        (
            "all that is held with both kinds of few bytes, heaps trimmed",
            whole,
            MOST_ALL,
        ),
    ):
        word = "reached" if value <= most else "NOT reached"
        print(f"{said}: at most {most} bytes a parameter: {word} ({value:.2f})")
    if options.out is not None:
        write_json(options.out, {**setting(params=options.params), "rows": rows})


if __name__ == "__main__":
    main()
