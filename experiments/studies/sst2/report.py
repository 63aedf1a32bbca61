"""The study's record: every run on a line, what they share, a table with verdicts, a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lab.intervals import (
    CONFIDENCE,
    FAILS,
    HOLDS,
    MARGIN,
    UNKNOWN,
    Comparison,
    compare,
)
from experiments.lab.variants import AUTO, BASELINE
from experiments.output.files import write_json, write_text
from experiments.output.plots import save_figure
from experiments.studies.sst2.picture import draw_accuracy
from zenflow.errors import ConfigError

ROWS, ORIGIN, PICTURE, README = "record.jsonl", "study.json", "accuracy.png", "README.md"
_POINTS = 100


def write_record(
    folder: Path,
    header: Mapping[str, Any],
    origin: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> str:
    """Write all files of the record and return its table.

    Args:
        folder: Made if missing.
        header: What all runs share.
        origin: Commit, versions, hardware.
        rows: Of every run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = ({key: value for key, value in row.items() if key != "identity"} for row in rows)
    write_text(folder / ROWS, "".join(json.dumps(line) + "\n" for line in lines))
    write_json(folder / ORIGIN, {**header, **origin})
    found = compare(rows, header["num_test"])
    write_text(folder / README, report(found, header, origin))
    save_figure(draw_accuracy(found, title(header)), folder / PICTURE)
    return "\n".join(table(found))


def read_record(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a record's header (origin included) and rows.

    Raises:
        ConfigError: There is no record, or it can't be read.
    """
    try:
        header = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
        lines = (folder / ROWS).read_text(encoding="utf-8").splitlines()
        return header, [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} holds no readable record of the study ({error}): make one with "
            "python -m experiments.studies.sst2"
        ) from error


def title(header: Mapping[str, Any]) -> str:
    """Return what was compared, in a line."""
    model = str(header["model"]).removeprefix("package:")
    return (
        f"{model} on {header['data']}: {header['num_train']} sentences, {header['epochs']:g} "
        f"epochs, tested on {header['num_test']}"
    )


def report(
    found: Sequence[Comparison], header: Mapping[str, Any], origin: Mapping[str, Any]
) -> str:
    """Return the results as Markdown."""
    counts = {verdict: 0 for verdict in (HOLDS, FAILS, UNKNOWN)}
    for comparison in found[1:]:
        counts[comparison.verdict] += 1
    lines = [
        "# Accuracy on SST-2",
        "",
        f"Made by `python -m experiments.studies.sst2`, commit {origin['commit']}, on "
        f"{origin['hardware']['cpu']}. {title(header)}. AdamW, learning rate {header['lr']:g} "
        f"with a warm-up over {header['warmup']:.0%} of the steps and a linear decay, batches of "
        f"{header['batch_size']}, clipped at {header['max_grad_norm']:g}. A seed gives every "
        "strategy the same head, batches and dropout; the test is looked at once, when a run has "
        "ended, and nothing was chosen by it.",
        "",
        f"The claim is that a strategy loses no more than {_POINTS * MARGIN:g} point of the "
        f"accuracy that {BASELINE} has, a margin set beforehand. It *holds* where the "
        f"{CONFIDENCE:.0%} interval of the difference lies above that loss, *does not hold* where "
        "it lies below, and else these runs *can't tell*. The interval is the wider of two: over "
        "the seeds (Student's t of the paired differences) and over the test sentences (normal, "
        "each with its mean difference over the seeds). p is the paired t-test's; a large one "
        "shows nothing by itself. Each strategy is judged at 5% by itself.",
        "",
        f"![accuracies and differences]({PICTURE})",
        "",
        *table(found),
        "",
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".",
        *_notes(found),
    ]
    return "\n".join(lines) + "\n"


def table(found: Sequence[Comparison]) -> list[str]:
    """Return a line per strategy, Markdown."""
    lines = [
        f"| strategy | seeds | accuracy | spread | difference | {CONFIDENCE:.0%} interval | p "
        f"| loses at most {_POINTS * MARGIN:g} point |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for comparison in found:
        own = (
            f"| {comparison.variant} | {len(comparison.seeds)} | {comparison.mean:.2%} | "
            f"{_points(comparison.spread, '')} |"
        )
        if comparison.variant == BASELINE:
            lines.append(own + " | | | |")
            continue
        low, high = comparison.interval
        verdict = comparison.verdict + (" (equal)" if comparison.is_equivalent else "")
        p_value = "" if math.isnan(comparison.p_value) else f"{comparison.p_value:.3f}"
        lines.append(
            f"{own} {_points(comparison.difference)} | {_points(low)} to {_points(high)} | "
            f"{p_value} | {verdict} |"
        )
    return lines


def _points(value: float, sign: str = "+") -> str:
    return f"{_POINTS * value:{sign}.2f}" if math.isfinite(value) else "unknown"


def _notes(found: Sequence[Comparison]) -> list[str]:
    notes = [
        "",
        f"*equal*: the interval lies within {_POINTS * MARGIN:g} point either way.",
    ]
    losing = [c.variant for c in found[1:] if c.interval[1] < 0]
    if losing:
        notes += ["", f"A loss of some size is certain at this confidence: {', '.join(losing)}."]
    if any(c.variant == AUTO for c in found):
        notes += [
            "",
            f"{AUTO} is tuned over an emulated link by what its steps took, so a repetition may "
            "choose other knobs; the other strategies have no link, as nothing that they compute "
            "depends on it.",
        ]
    return notes
