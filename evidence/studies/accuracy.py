"""Accuracy of strategies compared with AdamW's: from scratch, fine-tuning, by learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from evidence.studies.excess_picture import draw_excess
from evidence.studies.late_updates.design import FORMER, rule_of
from evidence.studies.late_updates.training import train as train_by_plain_loop
from evidence.studies.regimes import (
    BASELINE,
    FINE_TUNING,
    LARGER,
    PRETRAINING,
    SCRATCH,
    cell_of,
    settings_of,
    train,
)
from experiments.lab.columns import Column, Table, key
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.intervals import CONFIDENCE, half_width_over_seeds
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study

RATES = {SCRATCH: (1e-3, 2e-3, 4e-4, 2e-4), FINE_TUNING: (3e-4, 1e-3, 1e-4), LARGER: (1e-3,)}
"""Learning rates by regime, AdamW's best first. The larger model has one, and one seed."""
INTERVALS = {SCRATCH: (4, 16, 8, 1), FINE_TUNING: (4, 16, 32), LARGER: (4, 16)}
"""Windows of the default rule, S."""
BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Variant:
    """A rule, and the weights' dtype on the device."""

    name: str
    strategy: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"


def variants(regime: str, rate: float) -> list[Variant]:
    """Return the trainings at a rate; bfloat16 at AdamW's best rate alone.

    The former rule stands beside the others for the larger model: a plain loop with logical
    delays, since the engine does not have it.
    """
    found = [
        Variant(BASELINE, BASELINE),
        *(Variant(f"zenflow, S = {s}", "zenflow", {"update_interval": s})
          for s in INTERVALS[regime]),
        Variant("zenflow_paper", "zenflow_paper"),
    ]  # fmt: skip
    if regime == LARGER:
        found.append(Variant(FORMER, "zenflow", {"update_interval": 4}))
    elif rate == RATES[regime][0]:
        found += [
            Variant(f"{name}, {BFLOAT16}", name, dtype=BFLOAT16) for name in ("zenflow", BASELINE)
        ]
    return found


_MARGIN = 1.0
"""Percent of the held-out loss that counts as none lost."""
_PERCENT = 100
_KEPT = ("regime", "variant", "lr", "seed", "steps", "eval_loss")


def _cells(scope: Scope) -> Sequence[Cell]:
    """Return every run: seed by seed, so that a part of them says something of each regime."""
    seeds = scope.seeds or ()
    turns = [(seed, regime) for seed in seeds for regime in (SCRATCH, FINE_TUNING)]
    return [
        _cell(regime, variant, rate, seed, scope)
        for seed, regime in (*turns, *((seed, LARGER) for seed in seeds[:1]))
        for rate in RATES[regime][: 1 if scope.smoke else None]
        for variant in variants(regime, rate)[: 2 if scope.smoke else None]
    ]


def _cell(regime: str, variant: Variant, rate: float, seed: int, scope: Scope) -> Cell:
    training = replace(
        settings_of(regime, smoke=scope.smoke),
        strategy=variant.strategy,
        knobs=dict(variant.knobs),
        dtype=variant.dtype,
        lr=rate,
        seed=seed,
    )
    cell = cell_of(regime, variant.name, training)
    if variant.name != FORMER:
        return cell
    return replace(cell, settings={**cell.settings, "rule": FORMER})


def _run(cell: Cell, job: Job) -> Row:
    if "rule" in cell.settings:
        return train_by_plain_loop(cell.work, rule_of(FORMER, cell.work.knobs["update_interval"]))
    return train(cell, job)


def _summarise(rows: Sequence[Row]) -> Data:
    return {"rows": [{name: row[name] for name in _KEPT} for row in rows]}


def excesses(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, float], list[float]]:
    """Return eval loss over the baseline's of the same seed, less 1, by (regime, variant, lr)."""
    baseline = {
        (row["regime"], row["lr"], row["seed"]): row["eval_loss"]
        for row in rows
        if row["variant"] == BASELINE
    }
    found: dict[tuple[str, str, float], list[float]] = {}
    for row in rows:
        base = baseline.get((row["regime"], row["lr"], row["seed"]))
        if row["variant"] != BASELINE and base is not None:
            ratio = row["eval_loss"] / base
            found.setdefault((row["regime"], row["variant"], row["lr"]), []).append(ratio - 1)
    return found


def _findings(data: Data) -> Sequence[Finding]:
    return [
        _finding(regime, variant, rate, [_PERCENT * value for value in values])
        for (regime, variant, rate), values in excesses(data["rows"]).items()
    ]


def _finding(regime: str, variant: str, rate: float, excess: Sequence[float]) -> Finding:
    """Return whether the loss is kept; where the interval can't tell there is no number."""
    mean = fmean(excess)
    half = half_width_over_seeds(excess)
    low, high = mean - half, mean + half
    undecided = low <= _MARGIN < high
    return Finding(
        claim=f"{regime}, learning rate {rate:g}: the held-out loss of {variant} is no more than "
        f"{_MARGIN:g} % above {BASELINE}'s",
        source="the paper claims no loss of accuracy; the margin is ours",
        unit="%",
        published=_MARGIN,
        measured=None if undecided else mean,
        tolerance=Tolerance.at_most(),
        note=f"{mean:+.2f} %, {CONFIDENCE:.0%} interval {low:+.2f} to {high:+.2f}, of "
        f"{len(excess)} seeds" + ("; it holds the margin: can't tell" if undecided else ""),
    )


def _about(data: Data) -> str:
    text = (
        f"Held-out loss, and what the strategies' lies above {BASELINE}'s of the same seed: mean "
        f"(least to most) over the seeds. Fine-tuning goes on from a model trained "
        f"{PRETRAINING.steps} steps on the default data, with Python's documentation as its text."
    )
    if all(row["variant"] != FORMER for row in data["rows"]):
        return text
    return f"{text} The *{FORMER}* is a plain loop with logical delays, in one thread."


def _tables(data: Data) -> Sequence[Table]:
    rows, found = data["rows"], excesses(data["rows"])
    tables = []
    for regime in dict.fromkeys(row["regime"] for row in rows):
        own = [row for row in rows if row["regime"] == regime]
        names = [v for v in dict.fromkeys(row["variant"] for row in own) if v != BASELINE]
        lines = [
            {
                "lr": rate,
                BASELINE: fmean(
                    r["eval_loss"] for r in own if r["lr"] == rate and r["variant"] == BASELINE
                ),
                **{variant: found.get((regime, variant, rate)) for variant in names},
            }
            for rate in sorted({row["lr"] for row in own if row["variant"] == BASELINE})
        ]
        columns = [key("lr", "g", "learning rate"), key(BASELINE, ".3f"), *map(_spread, names)]
        title = f"{regime}, {own[0]['steps']} steps"
        tables.append(Table(title=title, columns=columns, rows=lines))
    return tables


def _spread(variant: str) -> Column:
    def show(row: Mapping[str, Any]) -> str:
        values = row[variant]
        return (
            ""
            if values is None
            else f"{fmean(values):+.1%} ({min(values):+.1%} to {max(values):+.1%})"
        )

    return Column(head=variant, show=show)


STUDY = Study(
    name="accuracy",
    title="Held-out loss from scratch, where late updates hurt most, and in fine-tuning",
    cells=_cells,
    run=_run,
    summarise=lambda rows, _: _summarise(rows),
    findings=_findings,
    about=_about,
    tables=_tables,
    draw=lambda data: draw_excess(excesses(data["rows"])),
    seeds=(0, 1, 2),
    minutes=280,
    revision=2,
)
