"""Main claims, measured: stall removed, loss kept, no spike at window boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure

from evidence.studies.trained import (
    SMALL,
    begin,
    go_on,
    link_cell,
    over,
    start_cell,
    trained,
)
from experiments.lab.columns import Column, Table, key
from experiments.lab.drawing import panels
from experiments.lab.finding import Finding, Tolerance, aim
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study
from experiments.output.plots import STRATEGY_COLOURS
from experiments.training.parts.files.step_log import read_steps
from experiments.training.run.compared_runs import eval_loss_ratio, stall_removed
from experiments.training.settings.comparison import COMPARED
from experiments.training.settings.training import TrainSettings

ALIGNED = "zenflow_paper"
"""The strategy whose windows end together."""
LEAST_STALL_OF_ZERO_OFFLOAD = 0.5
LEAST_STALL_REMOVED = 0.85
MOST_LOSS_DISTANCE = 0.01
"""Largest distance, above or below: the same trajectory is claimed, not a better one."""
MOST_SPREAD_OVER_WINDOW = 1.1


def _training(scope: Scope) -> TrainSettings:
    return (SMALL if scope.smoke else TrainSettings()).for_comparison()


def _cells(scope: Scope) -> Sequence[Cell]:
    """Return all strategies for each seed."""
    shared = _training(scope)
    link = link_cell(shared)
    found: list[Cell] = []
    for seed in scope.seeds or ():
        seeded = replace(shared, seed=seed)
        found += [
            Cell(
                settings={"variant": variant, "seed": seed},
                needs=(link, start_cell(seeded)),
                work=seeded,
            )
            for variant in COMPARED
        ]
    return found


def _run(cell: Cell, job: Job) -> Row:
    if "variant" not in cell.settings:
        return begin(cell, job)
    link, start = cell.needs
    settings = over(go_on(cell.work, start, job), job.row_of(link)["bytes_per_second"])
    summary = trained(settings.with_strategy(cell.settings["variant"]), job.folder)
    config = summary["config"]
    places = seconds_by_position(
        read_steps(job.folder / "steps.jsonl"),
        config["update_interval"],
        config["full_warm_up_rounds"],
    )
    return {"summary": summary, "seconds_by_position": places}


def seconds_by_position(
    rows: Sequence[Mapping[str, Any]], update_interval: int, warm_up: int
) -> list[float]:
    """Return the median step time at each place in a window, the first window left out."""
    places: list[list[float]] = [[] for _ in range(update_interval)]
    for row in rows:
        behind = row["step"] - warm_up - 1
        if behind >= update_interval:
            places[behind % update_interval].append(row["seconds"])
    return [median(seconds) for seconds in places if seconds]


def _findings(data: Data) -> Sequence[Finding]:
    rows = data["rows"]
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        runs = {row["variant"]: row["summary"] for row in rows if row["seed"] == seed}
        stall = runs["zero_offload"]["stall_fraction"]
        removed = stall_removed(runs) or 0.0
        distance = abs((eval_loss_ratio(runs, "zenflow") or float("inf")) - 1)
        found += [
            aim(f"seed {seed}: share of zero_offload's time stalled",
                LEAST_STALL_OF_ZERO_OFFLOAD, Tolerance.at_least(), emulated=stall),
            aim(f"seed {seed}: share of those stall seconds that zenflow is without",
                LEAST_STALL_REMOVED, Tolerance.at_least(), emulated=removed),
            aim(f"seed {seed}: held-out loss off on_device's", MOST_LOSS_DISTANCE,
                Tolerance.at_most(), emulated=distance),
        ]  # fmt: skip
    rolling, aligned = (
        _mean_spread(row for row in rows if row["variant"] == variant)
        for variant in ("zenflow", ALIGNED)
    )
    text = "slowest over fastest median step by position in the window"
    return [
        *found,
        aim(f"rolling windows: {text}", MOST_SPREAD_OVER_WINDOW, Tolerance.at_most(),
            emulated=rolling),
        aim("aligned windows: the same, their spike", MOST_SPREAD_OVER_WINDOW,
            Tolerance.at_least(), emulated=aligned),
    ]  # fmt: skip


def _mean_spread(rows: Iterable[Mapping[str, Any]]) -> float:
    places = [row["seconds_by_position"] for row in rows]
    return fmean(max(seconds) / min(seconds) for seconds in places)


def _about(data: Data) -> str:
    summary = data["rows"][0]["summary"]
    rate = summary["emulated_link"]["d2h_bytes_per_second"]
    return (
        f"The link is emulated: {rate / 1e6:.1f} MB/s each way. A model of "
        f"{summary['num_params']:,} parameters on {summary['data']}, {summary['steps']} steps. "
        "For each seed a run on the device makes the weights that all strategies start from."
    )


def _tables(data: Data) -> Sequence[Table]:
    def of_summary(head: str, name: str, form: str, scale: float = 1.0) -> Column:
        return Column(head=head, show=lambda row: format(row["summary"][name] * scale, form))

    def places(row: Mapping[str, Any]) -> str:
        return ", ".join(f"{seconds * 1e3:.0f}" for seconds in row["seconds_by_position"])

    columns = [
        key("seed"),
        key("variant", head="strategy"),
        of_summary("step ms", "mean_step_seconds", ".0f", 1e3),
        of_summary("stalled", "stall_fraction", ".1%"),
        of_summary("held-out loss", "eval_loss", ".4f"),
        Column(head="median step ms by position", show=places),
    ]
    return [Table(columns=columns, rows=data["rows"])]


def _draw(data: Data) -> Figure:
    title = "Stall and loss over an emulated link"
    figure, (left, right) = panels(10, 4, count=2, title=title)
    variants = list(dict.fromkeys(row["variant"] for row in data["rows"]))
    for place, variant in enumerate(variants):
        own = [row["summary"] for row in data["rows"] if row["variant"] == variant]
        colour = STRATEGY_COLOURS.get(variant, "#999999")
        step, stall = (
            fmean(summary[name] for summary in own)
            for name in ("mean_step_seconds", "stall_fraction")
        )
        left.bar(place, 1e3 * step, color=colour, alpha=0.45)
        left.bar(place, 1e3 * step * stall, color=colour)
        right.plot([place] * len(own), [s["eval_loss"] for s in own], "o", color=colour)
    for axes in (left, right):
        axes.set_xticks(range(len(variants)), variants, rotation=20, fontsize=8)
    left.set_ylabel("ms a step (dark: stalled)")
    right.set_ylabel("held-out loss, by seed")
    return figure


STUDY = Study(
    name="stall_and_loss",
    title="Stall and loss under an emulated link",
    cells=_cells,
    run=_run,
    summarise=lambda rows, _: {"rows": list(rows)},
    findings=_findings,
    about=_about,
    tables=_tables,
    draw=_draw,
    settings=lambda scope: {"steps": _training(scope).steps},
    seeds=(0, 1, 2),
    one_at_a_time=True,
    minutes=15,
    revision=3,
)
