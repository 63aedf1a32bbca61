"""Everything that needs a GPU, part after part, each with its own record and its own time limit.

    python -m evidence.benchmarks.gpu.suite [PART ...] [--out DIR] [--minutes M]

Without names all parts run. One that fails or takes too long leaves what it has written and the
parts after it run. suite.json says how each ended, those of earlier commands of the same commit
too. Ends with code 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import cuda

from evidence.benchmarks.gpu.loan.guard import guarded
from evidence.benchmarks.gpu.loan.records import SUITE
from evidence.benchmarks.gpu.loan.run import ending
from evidence.benchmarks.record import setting
from experiments.output.files import write_json
from zenflow.host.limits import usable_cores

_MINUTES = 9.5
_MARGIN = 45.0
"""Seconds that a series of the benchmark leaves of its part, for its last run and its table."""


def _python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def _pytest(out: Path, *arguments: str) -> list[str]:
    """Return pytest in some processes: the tests' models are too small to fill a GPU."""
    workers = str(min(8, max(1, usable_cores() // 2)))
    report = f"--junitxml={out / 'tests.xml'}"
    options = ("-q", report, "-n", workers, "--timeout=300")
    return _python("pytest", "tests/zenflow", *options, *arguments)


def _series(name: str) -> Callable[[Path, float], list[str]]:
    def command(out: Path, seconds: float) -> list[str]:
        limit = f"{max(60.0, seconds - _MARGIN):.0f}"
        return _python("evidence.benchmarks.gpu.step", name, "--out", str(out), "--limit", limit)

    return command


def _measured(command: str, out: Path) -> list[str]:
    return _python("experiments.cli", command, "--device", "cuda", "--out", str(out))


def _validate(out: Path) -> list[str]:
    command = [*_measured("validate", out), "--force"]
    profile = out.parent / "calibration" / "profile.json"
    return [*command, "--profile", str(profile)] if profile.is_file() else command


PARTS: Mapping[str, Callable[[Path, float], list[str]]] = {
    "environment": lambda out, _: _python(
        "evidence.benchmarks.gpu.environment", "--out", str(out)
    ),
    "tests": lambda out, _: _pytest(out, "-m", "(gpu or gpu_too) and not slow"),
    "races": lambda out, _: _pytest(out, "-m", "gpu and slow"),
    "presets-1b": _series("1b"),
    "calibration": lambda out, _: _measured("calibrate", out / "profile.json"),
    "validation": lambda out, _: _validate(out),
    "presets-3b": _series("3b"),
    "presets-1b-long": _series("1b-long"),
    "presets-3b-long": _series("3b-long"),
}
"""Command of each part, from a folder for records and the seconds left. What a short loan of a GPU
is for comes first."""


def run_part(name: str, out: Path, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own; return how it ended."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    done = subprocess.run(guarded(PARTS[name](folder, seconds), seconds), check=False)
    took = time.monotonic() - started
    return {"part": name, "ended": ending(done.returncode, seconds), "seconds": took}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return the process's exit code."""
    parser = argparse.ArgumentParser(description="Everything that needs a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="of each part, at most")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"PART must be of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if not cuda.is_available():
        print("torch sees no CUDA device: install a CUDA build of torch", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = options.parts or list(PARTS)
    whole = setting(parts=[])
    whole["parts"] = [part for part in _before(options.out, whole) if part["part"] not in chosen]
    for name in chosen:
        print(f"--- {name}", flush=True)
        whole["parts"].append(run_part(name, options.out, 60 * options.minutes))
        write_json(options.out / SUITE, whole)
    print()
    for part in whole["parts"]:
        print(f"{part['part']:<18}{part['seconds']:>6.0f} s  {part['ended']}")
    print(f"records: {options.out}")
    now = whole["parts"][-len(chosen) :]
    return 0 if all(part["ended"] == "done" for part in now) else 1


def _before(out: Path, now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how parts ended that earlier commands ran here, on this machine and commit."""
    try:
        found: dict[str, Any] = json.loads((out / SUITE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    is_same = all(found.get(name) == now[name] for name in ("hardware", "commit"))
    return list(found["parts"]) if is_same else []


if __name__ == "__main__":
    sys.exit(main())
