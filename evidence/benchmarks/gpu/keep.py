"""Make what `make gpu` has left part of the project: ``python -m evidence.benchmarks.gpu.keep``.

From a directory of the suite's, or the archives of a loan's calls, records become
`evidence/results/<date>_gpu_<gpu>` and `<date>_validation_<gpu>`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from evidence.benchmarks.gpu.loan.records import SUITE, unpack
from experiments.output.plots import save_figure
from experiments.output.provenance import RESULTS
from experiments.traces.compare import last_steps, load
from experiments.traces.picture import draw_overlay
from zenflow.errors import ConfigError

RECORD, TESTS, PICTURE = "record.json", "tests.xml", "timeline.png"
_VALIDATION = "validation"


def keep(runs: Path, results: Path = RESULTS) -> Path:
    """Copy a suite's records to where they are committed; return the folder.

    Raises:
        ConfigError: There is no suite's record, or its commit is none that others can check out.
    """
    try:
        suite = json.loads((runs / SUITE).read_text(encoding="utf-8"))
        gpu, commit = suite["hardware"]["gpu"], suite["commit"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{runs} must be a directory that make gpu has left, with a {SUITE} ({error!r})"
        ) from error
    if gpu is None or commit is None or commit.endswith("-dirty"):
        raise ConfigError(
            f"a record must come from a GPU and from a commit that others can check out, and "
            f"{runs} is of GPU {gpu} and commit {commit}: commit, then make gpu"
        )
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    day = time.strftime("%Y-%m-%d", time.localtime((runs / SUITE).stat().st_mtime))
    folder = results / f"{day}_gpu_{name}"
    shutil.copytree(
        runs, folder, ignore=shutil.ignore_patterns(f"*{_VALIDATION}*"), dirs_exist_ok=True
    )
    if (runs / _VALIDATION / RECORD).is_file():
        own = results / f"{day}_{_VALIDATION}_{name}"
        shutil.copytree(runs / _VALIDATION, own, dirs_exist_ok=True)
    draw(folder)
    return folder


def draw(folder: Path) -> None:
    """Draw two steps under zero_offload above two under zenflow, of the first cell with both."""
    pairs = (
        (first, first.with_name(first.name.replace("_zero_offload.", "_zenflow.")))
        for first in sorted(folder.glob("presets-*/*_zero_offload.trace.json.gz"))
    )
    found = next(((a, b) for a, b in pairs if b.is_file()), None)
    if found is None:
        return
    left, right = (last_steps(load(path), 2) for path in found)
    figure = draw_overlay(left, right)
    gpu = json.loads((folder / SUITE).read_text(encoding="utf-8"))["hardware"]["gpu"]
    cell = found[0].name.partition("_zero_offload.")[0].replace("_", " ")
    names = (("A", "zero_offload", left), ("B", "zenflow", right))
    listed = ", ".join(
        f"{mark} {name}: {1e3 * side.step_seconds:.0f} ms, {side.stall_fraction:.1%} stalled"
        for mark, name, side in names
    )
    figure.suptitle(
        f"{cell}, one {gpu}, measured; a step of {listed}", fontsize=11, x=0.01, ha="left"
    )
    save_figure(figure, folder / PICTURE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep the records of a directory or of archives; return the exit code."""
    parser = argparse.ArgumentParser(description="Make records of make gpu part of the project.")
    parser.add_argument(
        "runs", nargs="+", type=Path, help="runs/gpu of make gpu, or archives of a loan's calls"
    )
    options = parser.parse_args(arguments)
    try:
        if any(path.is_file() for path in options.runs):
            with tempfile.TemporaryDirectory() as folder:
                unpack(options.runs, Path(folder))
                kept = keep(Path(folder))
        else:
            (runs,) = options.runs
            kept = keep(runs)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"kept: {kept}; now write the pages: python -m evidence.pages.build")
    return 0


if __name__ == "__main__":
    sys.exit(main())
