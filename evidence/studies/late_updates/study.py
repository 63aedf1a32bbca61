"""Cost of rules for late updates in loss, with logical delays and without the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evidence.studies.late_updates.design import (
    ADAMW,
    COLUMN,
    FORMER,
    FRESH,
    GROUPS,
    NO_DELAY,
    NO_FRESH,
    SMOKE,
    Group,
    rule_of,
)
from evidence.studies.late_updates.training import train
from evidence.studies.regimes import settings_of
from experiments.lab.columns import Column, Table, key
from experiments.lab.drawing import panels
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study

_SAME = 0.01
"""Excess of the loss that counts as none: what another rounding moves a run from scratch by."""
_CLAIMED = {FRESH: "with the fresh gradient", NO_DELAY: "without the delay"}
"""Rules that are to have AdamW's loss, and their words in a claim."""


def _cells(scope: Scope) -> Sequence[Cell]:
    groups = SMOKE if scope.smoke else GROUPS
    return [
        _cell(group, name, interval, seed, smoke=scope.smoke)
        for seed in scope.seeds or ()
        for group in groups
        for name, interval in ((ADAMW, 1), *group.rules)
    ]


def _cell(group: Group, name: str, interval: int, seed: int, *, smoke: bool) -> Cell:
    rule = rule_of(name, interval)
    training = replace(
        settings_of(group.regime, smoke=smoke), lr=group.lr, seed=seed,
        strategy="on_device" if rule is None else "zenflow",
        knobs={} if rule is None else {"update_interval": interval},
    )  # fmt: skip
    plain = None if rule is None else {k: v for k, v in asdict(rule).items() if k != "name"}
    settings = {
        "regime": group.regime, "lr": group.lr, "seed": seed, "steps": training.steps,
        "interval": interval, "rule": plain,
    }  # fmt: skip
    return Cell(labels={"variant": name}, settings=settings, work=training)


def _run(cell: Cell, job: Job) -> Row:
    rule = rule_of(cell.labels["variant"], cell.settings["interval"])

    def watch(step: int, *_: Any) -> None:
        job.progress(step / cell.settings["steps"], f"step {step}")

    return train(cell.work, rule, watch=watch)


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    """Return each rule's excesses over AdamW of the same seed."""
    del config
    bases = {
        (row["regime"], row["lr"], row["seed"]): row["eval_loss"]
        for row in rows
        if row["variant"] == ADAMW
    }
    groups: dict[tuple[str, float], dict[tuple[str, int], list[float]]] = {}
    for row in rows:
        base = bases.get((row["regime"], row["lr"], row["seed"]))
        if row["variant"] != ADAMW and base is not None:
            own = groups.setdefault((row["regime"], row["lr"]), {})
            own.setdefault((row["variant"], row["interval"]), []).append(
                row["eval_loss"] / base - 1
            )
    return {
        "groups": [
            {
                "regime": regime,
                "lr": lr,
                "adamw": fmean(loss for key, loss in bases.items() if key[:2] == (regime, lr)),
                "rules": [
                    {"name": name, "S": interval, "excess": fmean(found), "least": min(found),
                     "most": max(found), "seeds": len(found)}
                    for (name, interval), found in own.items()
                ],
            }
            for (regime, lr), own in groups.items()
        ]
    }  # fmt: skip


def _findings(data: Data) -> Sequence[Finding]:
    return [
        Finding(
            claim=f"{group['regime']}, learning rate {group['lr']:g}, S = {rule['S']}: "
            f"{_CLAIMED[rule['name']]} the loss is AdamW's",
            source="the aim of this project; the margin is ours", unit="x AdamW's loss",
            published=1.0, tolerance=Tolerance.at_most(_SAME), measured=1 + rule["excess"],
            note=f"{rule['seeds']} seeds, {rule['least']:+.1%} to {rule['most']:+.1%}.",
        )
        for group in data["groups"]
        for rule in group["rules"]
        if rule["name"] in _CLAIMED
    ]  # fmt: skip


def _tables(data: Data) -> Sequence[Table]:
    def excess(row: Mapping[str, Any]) -> str:
        spread = f" ({row['least']:+.1%} to {row['most']:+.1%})" if row["seeds"] > 1 else ""
        return f"{row['excess']:+.1%}{spread}"

    columns = [key("name", head="rule"), key("S"), Column(head="above AdamW's loss", show=excess),
               key("seeds")]  # fmt: skip
    return [
        Table(
            title=f"{group['regime']}, learning rate {group['lr']:g}", columns=columns,
            note=f"AdamW: {group['adamw']:.4f}.", rows=group["rules"],
        )
        for group in data["groups"]
    ]  # fmt: skip


_ABOUT = (
    "Held-out loss over that of AdamW with the same seed and batches, less 1. Delays are numbers "
    "of steps in one thread: the rules alone are compared, with the engine's blocks, phases and "
    "choice of important columns. The fresh gradient's second moment is that of rows and columns. "
    "*No delay*: with `forward_delay=False`. "
    "*By columns*: of columns alone, and no element's fresh term is larger than the learning "
    "rate, about what a step of AdamW is. A rule with another rounding ends 1 to 2% elsewhere "
    "from random weights, so claims are about means over seeds."
)


def _draw(data: Data) -> Figure:
    """Return a panel for each group; a rule with several windows is a line."""
    groups = sorted(data["groups"], key=lambda group: (group["regime"], group["lr"]))
    figure, shown = panels(
        3.2 * len(groups) + 1, 3.8, len(groups), title="Loss above AdamW's, %", sharey=True
    )
    for axes, group in zip(shown, groups, strict=True):
        _draw_group(axes, group)
    names: dict[str, Any] = {}
    for axes in shown:
        handles, labels = axes.get_legend_handles_labels()
        names |= dict(zip(labels, handles, strict=True))
    shown[0].legend(names.values(), names.keys(), fontsize=8, frameon=False)
    return figure


_INTERVALS = (4, 16, 64)
_COLOURS = {
    FRESH: "#1b9e77", NO_DELAY: "#e7298a", COLUMN: "#b8860b", FORMER: "#d95f02",
    NO_FRESH: "#7570b3",
}  # fmt: skip


def _draw_group(axes: Axes, group: Mapping[str, Any]) -> None:
    axes.axhline(0, color="#444444", linewidth=1)
    for name in dict.fromkeys(rule["name"] for rule in group["rules"]):
        own = sorted((r["S"], 100 * r["excess"]) for r in group["rules"] if r["name"] == name)
        axes.plot([s for s, _ in own], [v for _, v in own], color=_COLOURS[name], marker="o",
                  label=name)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(_INTERVALS, [str(interval) for interval in _INTERVALS])
    axes.set_xlim(_INTERVALS[0] / 1.5, _INTERVALS[-1] * 1.5)
    axes.set_xlabel("steps in a window, S")
    axes.set_title(f"{group['regime']}, {group['lr']:g}", fontsize=11)


STUDY = Study(
    name="late_updates",
    title="What late updates cost with and without the fresh gradient",
    cells=_cells,
    run=_run,
    summarise=_summarise,
    findings=_findings,
    about=lambda data: _ABOUT,
    tables=_tables,
    draw=_draw,
    seeds=(0, 1, 2),
    minutes=60,
    revision=3,
)
