"""How much of AdamW's accuracy strategies keep: from scratch, fine-tuning, by learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from experiments.lab.columns import Column, Table, key
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.intervals import CONFIDENCE, half_width_over_seeds
from experiments.lab.study import Cell, Data, Row, Scope, Study
from experiments.output.plots import draw_excess
from experiments.studies.regimes import (
    BASELINE,
    FINE_TUNING,
    PRETRAINING,
    SCRATCH,
    cell_of,
    settings_of,
    train,
)

WARM_UP = 160
"""Steps W in which one variant defers nothing: twice the rise of the learning rate."""
RATES = {SCRATCH: (4e-4, 1e-3), FINE_TUNING: (1e-4, 3e-4, 1e-3)}
_WINDOW = {"deferred_moments": "window"}
_COMPARED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    BASELINE: (BASELINE, {}),
    "zenflow_paper": ("zenflow_paper", {}),
    "zenflow": ("zenflow", {}),
    "zenflow, window moments": ("zenflow", _WINDOW),
}
VARIANTS: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    SCRATCH: {
        **_COMPARED,
        f"zenflow, window moments, W = {WARM_UP}": (
            "zenflow", {**_WINDOW, "full_warm_up_rounds": WARM_UP},
        ),
    },
    FINE_TUNING: {**_COMPARED, "zenflow, S = 16": ("zenflow", {"update_interval": 16})},
}  # fmt: skip
"""Presets, and what is changed in them, by regime and name."""
_MARGIN = 1.0
"""Percent of the held-out loss that counts as none lost."""
_PERCENT = 100
_KEPT = ("regime", "variant", "lr", "seed", "steps", "eval_loss")


def _cells(scope: Scope) -> Sequence[Cell]:
    return [
        cell_of(
            regime,
            variant,
            replace(
                settings_of(regime, smoke=scope.smoke),
                strategy=strategy,
                knobs=dict(knobs),
                lr=rate,
                seed=seed,
            ),
        )
        for regime, rates in RATES.items()
        for rate in (rates[:1] if scope.smoke else rates)
        for variant, (strategy, knobs) in list(VARIANTS[regime].items())[
            : 2 if scope.smoke else None
        ]
        for seed in scope.seeds or ()
    ]


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
        if row["variant"] != BASELINE:
            ratio = row["eval_loss"] / baseline[row["regime"], row["lr"], row["seed"]]
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


_ABOUT = (
    f"Held-out loss, and what the strategies' lies above {BASELINE}'s of the same seed: mean "
    f"(least to most) over the seeds. Fine-tuning goes on from a model trained "
    f"{PRETRAINING.steps} steps on the default data, with Python's documentation as its text."
)


def _tables(data: Data) -> Sequence[Table]:
    rows, found = data["rows"], excesses(data["rows"])
    tables = []
    for regime in dict.fromkeys(row["regime"] for row in rows):
        own = [row for row in rows if row["regime"] == regime]
        variants = [v for v in dict.fromkeys(row["variant"] for row in own) if v != BASELINE]
        lines = [
            {
                "lr": rate,
                BASELINE: fmean(
                    r["eval_loss"] for r in own if r["lr"] == rate and r["variant"] == BASELINE
                ),
                **{variant: found[regime, variant, rate] for variant in variants},
            }
            for rate in dict.fromkeys(row["lr"] for row in own)
        ]
        columns = [key("lr", "g", "learning rate"), key(BASELINE, ".3f"), *map(_spread, variants)]
        title = f"{regime}, {own[0]['steps']} steps"
        tables.append(Table(title=title, columns=columns, rows=lines))
    return tables


def _spread(variant: str) -> Column:
    def show(row: Mapping[str, Any]) -> str:
        values = row[variant]
        return f"{fmean(values):+.1%} ({min(values):+.1%} to {max(values):+.1%})"

    return Column(head=variant, show=show)


STUDY = Study(
    name="accuracy",
    title="Held-out loss from scratch, where late updates hurt most, and in fine-tuning",
    cells=_cells,
    run=train,
    summarise=lambda rows, _: _summarise(rows),
    findings=_findings,
    about=lambda data: _ABOUT,
    tables=_tables,
    draw=lambda data: draw_excess(excesses(data["rows"])),
    seeds=(0, 1, 2),
    minutes=180,
)
