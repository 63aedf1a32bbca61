"""Loss with formats of few bytes on seeds of their own, where three seeds can't tell."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from evidence.studies import regimes
from evidence.studies.host_state import (
    BOTH,
    COMPACT,
    FLOAT,
    LEAST_MEAN,
    NEAR,
    SETTINGS,
    Setting,
    cell_for,
    draw,
    excesses,
    kept,
    run,
)
from experiments.lab.columns import Column, Table, key
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.intervals import CONFIDENCE, Equivalence
from experiments.lab.study import Cell, Data, Scope, Study

VARIANTS = (FLOAT, COMPACT, BOTH, NEAR)
ABOVE = ("from scratch, beta2 = 0.99", "from scratch, beta2 = 0.999", "from scratch, long")
"""Settings of `evidence.studies.host_state` whose three seeds were above the margin."""
LARGER = ("10.7M parameters",)
"""Settings of that study which have one seed there."""
SMALL_RATE = Setting("10.7M parameters, small rate", regimes.LARGER, 4e-4)
"""The larger model at a rate at which the smaller one's runs scatter less."""
_PERCENT = 100


def _named(names: Sequence[str]) -> Sequence[Setting]:
    return [setting for setting in SETTINGS if setting.name in names]


def _cells(settings: Sequence[Setting], scope: Scope) -> Sequence[Cell]:
    """Return all runs of some settings, seed by seed, those of many steps last.

    A part of them says something.
    """
    cells = [
        cell_for(setting, variant, seed, scope)
        for seed in scope.seeds or ()
        for setting in settings[: 1 if scope.smoke else None]
        for variant in VARIANTS
    ]
    return sorted(cells, key=lambda cell: cell.settings["steps"])


def groups_of(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return each setting's variants with their excess over float32, in per cent, by seed."""
    return [
        {"setting": setting, "variant": variant, "excess": [_PERCENT * v for v in values]}
        for (setting, variant, _), values in excesses(rows).items()
    ]


def _interval(excess: Sequence[float]) -> str:
    return Equivalence.of(excess, LEAST_MEAN).span


def _findings(data: Data) -> Sequence[Finding]:
    return [
        Finding(
            claim=f"{group['setting']}, {group['variant']}: loss is float32's, in the mean",
            source="the aim of this project; the margin is ours", unit="%", published=LEAST_MEAN,
            measured=fmean(group["excess"]), tolerance=Tolerance.at_most(),
            note=f"{len(group['excess'])} seeds, {CONFIDENCE:.0%} interval "
            f"{_interval(group['excess'])} %",
        )
        for group in groups_of(data["rows"])
        if group["variant"] != NEAR
    ]  # fmt: skip


def _tables(data: Data) -> Sequence[Table]:
    columns = [
        key("setting"),
        key("variant"),
        Column(head="seeds", show=lambda g: str(len(g["excess"]))),
        Column(head="above float32, %", show=lambda g: f"{fmean(g['excess']):+.2f}"),
        Column(head=f"{CONFIDENCE:.0%} interval", show=lambda g: _interval(g["excess"])),
        Column(head="by seed", show=lambda g: ", ".join(f"{v:+.2f}" for v in g["excess"])),
    ]
    return [Table(title="Held-out loss", columns=columns, rows=groups_of(data["rows"]))]


def _study(
    name: str,
    title: str,
    about: str,
    settings: Sequence[Setting],
    *,
    seeds: tuple[int, ...],
    minutes: int,
) -> Study:
    """Return the study of some settings on fresh seeds."""
    return Study(
        name=name,
        title=title,
        cells=lambda scope: _cells(settings, scope),
        run=run,
        summarise=lambda rows, _: {"rows": kept(rows)},
        findings=_findings,
        about=lambda _: (
            f"{about} Float32 from first weights that differ by 0.1% shows the "
            "difference that means nothing."
        ),
        tables=_tables,
        draw=draw,
        seeds=seeds,
        minutes=minutes,
    )


STUDIES = (
    _study(
        "host_state_seeds",
        "Held-out loss with compact host state, where three seeds can't tell",
        "Settings of `zenflow study host_state` in which compact state ended more than 0.2% above "
        "float32 in the mean of three seeds, on seeds that had no part in that choice.",
        _named(ABOVE), seeds=tuple(range(3, 11)), minutes=100,
    ),
    _study(
        "host_state_larger",
        "Held-out loss with compact host state, 10.7M parameters",
        "The larger model of `zenflow study host_state`, 10.7M parameters from random weights at "
        "1e-3, which has one seed there, on other seeds.",
        _named(LARGER), seeds=(3, 4, 5), minutes=200,
    ),
    _study(
        "host_state_larger_small_rate",
        "Held-out loss with compact host state, 10.7M parameters at a small rate",
        "The larger model of `zenflow study host_state`, 10.7M parameters from random weights, at "
        "4e-4: at 1e-3 its runs scatter by 1%.",
        [SMALL_RATE], seeds=(3, 4, 5), minutes=200,
    ),
)  # fmt: skip
