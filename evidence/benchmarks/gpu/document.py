"""Document: keeps the files of `make gpu`, and makes docs/gpu.md from committed records.

    python -m evidence.benchmarks.gpu.document [RUNS ...]

With a directory of the suite's, or the archives of a loan's calls, their records become
`evidence/results/<date>_gpu_<gpu>` and `<date>_validation_<gpu>`; without any nothing is copied.
Then docs/gpu.md and docs/validation.md are written anew; tests compare both with the records.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from evidence.benchmarks.gpu.figures import aims
from evidence.benchmarks.gpu.loan.records import LOG, SUITE, outcomes, unpack
from evidence.pages import validation as validation_docs
from experiments.lab.losses import excess
from experiments.lab.page import FORMER
from experiments.lab.variants import BASELINE
from experiments.output.files import write_text
from experiments.output.plots import save_figure
from experiments.output.provenance import RESULTS, newest
from experiments.traces.compare import align, load, whole_steps
from experiments.traces.picture import draw_overlay
from zenflow.errors import ConfigError

DOCUMENT = RESULTS.parent.parent / "docs" / "gpu.md"
RECORD, TESTS, PICTURE = "record.json", "tests.xml", "timeline.png"
_VALIDATION = "validation"
_FUSED = "torch's fused AdamW, no float32 masters"
_COUNTS = ("tests", "failures", "errors", "skipped")
"""Counts of a JUnit file's suites."""
_NOTHING = """\
Nothing has run on a GPU yet. The CUDA path is written, and `make gpu` is everything that waits
for one: what the machine is, tests, races of a thousand steps, calibration, validation, and
decoders of 1B and 3B parameters under every preset with a trace of each.
`make gpu PART=presets-1b` runs one part, none takes more than ten minutes, and `runs/gpu` keeps
their records; `python -m evidence.benchmarks.gpu.document runs/gpu` makes them part of the
project and writes this page and [validation](validation.md) from them. Until then, take that
path as untested."""
_INTRODUCTION = """\
# On a GPU

Made by `python -m evidence.benchmarks.gpu.document` from the newest record of `make gpu`; a test
compares them. Everything here is *measured*.
[Limits](limits.md#what-has-been-tried-on-a-gpu) says what has not run.
"""
_READING = """\
## How to read it

- Weights were random, so losses show what late updates cost from random weights, and not
  fine-tuning's. [Accuracy by regime](results/accuracy.md) has both.
- Idle time beside stalls is gaps between launches; `on_device` has them too.
"""


_LOAN = """\
## A short loan

Somebody lends a GPU for half an hour. Nothing should be thought of while it is there:

    python3 -m evidence.benchmarks.gpu.loan plan

prints what to bring and five lines to type, such as

    python3 -m evidence.benchmarks.gpu.loan 1 --out runs/call1

A call takes at most 560 seconds. Where time is cut, calls 1, 3 and 2 tell most.

| call | parts | answers |
|---|---|---|
| 1 | environment, tests, given, presets-1b, device_pass, races | Right to the byte? How fast? |
| 2 | finetune, kernels | What does a pretrained model lose? Which kernels take the time? |
| 3 | presets-8b-capped, presets-8b | Does an 8B model train in 23.6 GiB? How fast is it? |
| 4 | calibration | What does the simulator get wrong? |
| 5 | peers | How fast are other optimizers on equal batches? |

- A part that takes too long is ended with all its processes, and the next one runs.
- `records.tar.gz` and `table.txt` are whole at any moment, also where the call itself is killed.
- Missing packages are named first. Parts that need them are left out, unless their wheels lie in
  `runs/loan/wheels`.
- The table has predictions beside results. They are estimates for an H100, made before any part
  had run.
- `--smoke` runs the script on a CPU with tiny models.
- Call 4 is `zenflow calibrate` as it is. Validation needs no GPU afterwards:
  `evidence.benchmarks.gpu.observations` reads runs of calls 1 and 3 as observations.
- Of the peers, torch's fused AdamW and FSDP2 with CPU offload need nothing further. torchao and
  bitsandbytes run if installed. DeepSpeed is not among them.

At home, the archives of all calls become a record and this page:

    python -m evidence.benchmarks.gpu.document runs/call1/records.tar.gz runs/call2/records.tar.gz

No call has run on a GPU yet: each part has run on a CPU with tiny models only."""


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


def document(results: Path = RESULTS) -> str:
    """Return the text of docs/gpu.md for the records in a folder."""
    parts = [_INTRODUCTION, section(results), ""]
    if newest(results, "gpu", SUITE) is not None:
        parts.append(_READING)
    parts.append(_LOAN)
    return "\n".join(parts).rstrip() + "\n"


def section(results: Path = RESULTS) -> str:
    """Return the text on the newest record in a folder."""
    folder = newest(results, "gpu", SUITE)
    if folder is None:
        return _NOTHING
    suite = _json(folder / SUITE)
    hardware, torch = suite["hardware"], suite["versions"]["torch"]
    ended = ", ".join(f"{part['part']} {_ended(folder, part)}" for part in suite["parts"])
    lines = [
        f"On one {hardware['gpu']} with {hardware['cores']} host cores, torch {torch}, commit "
        f"{suite['commit']} ([record](../evidence/results/{folder.name}), `make gpu`). Parts: "
        f"{ended}."
    ]
    records = [_json(path) for path in sorted(folder.glob(f"presets-*/{RECORD}"))]
    cells = [cell for record in records for cell in record["cells"]]
    lines += of_former_rule(cells)
    if any(cell["runs"] for cell in cells):
        lines += ["", *_table(cells), "", *_aims(cells)]
    if (folder / PICTURE).is_file():
        text = "two steps under zero_offload and under zenflow"
        lines += ["", f"![{text}](../evidence/results/{folder.name}/{PICTURE})"]
    left = [name for record in records for name in record["not_reached"]]
    if left:
        lines += ["", f"Not reached in time: {'; '.join(left)}."]
    return "\n".join(lines)


def of_former_rule(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the note on runs of another update rule than today's, and on their losses."""
    above = []
    for cell in cells:
        runs = {run["name"]: run for run in cell["runs"]}
        above += [
            excess(run["losses"], runs[BASELINE]["losses"])
            for name, run in runs.items()
            if name.split(",")[0] == "zenflow"
            and "update_rule" not in run["config"]
            and BASELINE in runs
        ]
    if not above:
        return []
    return [
        "",
        f"{FORMER} Under it the loss of `zenflow` ended {min(above):.0%} to {max(above):.0%} "
        f"above `{BASELINE}`'s. Today's code has not run on a GPU.",
    ]


def draw(folder: Path) -> None:
    """Draw two steps under zero_offload above two under zenflow, of the first cell with both."""
    pairs = (
        (first, first.with_name(first.name.replace("_zero_offload.", "_zenflow.")))
        for first in sorted(folder.glob("presets-*/*_zero_offload.trace.json.gz"))
    )
    found = next(((a, b) for a, b in pairs if b.is_file()), None)
    if found is None:
        return
    sides = [whole_steps(load(path)) for path in found]
    last = min(max(side.starts) for side in sides)
    left, right = align(sides[0].trace, sides[1].trace, (last - 1, last))
    figure = draw_overlay(left, right)
    gpu = _json(folder / SUITE)["hardware"]["gpu"]
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


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _ended(folder: Path, part: Mapping[str, Any]) -> str:
    """Return how a part ended; of tests, how many, in a log that was cut too."""
    path = folder / part["part"] / TESTS
    if not path.is_file():
        log = path.with_name(LOG)
        counts_of = outcomes(log.read_text(encoding="utf-8")) if log.is_file() else {}
        told = [f"{count} {how.lower()}" for how, count in sorted(counts_of.items())]
        return f"{', '.join(told)} ({part['ended']})" if told else str(part["ended"])
    suites = ElementTree.parse(path).getroot().iter("testsuite")
    counts = [{key: int(item.get(key, 0)) for key in _COUNTS} for item in suites]
    total = {key: sum(count[key] for count in counts) for key in _COUNTS}
    failed = total["failures"] + total["errors"]
    passed = total["tests"] - failed - total["skipped"]
    return f"{passed} passed, {failed} failed, {total['skipped']} skipped ({part['ended']})"


def _table(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table of all cells' runs beside the device alone."""
    yield "| model, batch | run | ms a step | tokens/s | of on_device | stalled | peak GB |"
    yield "|---|---|---|---|---|---|---|"
    for cell in cells:
        device = next((run for run in cell["runs"] if run["name"] == "on_device"), None)
        fused = cell.get("torch_fused")
        baseline = [{"name": _FUSED, "stall_fraction": 0.0, **fused}] if fused else []
        for run in [*baseline, *cell["runs"]]:
            rate, peak = run["tokens_per_second"], run["peak_device_bytes"]
            share = "-" if device is None else f"{rate / device['tokens_per_second']:.3f}"
            memory = "-" if peak is None else f"{peak / 1e9:.1f}"
            yield (
                f"| {cell['cell']['name']} | {run['name']} "
                f"| {1e3 * run['step_seconds']['median']:.1f} | {rate:.0f} | {share} "
                f"| {run['stall_fraction']:.1%} | {memory} |"
            )
        for name in cell["does_not_fit"]:
            yield f"| {cell['cell']['name']} | {name} | does not fit | | | | |"
        for name in cell["failures"]:
            yield f"| {cell['cell']['name']} | {name} | **failed** | | | | |"


def _aims(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield how many of the aims that apply hold, and each that does not."""
    judged = [(cell["cell"]["name"], aim) for cell in cells for aim in aims(cell["runs"])]
    applying = [(name, aim) for name, aim in judged if aim.holds is not None]
    missed = [f"- {name}: {aim}" for name, aim in applying if not aim.holds]
    yield f"Of {len(applying)} aims that apply {len(applying) - len(missed)} hold."
    if missed:
        yield ""
        yield "Missed:"
        yield ""
        yield from missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep records if a directory is named, write both documents; return the exit code."""
    parser = argparse.ArgumentParser(description="docs/gpu.md, from records.")
    parser.add_argument(
        "runs", nargs="*", type=Path, help="runs/gpu of make gpu, or archives of a loan's calls"
    )
    options = parser.parse_args(arguments)
    try:
        if any(path.is_file() for path in options.runs):
            with tempfile.TemporaryDirectory() as folder:
                unpack(options.runs, Path(folder))
                print(f"kept: {keep(Path(folder))}")
        elif options.runs:
            (runs,) = options.runs
            print(f"kept: {keep(runs)}")
        write_text(DOCUMENT, document())
        validation_docs.write(validation_docs.DOCUMENT)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {DOCUMENT.name} and {validation_docs.DOCUMENT.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
