"""Why a late update needs the gradient in hand: what each rule is stable up to, and what is met.

Limits are computed on a quadratic. Beside them stands the curvature that trainings of the small
model meet under some of the rules, by Lanczos.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evidence.studies.late_updates.curvature import preconditioned_curvature
from evidence.studies.late_updates.limits import adamw_limit, limit, noise
from evidence.studies.late_updates.optimizer import LateOptimizer
from evidence.studies.late_updates.picture import ADAMW, BEST_LEAD, FORMER, FRESH, LATE, draw
from evidence.studies.late_updates.rules import Rule
from evidence.studies.late_updates.training import train
from evidence.studies.regimes import SCRATCH, settings_of
from experiments.lab.columns import Column, Table, key
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study
from experiments.training.parts.setup import RunSetup
from experiments.training.settings.rates import schedule_factor

PREDICTED, PUBLISHED = "late step, predicted", "published rule"
UNDELAYED = "without delay"
INTERVALS = (1, 2, 4, 8, 16, 32, 64)
CURVATURES = (0.1, 0.3, 1.0, 2.0, 4.0)
"""Learning rate times curvature at which noise is computed."""
_LEADS = tuple(0.25 * n for n in range(13))
"""Factors on the lead among which the best is looked for."""
_LONGEST_SEARCH = 8
"""Largest S at which the best lead is looked for; longer windows take minutes each."""
RATE = 1e-3
"""Peak learning rate of the trainings."""
WATCHED = (20, 40, 80, 120, 160, 200, 300, 400, 600, 800)
"""Steps behind which curvature is measured."""
_TRAINED = ((ADAMW, 1), (FRESH, 4), (FRESH, 16), (FORMER, 4))


def rule_of(name: str, interval: int) -> Rule | None:
    """Return a rule by its name in the table; None for AdamW."""
    if name == ADAMW:
        return None
    made = Rule(name=name, interval=interval)
    return {
        LATE: replace(made, fresh="none", lead_share=0.0),
        PREDICTED: replace(made, fresh="none"),
        BEST_LEAD: replace(made, fresh="none"),
        FORMER: replace(made, kind="former"),
        PUBLISHED: replace(made, kind="published", lag=interval, rolling=False),
        FRESH: made,
        UNDELAYED: replace(made, delay_share=0.0),
    }[name]


def _cells(scope: Scope) -> Sequence[Cell]:
    intervals = INTERVALS[:2] if scope.smoke else INTERVALS
    named = [(ADAMW, 1)]
    named += [
        (n, s) for n in (LATE, PREDICTED, FORMER, PUBLISHED, UNDELAYED, FRESH) for s in intervals
    ]
    named += [(BEST_LEAD, s) for s in intervals if s <= _LONGEST_SEARCH and not scope.smoke]
    limits = [Cell(settings={"part": "limit", "rule": n, "interval": s}) for n, s in named]
    limits += [
        Cell(settings={"part": "noise", "rule": n, "interval": s, "curvatures": list(CURVATURES)})
        for n in (UNDELAYED, FRESH)
        for s in intervals
    ]
    training = settings_of(SCRATCH, smoke=scope.smoke)
    watched = (2,) if scope.smoke else WATCHED
    trained = _TRAINED[:2] if scope.smoke else _TRAINED
    return limits + [
        Cell(
            settings={
                "part": "curvature", "rule": name, "interval": interval, "lr": RATE,
                "seed": seed, "watched": list(watched),
            },
            work=replace(
                training, lr=RATE, seed=seed, strategy="zenflow",
                knobs={"update_interval": interval},
            ),
        )
        for seed in scope.seeds or ()
        for name, interval in trained
    ]  # fmt: skip


def _run(cell: Cell, job: Job) -> Row:
    name, interval = cell.settings["rule"], cell.settings["interval"]
    if cell.settings["part"] == "curvature":
        return _watch(cell, job)
    rule = rule_of(name, interval) or Rule(name=ADAMW, interval=1, lag=0, fresh="none")
    if cell.settings["part"] == "noise":
        noises = [noise(rule, curvature) for curvature in cell.settings["curvatures"]]
        return {"noise": [value if math.isfinite(value) else None for value in noises]}
    if name != BEST_LEAD:
        return {"limit": limit(rule)}
    found = {share: limit(replace(rule, lead_share=share)) for share in _LEADS}
    best = max(found, key=found.__getitem__)
    return {"limit": found[best], "lead_share": best}


def _watch(cell: Cell, job: Job) -> Row:
    """Train, and measure the curvature now and then."""
    settings, watched = cell.work, cell.settings["watched"]
    points = []

    def watch(step: int, setup: RunSetup, optimizer: LateOptimizer) -> None:
        job.progress(step / setup.total_steps, f"step {step}")
        if step in watched:
            rate = settings.lr * schedule_factor(settings, setup.total_steps, step)
            points.append([step, rate * preconditioned_curvature(setup, optimizer)])

    rule = rule_of(cell.settings["rule"], cell.settings["interval"])
    return {**train(settings, rule, watch=watch), "points": points}


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    del config
    limits: dict[str, dict[str, float]] = {}
    noises: dict[str, dict[str, list[float | None]]] = {}
    runs = []
    for row in rows:
        if row["part"] == "noise":
            noises.setdefault(row["rule"], {})[str(row["interval"])] = row["noise"]
            continue
        if row["part"] == "limit":
            limits.setdefault(row["rule"], {})[str(row["interval"])] = row["limit"]
            continue
        met = [value for _, value in row["points"]]
        kept = ("rule", "interval", "seed", "eval_loss", "points")
        runs.append({**{name: row[name] for name in kept}, "most": max(met)})
    return {"limits": limits, "noise": noises, "curvatures": list(CURVATURES), "runs": runs}


def _findings(data: Data) -> Sequence[Finding]:
    limits = data["limits"]
    met = {(run["rule"], run["interval"]): run["most"] for run in data["runs"]}
    found = [
        Finding(
            claim="AdamW is stable up to 2 (1 + beta1) / (1 - beta1)",
            source="Cohen et al., arXiv 2207.14484", unit="", published=adamw_limit(),
            tolerance=Tolerance.relative(0.02), simulated=limits[ADAMW]["1"],
        ),
        Finding(
            claim="A gradient that is one step late leaves AdamW a limit of 1",
            source="characteristic polynomial (z - 1)(z - beta1) + (1 - beta1) x", unit="",
            published=1.0, tolerance=Tolerance.relative(0.02), simulated=limits[LATE]["1"],
        ),
        Finding(
            claim="AdamW's own training goes beyond what a late step is stable up to",
            source="own record", unit="x the limit at S = 1", published=1.0,
            tolerance=Tolerance.at_least(), measured=met[ADAMW, 1] / limits[LATE]["1"],
        ),
    ]  # fmt: skip
    if BEST_LEAD in limits:
        best = max(limits[BEST_LEAD].values())
        found.append(
            Finding(
                claim="No lead of the upload gives a late step a tenth of AdamW's limit",
                source="own computation", unit="", published=0.1 * adamw_limit(),
                tolerance=Tolerance.at_most(), simulated=best,
            )
        )  # fmt: skip
    noises = data["noise"]
    for interval in noises.get(FRESH, {}):
        if interval not in _JUDGED:
            continue
        apart = {name: _most_apart(noises[name][interval]) for name in (FRESH, UNDELAYED)}
        found.append(
            Finding(
                claim=f"S = {interval}: the delay brings noise nearer to AdamW's",
                source="own computation", unit="x AdamW's, or one over that",
                published=apart[UNDELAYED], tolerance=Tolerance.at_most(),
                simulated=apart[FRESH],
                note=f"The farthest of learning rate times curvature {_JUDGED_UP_TO:g} or less.",
            )
        )  # fmt: skip
    return found


_JUDGED = ("4", "8", "16")
"""Windows, S, whose noise is judged."""
_JUDGED_UP_TO = 1.0


def _most_apart(noises: Sequence[float | None]) -> float:
    """Return how far noise is from AdamW's at most, as a factor, at the curvatures judged."""
    judged = zip(CURVATURES, noises, strict=True)
    found = [value or math.inf for curvature, value in judged if curvature <= _JUDGED_UP_TO]
    return max(max(value, 1 / value) for value in found)


_ABOUT = (
    "*Limit*: the least learning rate times preconditioned curvature at which a rule is unstable, "
    "computed on a quadratic whose steep direction lies in deferred columns of all phases evenly. "
    "beta1 is 0.9. The published rule's learning rate counts once a window: its steps are S times "
    "fewer. *Noise*: the variance that random gradients give the weights that the host keeps, "
    "over AdamW's. *Without delay*: forwards aim at weights of their own steps. *Met*: the "
    "largest eigenvalue of the preconditioned Hessian of the split matrices, on two held-out "
    "batches, times learning rate and clip factor, in a training from random "
    "weights."
)


def _tables(data: Data) -> Sequence[Table]:
    limits = data["limits"]
    names = [name for name in limits if name != ADAMW]
    intervals = dict.fromkeys(s for name in names for s in limits[name])
    rows = [{"S": s, **{name: limits[name].get(s) for name in names}} for s in intervals]
    columns = [key("S"), *(key(name, ".2g") for name in names)]
    runs = [
        {**run, "name": run["rule"] if run["rule"] == ADAMW else f"{run['rule']}, S = "
         f"{run['interval']}"}
        for run in data["runs"]
    ]  # fmt: skip
    steps = [step for step, _ in data["runs"][0]["points"]] if runs else []
    met = [key("name", head="rule"), key("seed"), *map(_at, range(len(steps)), steps)]
    return [
        Table(title="Limits", columns=columns, rows=rows,
              note=f"AdamW without delay: {limits[ADAMW]['1']:.3g}."),
        Table(title="Noise beside AdamW's, by learning rate times curvature",
              columns=[key("S"), key("rule"), *map(_noise_at, range(len(CURVATURES)))],
              rows=[{"S": s, "rule": name, "noise": data["noise"][name][s]}
                    for s in data["noise"].get(FRESH, {}) for name in (UNDELAYED, FRESH)]),
        Table(title="Met in training", columns=[*met, key("eval_loss", ".4f", "held-out loss")],
              rows=runs),
    ]  # fmt: skip


def _noise_at(place: int) -> Column:
    def show(row: Mapping[str, Any]) -> str:
        value = row["noise"][place]
        return "unstable" if value is None else f"{value:.2f}"

    return Column(head=f"{CURVATURES[place]:g}", show=show)


def _at(place: int, step: int) -> Column:
    def show(row: Mapping[str, Any]) -> str:
        return f"{row['points'][place][1]:.1f}"

    return Column(head=f"step {step}", show=show)


STUDY = Study(
    name="stability",
    title="Why late updates need the gradient in hand: stability limits",
    cells=_cells,
    run=_run,
    summarise=_summarise,
    findings=_findings,
    about=lambda data: _ABOUT,
    tables=_tables,
    draw=draw,
    minutes=25,
    revision=2,
)
