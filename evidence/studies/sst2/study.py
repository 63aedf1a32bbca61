"""Accuracy of a pretrained encoder on SST-2's sentences, under every strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from evidence.studies.sst2.design import subject
from evidence.studies.sst2.picture import draw_accuracy
from experiments.lab.columns import Column, Table
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.intervals import (
    CONFIDENCE,
    FAILS,
    HOLDS,
    MARGIN,
    UNKNOWN,
    Comparison,
    Equivalence,
    compare,
)
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study
from experiments.lab.variants import AUTO, BASELINE, FEW_BYTES
from experiments.paper import published as paper

_MOST_LOSS = 0.2
"""Percent of the test loss that fewer bytes may cost on average; set before they were tried."""
_WHOLE_BYTES = "zenflow"
"""The variant that differs from those of fewer bytes in nothing else."""
_LONG_WINDOWS = "zenflow_paper S=16"
"""The variant of which a loss of accuracy has been published."""
_KEPT = ("variant", "seed", "accuracy", "correct", "eval_loss")
_OF_STUDY = (
    "model", "data", "num_train", "num_test", "epochs", "lr", "warmup", "batch_size",
    "max_grad_norm",
)  # fmt: skip
_POINTS = 100


def _cells(scope: Scope) -> Sequence[Cell]:
    return subject(scope).cells(scope.seeds or (0,))


def _run(cell: Cell, job: Job) -> Row:
    from evidence.studies.sst2.run import emulated_link, fine_tune  # they load torch

    settings, sentences = cell.work
    if "part" in cell.settings:
        return {"bytes_per_second": emulated_link(settings, sentences)}
    for link in cell.needs:
        rate = job.row_of(link)["bytes_per_second"]
        settings = replace(settings, link=(rate, rate) if rate else None)
    return fine_tune(settings, sentences, job.folder)


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    order = {name: place for place, name in enumerate(dict.fromkeys(r["variant"] for r in rows))}
    ordered = sorted(rows, key=lambda row: (order[row["variant"]], row["seed"]))
    return {
        "study": {name: config[name] for name in _OF_STUDY},
        "rows": [{name: row[name] for name in _KEPT} for row in ordered],
    }


def _compared(data: Data) -> list[Comparison]:
    return compare(data["rows"], data["study"]["num_test"])


def findings(data: Data) -> Sequence[Finding]:
    """Return which strategies keep the accuracy."""
    compared = _compared(data)
    found = [_kept(comparison) for comparison in compared if comparison.variant != BASELINE]
    found += [_interval_loss(c) for c in compared if c.variant == _LONG_WINDOWS]
    few = {name: loss_percents(data, name, _WHOLE_BYTES) for name in FEW_BYTES}
    return [*found, *(_loss_kept(name, percents) for name, percents in few.items() if percents)]


def _kept(comparison: Comparison) -> Finding:
    """Return whether the accuracy is kept; where the interval can't tell there is no number."""
    low, high = (_POINTS * end for end in comparison.interval)
    undecided = comparison.verdict == UNKNOWN
    basis = "emulated" if comparison.variant == AUTO else "measured"
    return Finding(
        claim=f"{comparison.variant} loses no more than {_POINTS * MARGIN:g} point of accuracy "
        f"beside {BASELINE}",
        source="the paper claims no loss of accuracy; the margin is ours, set beforehand",
        unit="points",
        published=-_POINTS * MARGIN,
        tolerance=Tolerance.at_least(),
        note=f"{_POINTS * comparison.difference:+.2f} points, {CONFIDENCE:.0%} interval "
        f"{low:+.2f} to {high:+.2f}; {_POINTS * comparison.mean:.2f} % on average of "
        f"{len(comparison.seeds)} seeds; paired t-test p = {comparison.p_value:.3f}"
        + ("; the interval holds the margin: can't tell" if undecided else ""),
        **{basis: None if undecided else _POINTS * comparison.difference},
    )


def _interval_loss(comparison: Comparison) -> Finding:
    published = paper.INTERVAL_LOSS
    return Finding(
        claim="Windows of 16 steps lose about 0.02 of accuracy under the published rule",
        source=published.source,
        unit=published.unit,
        published=published.value,
        measured=-comparison.difference,
        tolerance=Tolerance.absolute(MARGIN),
        note="Which task that was is not known.",
    )


def loss_percents(data: Data, variant: str, base: str) -> list[float]:
    """Return by how many percent a variant's test loss lies above another's, by seed."""
    losses = {(row["variant"], row["seed"]): row["eval_loss"] for row in data["rows"]}
    return [
        _POINTS * (loss / losses[base, seed] - 1)
        for (name, seed), loss in losses.items()
        if name == variant and (base, seed) in losses
    ]


def _loss_kept(variant: str, percents: Sequence[float]) -> Finding:
    """Return whether fewer bytes keep the test loss."""
    test = Equivalence.of(percents, _MOST_LOSS)
    return Finding(
        claim=f"The test loss of {variant} is no more than {_MOST_LOSS:g}% above that of "
        f"{_WHOLE_BYTES}",
        source="the aim of this project; the margin was set beforehand",
        unit="%",
        published=_MOST_LOSS,
        measured=test.difference,
        tolerance=Tolerance.at_most(),
        note=f"by seed {', '.join(f'{percent:+.3f}' for percent in percents)}%"
        + (f"; {CONFIDENCE:.0%} interval of the mean {test.span}%" if test.span else ""),
    )


def _title(header: Mapping[str, Any]) -> str:
    """Return the comparison in a line."""
    model = str(header["model"]).removeprefix("package:")
    return (
        f"{model} on {header['data']}: {header['num_train']} sentences, {header['epochs']:g} "
        f"epochs, tested on {header['num_test']}"
    )


def _about(data: Data) -> str:
    study, found = data["study"], _compared(data)
    counts = {verdict: 0 for verdict in (HOLDS, FAILS, UNKNOWN)}
    for comparison in found[1:]:
        counts[comparison.verdict] += 1
    losing = [c.variant for c in found[1:] if c.interval[1] < 0]
    parts = [
        f"{_title(study)}. AdamW, learning rate {study['lr']:g} with a warm-up over "
        f"{study['warmup']:.0%} of the steps and a linear decay, batches of "
        f"{study['batch_size']}, clipped at {study['max_grad_norm']:g}. A seed gives every "
        "strategy the same head, batches and dropout; the test is looked at once, when a run has "
        "ended, and nothing was chosen by it.",
        f"The claim is that a strategy loses no more than {_POINTS * MARGIN:g} point of the "
        f"accuracy that {BASELINE} has, a margin set beforehand. It *holds* where the "
        f"{CONFIDENCE:.0%} interval of the difference lies above that loss, *does not hold* where "
        "it lies below, and else these runs *can't tell*. The interval is the wider of two: over "
        "the seeds (Student's t of the paired differences) and over the test sentences (normal, "
        "each with its mean difference over the seeds). p is the paired t-test's; a large one "
        "shows nothing by itself. Each strategy is judged at 5% by itself. *Equal*: the interval "
        f"lies within {_POINTS * MARGIN:g} point either way.",
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        + "."
        + (
            f" A loss of some size is certain at this confidence: {', '.join(losing)}."
            if losing
            else ""
        ),
    ]
    if any(c.variant == AUTO for c in found):
        parts.append(
            f"{AUTO} is tuned over an emulated link by what its steps took, so a repetition may "
            "choose other knobs; the other strategies have no link, as nothing that they compute "
            "depends on it."
        )
    return "\n\n".join(parts)


def _tables(data: Data) -> Sequence[Table]:
    def beside(head: str, show: Callable[[Comparison], str]) -> Column:
        """Return a column that says nothing of the baseline itself."""
        return Column(head=head, show=lambda c: "" if c.variant == BASELINE else show(c))

    columns = [
        Column(head="strategy", show=lambda c: c.variant),
        Column(head="seeds", show=lambda c: str(len(c.seeds))),
        Column(head="accuracy", show=lambda c: f"{c.mean:.2%}"),
        Column(head="spread", show=lambda c: _points(c.spread, "")),
        beside("difference", lambda c: _points(c.difference)),
        beside(f"{CONFIDENCE:.0%} interval", lambda c: " to ".join(map(_points, c.interval))),
        beside("p", lambda c: "" if math.isnan(c.p_value) else f"{c.p_value:.3f}"),
        beside(
            f"loses at most {_POINTS * MARGIN:g} point",
            lambda c: c.verdict + (" (equal)" if c.is_equivalent else ""),
        ),
        beside(
            f"test loss beside {BASELINE}, %",
            lambda c: f"{fmean(loss_percents(data, c.variant, BASELINE)):+.2f}",
        ),
    ]
    return [Table(columns=columns, rows=_compared(data))]


def _points(value: float, sign: str = "+") -> str:
    return f"{_POINTS * value:{sign}.2f}" if math.isfinite(value) else "unknown"


STUDY = Study(
    name="sst2",
    title="Accuracy of a fine-tuned encoder on SST-2",
    cells=_cells,
    run=_run,
    summarise=_summarise,
    findings=findings,
    about=_about,
    tables=_tables,
    draw=lambda data: draw_accuracy(_compared(data), _title(data["study"])),
    settings=lambda scope: subject(scope).header(),
    seeds=(0, 1, 2, 3),
    minutes=100,
    revision=2,
    uses=frozenset({"data_dir", "dataset", "model"}),
)
