"""The ablation of the update rule: what each knob wins back, from scratch and fine-tuning.

`experiments.studies.update_rule.design` lists the runs. None has a link, so nothing depends on
timing. Runs that the accuracy and staleness studies have are read from their records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.lab.columns import Column, Table, key
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study
from experiments.studies.regimes import BASELINE, cell_of, settings_of, train
from experiments.studies.update_rule.design import CENTRE, GROUPS, VARIANTS, Group, Variant
from experiments.studies.update_rule.picture import draw, findings
from experiments.studies.update_rule.step_clip import clipped_steps
from experiments.studies.update_rule.summary import FITTED_LR, NOTICED, model_error, summarise

_SMOKE = (Group(regime="fine-tuning", lr=1e-3, variants=(CENTRE, "host steps clipped at 0.25")),)


def cells_of(seeds: Sequence[int], groups: Sequence[Group], *, smoke: bool = False) -> list[Cell]:
    """Return every run, those on the device first, then the most telling.

    A run needs the one on the device that it is compared with: both are of one program on one
    machine, whatever earlier records have.
    """
    found: list[Cell] = []
    for group in groups:
        own = [_cell(group, Variant(name=BASELINE, strategy=BASELINE), s, smoke) for s in seeds]
        found += own
        for name in group.variants:
            found += [
                _cell(group, VARIANTS[name], seed, smoke, base)
                for seed, base in zip(seeds, own, strict=True)
            ]
    return found


def _cell(group: Group, variant: Variant, seed: int, smoke: bool, *needs: Cell) -> Cell:
    common = settings_of(group.regime, smoke=smoke)
    training = replace(
        common,
        strategy=variant.strategy,
        knobs=variant.knobs_over(common.steps or 0),
        lr=group.lr,
        seed=seed,
    )
    return cell_of(group.regime, variant.name, training, needs=needs, clip=variant.clip)


def _cells(scope: Scope) -> Sequence[Cell]:
    return cells_of(scope.seeds or (), _SMOKE if scope.smoke else GROUPS, smoke=scope.smoke)


def _run(cell: Cell, job: Job) -> Row:
    with clipped_steps(cell.settings.get("clip")):
        return train(cell, job)


def _about(data: Data) -> str:
    changes, repeated = data["defaults"], data["repeated"]
    better = sum(change["verdict"] == "better" for change in changes)
    worse = sum(change["verdict"] == "worse" for change in changes)
    runs = ", ".join(f"{count} from {name}" for name, count in data["sources"].items())
    parts = [
        "Numbers are held-out losses over the same seed's on the device, less 1: mean (least to "
        f"most) over seeds. Runs: {runs}."
        + (
            ""
            if repeated is None
            else f" Runs on the device made here and recorded earlier differ by {repeated:.2%} at "
            "most; each variant is compared with the one of its own origin."
        ),
        f"Of {len(changes)} changes of one knob {worse} cost loss, {better} win some, and "
        f"{len(changes) - worse - better} make no difference of {NOTICED:.1%} that all seeds "
        "agree on.",
    ]
    error = model_error(data["efficiency"])
    if error is not None:
        parts.append(
            f"`autotune.efficiency.FITTED` is off by {error:.1%} (rms) at learning rate "
            f"{FITTED_LR:g}, in settings whose loss a shorter run on the device has too. Part of "
            "these runs are those that it was fitted to."
        )
    return "\n\n".join(parts)


def _tables(data: Data) -> Sequence[Table]:
    better = [change for change in data["defaults"] if change["verdict"] == "better"]
    changed = (
        key("name", head="better than the default"),
        Column(head="where", show=lambda row: f"{row['regime']}, {row['lr']:g}"),
        key("difference", "+.2%"),
    )
    model = (
        key("name", head="setting"),
        key("lr", "g", "learning rate"),
        key("rho", ".2f"),
        Column(head="measured", show=_measured),
        key("model", ".3f"),
    )
    tables = (
        Table(title=f"The preset `{CENTRE}`", columns=changed, rows=better),
        Table(title="The tuner's model of efficiency", columns=model, rows=data["efficiency"]),
    )
    pairs = zip(data["groups"], data["ladder"], strict=True)
    return [*(t for t in tables if t.rows), *(_group(group, ladder) for group, ladder in pairs)]


def _measured(row: Mapping[str, Any]) -> str:
    return f"{'below: ' if row['extrapolated'] else ''}{row['measured']:.3f}"


def _group(group: Mapping[str, Any], ladder: Mapping[str, Any]) -> Table:
    def excess(row: Mapping[str, Any]) -> str:
        return f"{row['excess']:+.2%} ({row['least']:+.2%} to {row['most']:+.2%})"

    rungs = "; ".join(f"{rung['text']} {rung['excess']:+.2%}" for rung in ladder["rungs"])
    return Table(
        title=f"{group['regime']}, {group['steps']} steps, learning rate {group['lr']:g}",
        note=f"On the device: {group['device_loss']:.4f}. {rungs}.",
        columns=(
            key("name", head="rule"),
            Column(head="above the device's loss", show=excess),
            Column(head="seeds", show=lambda row: str(len(row["seeds"]))),
        ),
        rows=[{"name": name, **variant} for name, variant in group["variants"].items()],
    )


STUDY = Study(
    name="update_rule",
    title="What each knob of the update rule wins back",
    cells=_cells,
    run=_run,
    summarise=lambda rows, _: summarise(rows),
    findings=findings,
    about=_about,
    tables=_tables,
    draw=draw,
    seeds=(0, 1, 2),
    reuses=("staleness", "accuracy"),
    minutes=600,
)
