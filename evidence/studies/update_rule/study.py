"""The ablation of the update rule: what each setting does, from scratch and fine-tuning.

`evidence.studies.update_rule.design` lists the runs. None has a link, so nothing depends on
timing. Runs that the accuracy and staleness studies have are read from their records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evidence.studies.regimes import BASELINE, FINE_TUNING, cell_of, settings_of, train
from evidence.studies.update_rule.design import CENTRE, GROUPS, VARIANTS, Group, Variant
from evidence.studies.update_rule.picture import draw, findings
from evidence.studies.update_rule.summary import NOTICED, summarise
from experiments.lab.columns import Column, Table, key
from experiments.lab.study import Cell, Data, Scope, Study

_SMOKE = (Group(regime=FINE_TUNING, lr=1e-3, variants=(CENTRE, "S = 2")),)


def cells_of(seeds: Sequence[int], groups: Sequence[Group], *, smoke: bool = False) -> list[Cell]:
    """Return every run: seed by seed and group by group, the one on the device first.

    A run needs the one on the device that it is compared with: both are of one program on one
    machine, whatever earlier records have.
    """
    found: list[Cell] = []
    for seed in seeds:
        for group in groups:
            base = _cell(group, Variant(name=BASELINE, strategy=BASELINE), seed, smoke)
            others = [_cell(group, VARIANTS[name], seed, smoke, base) for name in group.variants]
            found += [base, *others]
    return found


def _cell(group: Group, variant: Variant, seed: int, smoke: bool, *needs: Cell) -> Cell:
    common = settings_of(group.regime, smoke=smoke)
    training = replace(
        common,
        strategy=variant.strategy,
        knobs=dict(variant.knobs),
        lr=group.lr,
        seed=seed,
    )
    return cell_of(group.regime, variant.name, training, needs=needs)


def _cells(scope: Scope) -> Sequence[Cell]:
    return cells_of(scope.seeds or (), _SMOKE if scope.smoke else GROUPS, smoke=scope.smoke)


def _about(data: Data) -> str:
    runs = ", ".join(f"{count} from {name}" for name, count in data["sources"].items())
    text = (
        "Numbers are held-out losses over the same seed's on the device, less 1: mean (least to "
        f"most) over seeds. *Better* and *worse* than the preset `{CENTRE}` are rules that differ "
        f"from it by {NOTICED:.1%} on average, in all seeds to one side. Runs: {runs}."
    )
    if data["repeated"] is None:
        return text
    return (
        f"{text} Runs on the device made here and recorded earlier differ by "
        f"{data['repeated']:.2%} at most; each rule is compared with the one of its own origin."
    )


def _table(group: Mapping[str, Any]) -> Table:
    def excess(row: Mapping[str, Any]) -> str:
        return f"{row['excess']:+.2%} ({row['least']:+.2%} to {row['most']:+.2%})"

    return Table(
        title=f"{group['regime']}, {group['steps']} steps, learning rate {group['lr']:g}",
        note=f"On the device: {group['device_loss']:.4f}.",
        columns=(
            key("name", head="rule"),
            Column(head="above the device's loss", show=excess),
            key("verdict", head=f"than {CENTRE}"),
            Column(head="seeds", show=lambda row: str(len(row["seeds"]))),
        ),
        rows=[{"name": name, **variant} for name, variant in group["variants"].items()],
    )


STUDY = Study(
    name="update_rule",
    title="What each setting of the update rule is worth",
    cells=_cells,
    run=train,
    summarise=lambda rows, _: summarise(rows),
    findings=findings,
    about=_about,
    tables=lambda data: [_table(group) for group in data["groups"]],
    draw=draw,
    seeds=(0, 1, 2),
    reuses=("accuracy", "staleness"),
    minutes=60,
    revision=4,
)
