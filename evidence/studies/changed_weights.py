"""Loss with uploads of changed weights alone, beside uploads of all, and bytes of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from evidence.studies.host_state import (
    LEAST_MEAN,
    LEAST_RUN,
    excess_findings,
    picture,
    setting_table,
)
from evidence.studies.regimes import FINE_TUNING, cell_of, settings_of, train
from experiments.lab.columns import Column, Table, key
from experiments.lab.finding import Finding
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study

ALL, CHANGED = "all weights", "changed weights"
SHORT = "changed weights, 8-bit gradients"
_KNOBS: Mapping[str, Mapping[str, Any]] = {
    ALL: {},
    CHANGED: {"uploads": "changed"},
    SHORT: {"uploads": "changed", "gradient_link": "e4m3"},
}
RATES = (1e-5, 2e-5)
"""Learning rates: half a thousandth and a thousandth of the weights' size, which is 0.02 in most
matrices. From a thousandth on all weights are uploaded."""
_BYTES = ("d2h_bytes_per_step", "h2d_bytes_per_step")
_STYLES = {CHANGED: ("#1b9e77", 0.0), SHORT: ("#e7298a", 0.25)}


def _cells(scope: Scope) -> Sequence[Cell]:
    """Return all runs, seed by seed."""
    return [
        _cell(lr, variant, seed, scope)
        for seed in scope.seeds or ()
        for lr in RATES[: 1 if scope.smoke else None]
        for variant in _KNOBS
    ]


def _cell(lr: float, variant: str, seed: int, scope: Scope) -> Cell:
    training = replace(
        settings_of(FINE_TUNING, smoke=scope.smoke),
        strategy="zenflow", knobs={"queue_depth": 4, **_KNOBS[variant]}, dtype="bfloat16",
        lr=lr, betas=(0.9, 0.999), seed=seed,
    )  # fmt: skip
    cell = cell_of(FINE_TUNING, variant, training)
    own = {"setting": f"fine-tuning, {lr:.0e}", "beta2": 0.999}
    return replace(cell, settings={**cell.settings, **own})


def _run(cell: Cell, job: Job) -> Row:
    return train(cell, job, also_kept=_BYTES)


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    del config
    kept = ("setting", "variant", "lr", "beta2", "steps", "seed", "eval_loss", *_BYTES)
    return {"rows": [{name: row[name] for name in kept} for row in rows]}


def shares(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the bytes of each setting and variant, over those with uploads of all weights."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["setting"], row["variant"]), []).append(row)
    return [
        {
            "setting": setting, "variant": variant,
            **{
                name: fmean(r[name] for r in own) / fmean(r[name] for r in found[setting, ALL])
                for name in _BYTES
            },
        }
        for (setting, variant), own in found.items()
        if (setting, ALL) in found
    ]  # fmt: skip


def _findings(data: Data) -> Sequence[Finding]:
    return excess_findings(
        data["rows"],
        "held-out loss is that of all weights",
        "the aim of this project; the margin is ours",
        (LEAST_MEAN, LEAST_RUN),
        ALL,
    )


def _about(data: Data) -> str:
    del data
    return (
        "Fine-tuning in bfloat16 by the rule `zenflow` (k = 0.1, S = 4, 400 steps, a model of "
        "0.8M parameters), at rates so small that most weights stay as they are from one upload "
        'to the next. With `uploads="changed"` the others come back alone, and blocks take no '
        "fresh steps. Losses are over those of uploads of all weights, with the same seed and "
        "batches."
    )


def _tables(data: Data) -> Sequence[Table]:
    columns = [
        key("setting"),
        key("variant"),
        Column(head="bytes down", show=lambda row: f"{row[_BYTES[0]]:.2f}"),
        Column(head="bytes up", show=lambda row: f"{row[_BYTES[1]]:.2f}"),
    ]
    title = "Bytes of a step, over those with uploads of all weights"
    return [
        setting_table(data["rows"], tuple(_STYLES), ALL),
        Table(title=title, columns=columns, rows=shares(data["rows"])),
    ]


def draw(data: Data) -> Figure:
    """Return a line of dots for each rate, one dot a seed, with the margins."""
    return picture(data["rows"], _STYLES, LEAST_MEAN, ALL)


STUDY = Study(
    name="changed_weights",
    title="Held-out loss with uploads of changed weights",
    cells=_cells,
    run=_run,
    summarise=_summarise,
    findings=_findings,
    about=_about,
    tables=_tables,
    draw=draw,
    seeds=(0, 1, 2),
    minutes=25,
)
