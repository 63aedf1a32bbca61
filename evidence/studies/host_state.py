"""Loss with formats of few bytes beside float32's, at equal seeds and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from evidence.studies.regimes import (
    FINE_TUNING,
    LARGER,
    SCRATCH,
    cell_of,
    settings_of,
    train,
)
from experiments.lab.columns import Column, Table, key
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study

FLOAT, COMPACT, OFTEN = "float32", "compact", "compact, q = 1"
SHORT, BOTH = "8-bit gradients", "compact, 8-bit gradients"
"""Gradients in eight bits (`gradient_link="e4m3"`), with float32 state and with compact state."""
CLAIMED = (COMPACT, SHORT, BOTH)
"""Variants that are to keep float32's loss."""
NEAR = "float32, other start"
"""Float32 from first weights that differ by about 0.1%: a difference that means nothing. Formats
can't be told apart by less than the difference that it makes."""
START_NOISE = 0.001
"""Standard deviation of a first weight's change, over the weight."""
LEAST_MEAN, LEAST_RUN = 0.2, 0.5
"""Percent of float32's loss: the largest excess in the mean over seeds, and of one run."""
_PERCENT = 100
_STYLES = {
    COMPACT: ("#1b9e77", 0.0), SHORT: ("#7570b3", 0.15), BOTH: ("#e7298a", 0.3),
    NEAR: ("#7f7f7f", 0.45), OFTEN: ("#d95f02", 0.6),
}  # fmt: skip
"""Colour of each variant's dots in the picture, and how far they lie below the line."""
_KEPT = ("setting", "variant", "lr", "beta2", "steps", "seed", "eval_loss")


@dataclass(frozen=True, slots=True)
class Setting:
    """A training that both formats run."""

    name: str
    regime: str
    lr: float
    beta2: float = 0.95
    knobs: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    """Steps where they are others than the regime's."""
    others: tuple[str, ...] = (NEAR,)
    """Variants besides float32 and those of `CLAIMED`."""


SETTINGS = (
    Setting("from scratch", SCRATCH, 1e-3, others=(NEAR, OFTEN)),
    Setting("fine-tuning", FINE_TUNING, 3e-4),
    Setting("from scratch, all deferred", SCRATCH, 1e-3, knobs={"topk_ratio": 0.0}),
    Setting("from scratch, S = 16", SCRATCH, 1e-3, knobs={"update_interval": 16}),
    Setting("from scratch, small rate", SCRATCH, 4e-4),
    Setting("from scratch, beta2 = 0.99", SCRATCH, 1e-3, 0.99),
    Setting("from scratch, beta2 = 0.999", SCRATCH, 1e-3, 0.999),
    Setting("fine-tuning, small rate", FINE_TUNING, 1e-4, 0.999),
    Setting("fine-tuning, large rate", FINE_TUNING, 1e-3, 0.999),
    Setting("from scratch, long", SCRATCH, 1e-3, steps=2000),
    Setting("10.7M parameters", LARGER, 1e-3, others=()),
)
"""Trainings, the most telling first. The larger model has one seed."""


def _cells(scope: Scope) -> Sequence[Cell]:
    """Return all runs of every setting, seed by seed."""
    seeds = scope.seeds or ()
    return [
        cell_for(setting, variant, seed, scope)
        for seed in seeds
        for setting in SETTINGS[: 1 if scope.smoke else None]
        if setting.regime != LARGER or seed == seeds[-1]
        for variant in (FLOAT, *CLAIMED, *setting.others)
    ]


def cell_for(setting: Setting, variant: str, seed: int, scope: Scope) -> Cell:
    """Return a variant's run of a setting."""
    knobs = {
        "host_state": FLOAT if variant in (FLOAT, SHORT, NEAR) else COMPACT,
        "gradient_link": "e4m3" if variant in (SHORT, BOTH) else "model",
        "queue_depth": 1 if variant == OFTEN else 4,
    }
    noise = START_NOISE if variant == NEAR else 0.0
    return cell_with(setting, variant, knobs, seed, scope, start_noise=noise)


def cell_with(
    setting: Setting,
    variant: str,
    knobs: Mapping[str, Any],
    seed: int,
    scope: Scope,
    *,
    start_noise: float = 0.0,
) -> Cell:
    """Return a run of a setting with these settings of the update rule besides its own."""
    common = settings_of(setting.regime, smoke=scope.smoke)
    training = replace(
        common,
        strategy="zenflow",
        knobs={**setting.knobs, **knobs},
        lr=setting.lr,
        betas=(0.9, setting.beta2),
        steps=common.steps if scope.smoke or setting.steps is None else setting.steps,
        seed=seed,
    )
    cell = cell_of(setting.regime, variant, training)
    own = {"setting": setting.name, "beta2": setting.beta2, "start_noise": start_noise}
    return replace(cell, settings={**cell.settings, **own})


def run(cell: Cell, job: Job) -> Row:
    """Carry out a run and return its losses."""
    return train(cell, job, start_noise=cell.settings.get("start_noise", 0.0))


def kept(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of the rows that findings and tables need."""
    return [{name: row[name] for name in _KEPT} for row in rows]


def excesses(
    rows: Sequence[Mapping[str, Any]], base: str = FLOAT
) -> dict[tuple[str, str, float], list[float]]:
    """Return loss over a base variant's of the same seed, less 1, by (setting, variant, lr)."""
    losses = {
        (row["setting"], row["seed"]): row["eval_loss"] for row in rows if row["variant"] == base
    }
    found: dict[tuple[str, str, float], list[float]] = {}
    for row in rows:
        reference = losses.get((row["setting"], row["seed"]))
        if row["variant"] != base and reference is not None:
            place = row["setting"], row["variant"], row["lr"]
            found.setdefault(place, []).append(row["eval_loss"] / reference - 1)
    return found


def by_variant(
    rows: Sequence[Mapping[str, Any]], base: str = FLOAT
) -> dict[str, dict[str, list[float]]]:
    """Return `excesses` by variant and setting."""
    found: dict[str, dict[str, list[float]]] = {}
    for (setting, variant, _), values in excesses(rows, base).items():
        found.setdefault(variant, {})[setting] = values
    return found


def _findings(data: Data) -> Sequence[Finding]:
    found = []
    for (setting, variant, _), values in excesses(data["rows"]).items():
        if variant not in CLAIMED:
            continue
        shares = [_PERCENT * value for value in values]
        note = f"{len(shares)} seeds: {', '.join(f'{share:+.2f}' for share in shares)} %"
        where = setting if variant == COMPACT else f"{setting}, {variant}"
        whose = "compact state's " if variant == COMPACT else ""
        found += [
            _finding(f"{where}: {text}", measured, bound, note)
            for text, measured, bound in (
                (f"{whose}held-out loss is float32's, in the mean", fmean(shares), LEAST_MEAN),
                ("no seed's is further above", max(shares), LEAST_RUN),
            )
        ]
    return found


def excess_findings(
    rows: Sequence[Mapping[str, Any]],
    claim: str,
    source: str,
    bounds: tuple[float, float],
    base: str = FLOAT,
) -> list[Finding]:
    """Return two claims for each setting and variant: on its seeds' mean, and on their largest.

    Args:
        rows: Rows of a study.
        claim: Claim on the mean.
        source: Source of the bounds.
        bounds: Largest excess over the base, in per cent: of the mean, and of one run.
        base: Variant that the others are beside.
    """
    found = []
    for (setting, variant, _), values in excesses(rows, base).items():
        shares = [_PERCENT * value for value in values]
        note = f"{len(shares)} seeds: {', '.join(f'{share:+.2f}' for share in shares)} %"
        texts = (f"{claim}, in the mean", "no seed's is further above")
        for text, measured, bound in zip(texts, (fmean(shares), max(shares)), bounds, strict=True):
            found.append(
                Finding(
                    claim=f"{setting}, {variant}: {text}", source=source, unit="%",
                    published=bound, measured=measured, tolerance=Tolerance.at_most(), note=note,
                )
            )  # fmt: skip
    return found


def _finding(claim: str, measured: float, bound: float, note: str) -> Finding:
    return Finding(
        claim=claim, source="the aim of this project; the margin is ours", unit="%",
        published=bound, measured=measured, tolerance=Tolerance.at_most(), note=note,
    )  # fmt: skip


def _about(data: Data) -> str:
    others = {SHORT, BOTH} & {row["variant"] for row in data["rows"]}
    formats = ", or with gradients of eight bits, or with both," if others else ","
    return (
        f"Held-out loss with compact host state{formats} less that with float32 and the same seed "
        "and batches. At most four gradients wait, so that state is rounded about once a window; "
        "with q = 1 it is rounded in every step. Float32 runs whose first weights differ by 0.1% "
        "show how far apart runs end that differ in nothing that matters. Where nothing else is "
        "said k = 0.1 and S = 4, beta2 is 0.95, and runs from scratch have 800 steps, fine-tuning "
        "400."
    )


def _tables(data: Data) -> Sequence[Table]:
    shown = [v for v in _STYLES if any(row["variant"] == v for row in data["rows"])]
    return [setting_table(data["rows"], shown)]


def setting_table(
    rows: Sequence[Mapping[str, Any]], shown: Sequence[str], base: str = FLOAT
) -> Table:
    """Return the table of each setting's losses: the base's, and excesses of these variants."""
    found = excesses(rows, base)
    lines = [
        {
            "setting": name, "lr": own[0]["lr"], "beta2": own[0]["beta2"],
            "steps": own[0]["steps"],
            base: fmean(r["eval_loss"] for r in own if r["variant"] == base),
            **{v: found.get((name, v, own[0]["lr"])) for v in shown},
        }
        for name in dict.fromkeys(row["setting"] for row in rows)
        if (own := [row for row in rows if row["setting"] == name])
    ]  # fmt: skip
    columns = [
        key("setting"), key("lr", "g", "learning rate"), key("beta2", "g"), key("steps"),
        key(base, ".4f"), *map(_spread, shown),
    ]  # fmt: skip
    return Table(title="Held-out loss", columns=columns, rows=lines)


def _spread(variant: str) -> Column:
    def show(row: Mapping[str, Any]) -> str:
        values = row[variant]
        if values is None:
            return ""
        return f"{fmean(values):+.2%} ({', '.join(f'{value:+.2%}' for value in values)})"

    return Column(head=variant, show=show)


def draw(data: Data) -> Figure:
    """Return a line of dots for each setting, one dot a seed, with the margins."""
    return picture(data["rows"], _STYLES, LEAST_MEAN)


def picture(
    rows: Sequence[Mapping[str, Any]],
    styles: Mapping[str, tuple[str, float]],
    margin: float,
    base: str = FLOAT,
) -> Figure:
    """Return a line of dots for each setting.

    Args:
        rows: Rows of a study.
        styles: Colour of each variant's dots, and how far they lie below the line.
        margin: Margin of the mean, in per cent.
        base: Variant that the others are beside.
    """
    found = excesses(rows, base)
    names = list(dict.fromkeys(setting for setting, _, _ in found))
    figure = Figure(figsize=(8, 1.6 + 0.35 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(-margin, margin, color="#e8f0ec", linewidth=0)
    axes.axvline(0, color="#444444", linewidth=1)
    for variant, (colour, shift) in styles.items():
        points = [
            (_PERCENT * value, names.index(setting) + shift)
            for (setting, kind, _), values in found.items()
            if kind == variant
            for value in values
        ]
        if not points:
            continue
        x, y = [x for x, _ in points], [y for _, y in points]
        axes.scatter(x, y, color=colour, s=22, label=variant)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"held-out loss above {base}'s, %; the band is the margin of the mean")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure


STUDY = Study(
    name="host_state",
    title="Held-out loss with compact host state",
    cells=_cells,
    run=run,
    summarise=lambda rows, _: {"rows": kept(rows)},
    findings=_findings,
    about=_about,
    tables=_tables,
    draw=draw,
    seeds=(0, 1, 2),
    minutes=250,
)
