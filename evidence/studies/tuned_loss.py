"""Effect of tuning on accuracy, measured: held-out loss of tuned runs compared with AdamW's.

A small decoder goes on training over the slow emulated link of the tuned_goodput study, tuned, and
on the device alone, with the same batches. What a tuned run decides follows its clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from autotune.decisions.file import DECISIONS, read_decisions
from evidence.studies.trained import (
    SMALL,
    begin,
    go_on,
    link_cell,
    over,
    start_cell,
    trained,
)
from evidence.studies.tuned_goodput.study import LINKS
from experiments.lab.columns import Table, key
from experiments.lab.drawing import panels
from experiments.lab.finding import Finding, Tolerance, aim
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study
from experiments.output.plots import STRATEGY_COLOURS
from experiments.training.settings.training import TrainSettings

MOST_EXCESS = 0.01
"""Largest share by which the held-out loss may lie above AdamW's."""
_FULL = TrainSettings(lr=3e-4, steps=2000, start_steps=300, device_threads=1, host_threads=1)


def _training(scope: Scope) -> TrainSettings:
    return SMALL if scope.smoke else _FULL


def _cells(scope: Scope) -> Sequence[Cell]:
    shared = _training(scope)
    needs = (link_cell(shared, copy_share=LINKS["slow"]), start_cell(shared))
    return [
        Cell(settings={"seed": seed}, needs=needs, work=replace(shared, seed=seed))
        for seed in scope.seeds or ()
    ]


def _run(cell: Cell, job: Job) -> Row:
    if "part" in cell.settings:
        return begin(cell, job)
    link, start = cell.needs
    begun = go_on(start.work, start, job)
    common = replace(begun, schedule="cosine", warmup=0.1, seed=cell.work.seed)
    rate = job.row_of(link)["bytes_per_second"]
    tuned = job.folder / "auto"
    alone = trained(replace(common, strategy="on_device"), job.folder / "on_device")["eval_loss"]
    loss = trained(replace(over(common, rate), controller="both"), tuned)["eval_loss"]
    decisions = read_decisions(tuned / DECISIONS).decisions
    return {
        "on_device": alone,
        "auto": loss,
        "excess": loss / alone - 1,
        "num_decisions": len(decisions),
        "final": str(decisions[-1].new) if decisions else "",
        "bytes_per_second": rate,
    }


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    return {"steps": config["steps"], "losses": list(rows)}


def _findings(data: Data) -> Sequence[Finding]:
    rows = data["losses"]
    return [
        aim(
            f"The held-out loss after {data['steps']} tuned steps over the slow link lies "
            "no further above AdamW's on the device, for every seed",
            MOST_EXCESS,
            Tolerance.at_most(),
            emulated=max(row["excess"] for row in rows),
        ),
        aim(
            "Every run was tuned: it has decisions",
            1,
            Tolerance.at_least(),
            unit="decisions",
            emulated=min(row["num_decisions"] for row in rows),
        ),
    ]


def _tables(data: Data) -> Sequence[Table]:
    columns = [
        key("seed"),
        key("on_device", ".4f"),
        key("auto", ".4f"),
        key("excess", "+.2%"),
        key("num_decisions", head="decisions"),
        key("final", head="at the end"),
    ]
    return [Table(columns=columns, rows=data["losses"])]


def _draw(data: Data) -> Figure:
    figure, (axes,) = panels(6, 4)
    seeds = [str(row["seed"]) for row in data["losses"]]
    axes.bar(seeds, [100 * row["excess"] for row in data["losses"]],
             color=STRATEGY_COLOURS["auto"], width=0.5)  # fmt: skip
    axes.axhline(100 * MOST_EXCESS, color="#d62728", linewidth=1, linestyle="--")
    axes.axhline(0, color="#444444", linewidth=1)
    axes.set_xlabel("seed")
    axes.set_ylabel("tuned run's loss above AdamW's, %\n(dashed: the most)")
    axes.set_title(f"held-out loss after {data['steps']} steps", fontsize=11)
    return figure


STUDY = Study(
    name="tuned_loss",
    title="Held-out loss of tuned runs beside AdamW's",
    cells=_cells,
    run=_run,
    summarise=_summarise,
    findings=_findings,
    tables=_tables,
    draw=_draw,
    settings=lambda scope: {"steps": _training(scope).steps},
    seeds=(0, 1, 2),
    one_at_a_time=True,
    minutes=45,
)
