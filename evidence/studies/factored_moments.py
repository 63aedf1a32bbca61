"""Loss with factored second moments beside AdamW's own, at equal seeds and batches."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from evidence.studies.host_state import (
    FLOAT,
    SETTINGS,
    Setting,
    cell_with,
    excess_findings,
    kept,
    picture,
    run,
    setting_table,
)
from experiments.lab.columns import Table
from experiments.lab.finding import Finding
from experiments.lab.study import Cell, Data, Scope, Study

FACTORED, FEW = "factored", "factored, compact, 8-bit gradients"
"""Factored second moments over float32 state, and in the fewest bytes that there are."""
CHOSEN = (
    *("fine-tuning", "fine-tuning, small rate", "fine-tuning, large rate"),
    *("from scratch", "from scratch, small rate", "from scratch, beta2 = 0.999"),
)
"""Settings of `evidence.studies.host_state` that are trained here too."""
LEAST_MEAN, LEAST_RUN = 0.5, 1.5
"""Percent of the loss with second moments of elements: the largest excess in the mean over seeds,
and of one run. Set before the first run."""
_STYLES = {FACTORED: ("#1b9e77", 0.0), FEW: ("#e7298a", 0.25)}


def _cells(scope: Scope) -> Sequence[Cell]:
    """Return all runs, seed by seed."""
    chosen = [setting for setting in SETTINGS if setting.name in CHOSEN]
    return [
        _cell(setting, variant, seed, scope)
        for seed in scope.seeds or ()
        for setting in chosen[: 1 if scope.smoke else None]
        for variant in (FLOAT, FACTORED, FEW)
    ]


def _cell(setting: Setting, variant: str, seed: int, scope: Scope) -> Cell:
    """Return a variant's run of a setting."""
    is_few = variant == FEW
    knobs = {
        "second_moment": "element" if variant == FLOAT else "factored",
        "host_state": "compact" if is_few else "float32",
        "gradient_link": "e4m3" if is_few else "model",
        "queue_depth": 4,
    }
    return cell_with(setting, variant, knobs, seed, scope)


def _findings(data: Data) -> Sequence[Finding]:
    return excess_findings(
        data["rows"],
        "held-out loss is not above AdamW's",
        "a bound of this project, set before the first run",
        (LEAST_MEAN, LEAST_RUN),
    )


def _about(data: Data) -> str:
    del data
    return (
        "Held-out loss with factored second moments less that with a second moment of each "
        "element, by the rule `zenflow` with the same seed and batches: over float32 state, and "
        "over compact state with gradients of eight bits. k = 0.1 and S = 4; runs from scratch "
        "have 800 steps, fine-tuning 400."
    )


def _tables(data: Data) -> Sequence[Table]:
    return [setting_table(data["rows"], tuple(_STYLES))]


def draw(data: Data) -> Figure:
    """Return a line of dots for each setting, one dot a seed, with the margins."""
    return picture(data["rows"], _STYLES, LEAST_MEAN)


STUDY = Study(
    name="factored_moments",
    title="Held-out loss with factored second moments",
    cells=_cells,
    run=run,
    summarise=lambda rows, _: {"rows": kept(rows)},
    findings=_findings,
    about=_about,
    tables=_tables,
    draw=draw,
    seeds=(0, 1, 2),
    minutes=60,
)
