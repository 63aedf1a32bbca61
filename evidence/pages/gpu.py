"""Numbers of docs/gpu.md: what the newest record of `make gpu` says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from evidence.benchmarks.gpu.figures import aims
from evidence.benchmarks.gpu.keep import PICTURE, RECORD, TESTS
from evidence.benchmarks.gpu.loan.records import LOG, SUITE, outcomes
from evidence.benchmarks.gpu.step import VISITS
from evidence.pages.gpu_predicted import predicted
from experiments.lab.losses import excess
from experiments.lab.variants import BASELINE
from experiments.output.provenance import RESULTS, newest

_FUSED = "torch's fused AdamW, no float32 masters"
_PASSED = [14_336, 4096]
"""Shape whose parts of the pass are shown, the MLP's of an 8B model."""
_BEGINNING = 5
"""Steps in which kernels are compiled and memory is touched for the first time."""
_COUNTS = ("tests", "failures", "errors", "skipped")
"""Counts of a JUnit file's suites."""


def newest_suite() -> dict[str, Any] | None:
    """Return the content of the newest committed record of `make gpu`; None without one."""
    folder = newest(RESULTS, "gpu", SUITE)
    return None if folder is None else read_suite(folder)


def read_suite(folder: Path) -> dict[str, Any]:
    """Return the content of a record of `make gpu`.

    ``rows`` are those of the table of speeds. ``first`` has the speeds of the first cell, as
    shares of the device's. ``missed`` are the aims that don't hold, out of ``applying`` that
    apply. ``former`` has, for each run of ``zenflow`` under the update rule before the exact one,
    the share by which its loss ended above AdamW's.
    """
    suite = _json(folder / SUITE)
    records = [_json(path) for path in sorted(folder.glob(f"presets-*/{RECORD}"))]
    cells = [cell for record in records for cell in record["cells"]]
    unreached = [name for record in records for name in record["not_reached"]]
    expected = predicted(suite, cells, unreached)
    judged = [(cell["cell"]["name"], aim) for cell in cells for aim in aims(cell["runs"])]
    return {
        "name": folder.name,
        "gpu": suite["hardware"]["gpu"],
        "cores": suite["hardware"]["cores"],
        "torch": suite["versions"]["torch"],
        "commit": suite["commit"],
        "parts": [f"{part['part']} {_ended(folder, part)}" for part in suite["parts"]],
        "first": _first(cells),
        "picture": PICTURE if (folder / PICTURE).is_file() else "",
        "rows": list(_rows(cells, expected)),
        "off": list(_off(cells, expected)),
        "expected": {key: 1e3 * seconds for key, seconds in expected.items()},
        "applying": sum(aim.holds is not None for _, aim in judged),
        "missed": [f"{name}: {aim}" for name, aim in judged if aim.holds is False],
        "former": list(former_excesses(cells)),
        "not_reached": unreached,
        "kernels": sorted({run.get("kernels", "torch") for cell in cells for run in cell["runs"]}),
        "capped": _capped(),
        "visits": _visits(cells),
        "spread": _spread(cells),
        "given": _json(folder / "given" / RECORD) if (folder / "given").is_dir() else None,
        "passes": _passes(folder),
        "counts": _counts(),
    }


def _off(
    cells: Iterable[Mapping[str, Any]], expected: Mapping[tuple[str, str], float]
) -> Iterator[float]:
    """Yield by what share of a measured step each predicted one is off, without its sign."""
    for cell in cells:
        for run in cell["runs"]:
            ahead = expected.get((cell["cell"]["name"], run["name"]))
            if ahead is not None:
                yield abs(ahead / run["step_seconds"]["median"] - 1.0)


def _capped() -> dict[str, Any] | None:
    """Return memory, speed and stalls of 8B in little memory, in the newest record that has it."""
    folder = newest(RESULTS, "gpu", f"presets-8b-capped/{RECORD}")
    if folder is None:
        return None
    cells = _json(folder / RECORD)["cells"]
    runs = [
        f"{cell['cell']['name']}, {run['name']}: {run['peak_device_bytes'] / 2**30:.1f} "
        f"GiB at its peak and {run['tokens_per_second']:.0f} tokens/s, of which "
        f"{run['stall_fraction']:.0%} of the time was stalled on the host"
        for cell in cells
        for run in cell["runs"]
    ]
    return {"name": folder.parent.name, "runs": runs}


def _visits(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return memory and losses of runs with all, half and none of their layers on the device."""
    for cell in cells:
        runs = [run for run in cell["runs"] if run["name"] == "all stay" or "visit" in run["name"]]
        if len(runs) < len(VISITS):
            continue
        return {
            "cell": cell["cell"]["name"],
            "gib": [run["peak_device_bytes"] / 2**30 for run in runs],
            "losses": [[run["losses"][step] for run in runs] for step in (0, 1)],
            "memory": cell["speeds"]["host_bytes_per_second"] / 1e9,
            "again": _again(runs[1]),
        }
    return None


def _again(half: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return figures of a later run, whose layers all stay, beside a run of which half visit."""
    folder = newest(RESULTS, "gpu-visits", SUITE)
    if folder is None:
        return None
    (cell,) = _json(folder / "presets-8b-visits" / RECORD)["cells"]
    (run,) = cell["runs"]
    return {
        "name": folder.name,
        **cell["gradients"],
        "equal": sum(
            1 for _ in takewhile(_are_equal, zip(run["losses"], half["losses"], strict=False))
        ),
        "ms": 1e3 * run["step_seconds"]["median"],
        "stalled": run["stall_fraction"],
        "busy": run["lanes"]["host"]["busy_share"],
        "memory": cell["speeds"]["host_bytes_per_second"] / 1e9,
    }


def _are_equal(pair: tuple[float, float]) -> bool:
    return pair[0] == pair[1]


def _spread(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return how unequal the steps of the first cell's `zenflow` were once it was under way."""
    runs = [run for cell in cells[:1] for run in cell["runs"] if run["name"] == "zenflow"]
    if not runs or runs[0]["reports"][0].get("starved") is None:
        return None
    later = [report for report in runs[0]["reports"] if report["step"] > _BEGINNING]
    seconds = [report["seconds"] for report in later]
    return {
        "cell": cells[0]["cell"]["name"],
        "steps": len(later),
        "least": 1e3 * min(seconds),
        "most": 1e3 * max(seconds),
        "dry": sum(report["starved"] > 0 for report in later),
    }


def _passes(folder: Path) -> dict[str, Any] | None:
    """Return the times of both kinds of kernels, by part of the pass."""
    path = folder / "device_pass" / RECORD
    if not path.is_file():
        return None
    record = _json(path)
    shape = _PASSED
    rows = [row for row in record["rows"] if row["shape"] == shape]
    parts = {row["part"]: {"part": row["part"]} for row in rows}
    rate = record["copy_bytes_per_second"]
    for row in rows:
        own, scale = parts[row["part"]], 1e12 / (shape[0] * shape[1])
        own[row["implementation"]] = scale * row["seconds"]
        own["least"] = scale * row["bytes"] / rate
    return {"shape": " x ".join(map(str, shape)), "rows": list(parts.values())}


def _counts() -> dict[str, Any] | None:
    """Return launches and bytes of the pass, by part, in the newest record of counts."""
    folder = newest(RESULTS, "pass-counts", RECORD)
    if folder is None:
        return None
    record = _json(folder / RECORD)
    of_bytes, of_launches = record["bytes"].values(), record["launches"]["release"]
    *parts, rest = record["parts"]
    rows = [
        {
            "part": part,
            "launches": [own.get(part, 0.0) for own in of_launches.values()],
            "bytes": [own[part]["counted"] for own in of_bytes],
            "least": record["bytes"]["torch"][part]["least"],
        }
        for part in parts
    ]
    rows.append({"part": rest, "launches": [own[rest] for own in of_launches.values()]})
    whole = {
        "part": "all",
        "launches": [sum(own) for own in zip(*(r["launches"] for r in rows), strict=True)],
        "bytes": [sum(own) for own in zip(*(r["bytes"] for r in rows[:-1]), strict=True)],
        "least": sum(row["least"] for row in rows[:-1]),
    }
    shape = " x ".join(map(str, record["shape"]))
    return {"name": folder.name, "shape": shape, "rows": [*rows, whole]}


def _first(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return speed and loss of the first cell beside the device's; None if it lacks a run."""
    runs = {run["name"]: run for run in cells[0]["runs"]} if cells else {}
    if not {"zenflow", "zero_offload", BASELINE} <= runs.keys():
        return None
    device = runs[BASELINE]
    return {
        "ours": runs["zenflow"]["tokens_per_second"] / device["tokens_per_second"],
        "theirs": runs["zero_offload"]["tokens_per_second"] / device["tokens_per_second"],
        "above": excess(runs["zenflow"]["losses"], device["losses"]),
        "is_former": "update_rule" not in runs["zenflow"]["config"],
    }


def former_excesses(cells: Iterable[Mapping[str, Any]]) -> Iterator[float]:
    """Yield by what share each run of the former update rule ended above AdamW's loss."""
    for cell in cells:
        runs = {run["name"]: run for run in cell["runs"]}
        for name, run in runs.items():
            is_former = name.split(",")[0] == "zenflow" and "update_rule" not in run["config"]
            if is_former and BASELINE in runs:
                yield excess(run["losses"], runs[BASELINE]["losses"])


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


def _rows(
    cells: Sequence[Mapping[str, Any]], expected: Mapping[tuple[str, str], float]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each run of all cells, beside the device alone and what was predicted."""
    for cell in cells:
        name = cell["cell"]["name"]
        device = next((run for run in cell["runs"] if run["name"] == BASELINE), None)
        fused = cell.get("torch_fused")
        baseline = [{"name": _FUSED, "stall_fraction": 0.0, **fused}] if fused else []
        for run in [*baseline, *cell["runs"]]:
            rate, peak = run["tokens_per_second"], run["peak_device_bytes"]
            ahead = expected.get((name, run["name"]))
            yield {
                "cell": name,
                "run": run["name"],
                "ms": f"{1e3 * run['step_seconds']['median']:.1f}",
                "predicted": "-" if ahead is None else f"{1e3 * ahead:.1f}",
                "tokens": f"{rate:.0f}",
                "share": "-" if device is None else f"{rate / device['tokens_per_second']:.3f}",
                "stalled": f"{run['stall_fraction']:.1%}",
                "peak": "-" if peak is None else f"{peak / 1e9:.1f}",
            }
        for kept, how in (("does_not_fit", "does not fit"), ("failures", "**failed**")):
            for run in cell[kept]:
                blank = dict.fromkeys(("predicted", "tokens", "share", "stalled", "peak"), "")
                yield {"cell": name, "run": run, "ms": how, **blank}
    reached = {(cell["cell"]["name"], run["name"]) for cell in cells for run in cell["runs"]}
    for (name, run), seconds in expected.items():
        if (name, run) not in reached:
            blank = dict.fromkeys(("tokens", "share", "stalled", "peak"), "")
            told = {"ms": "not reached", "predicted": f"{1e3 * seconds:.1f}"}
            yield {"cell": name, "run": run, **told, **blank}


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
