"""Claims of tuning on the real engine, measured: no fixed setting is much better.

A small decoder goes on training over three emulated links. For each a grid of fixed settings is
measured; then a tuned run, the grid's best setting and the defaults take turns, and goodput is
compared, everything that tuning costs included. Further runs have their link slowed four times in
the middle. Other work on the machine is noise.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure

from evidence.studies.trained import LINK, SMALL, START, begin, go_on, over, start_cell
from evidence.studies.tuned_goodput.contests import (
    DRIFT,
    SHORT,
    WHOLE,
    WITHIN,
    Contest,
    Lengths,
    contest,
    drift,
)
from evidence.studies.tuned_goodput.turns import ROUNDS, GridPoint, champion, measure_grid
from experiments.lab.columns import Column, Table, key
from experiments.lab.drawing import panels
from experiments.lab.finding import Finding, Tolerance, aim
from experiments.lab.study import Cell, Data, Job, Row, Scope, Study
from experiments.output.plots import STRATEGY_COLOURS
from experiments.training.parts.setup import build_setup
from experiments.training.run.emulated_link import choose_link
from experiments.training.settings.training import TrainSettings
from zenflow.knobs import Knobs

LINKS: Mapping[str, float] = {"fast": 0.5, "medium": 1.0, "slow": 2.0}
"""Time that a copy of the model takes each way, as a share of forward and backward, which are
measured first: so the three mean the same on any machine."""
SEEDS = (0, 1, 2)
LEAST_OF_BEST, LEAST_OF_DEFAULT = 0.97, 1.0
MOST_SEARCHED = 0.01
MOST_WINDOWS = 3
DRIFTS = 5
"""Number of runs whose link slows down. One alone says little: in an unlucky window of such a run
the tuner tries a setting that turns out to be slow."""
GRID, BEST, CONTEST, DRIFTING = "grid", "best", "contest", "drift"
_FULL = TrainSettings(
    lr=3e-4, schedule="constant", warmup=0.0, start_steps=300, device_threads=1, host_threads=1
)
_SMOKE_SETTINGS, _SMOKE_WINDOW, _SMOKE_ROUNDS = 2, 4, 1
"""Settings of a smoke test's grid, their longest window, and rounds among the best of them."""


def grid_of(seed: int) -> list[Knobs]:
    """Return the fixed settings, 35 of them, in an order in which k changes seldom."""
    draw = random.Random(seed)
    found: list[Knobs] = []
    for ratio in draw.sample((0.05, 0.1, 0.2, 0.3, 0.5), 5):
        inner = [
            Knobs(topk_ratio=ratio, update_interval=interval, select_interval=100)
            for interval in (1, 2, 4, 8, 16, 32, 64)
        ]
        found += draw.sample(inner, len(inner))
    return found


def _cells(scope: Scope) -> Sequence[Cell]:
    training = replace(SMALL, steps=40) if scope.smoke else _FULL
    start = start_cell(training)

    def part(kind: str, *needs: Cell, **more: Any) -> Cell:
        return Cell(settings={"part": kind, **more}, needs=needs, work=training)

    # All links are sized by one measurement: they differ by their shares alone.
    alone = part(LINK, start)
    found: list[Cell] = []
    bests = {}
    for link in ("fast", "slow") if scope.smoke else LINKS:
        grid = part(GRID, start, alone, link=link)
        bests[link] = part(BEST, start, alone, grid, link=link)
        contests = [
            part(CONTEST, start, alone, bests[link], link=link, seed=seed)
            for seed in scope.seeds or ()
        ]
        found += [grid, *contests]
    drifts = [
        part(DRIFTING, start, alone, bests["fast"], bests["slow"], run=number)
        for number in range(1 if scope.smoke else DRIFTS)
    ]
    return [*found, *drifts]


def _run(cell: Cell, job: Job) -> Row:
    if cell.settings["part"] == START:
        return begin(cell, job)
    settings = go_on(cell.work, cell.needs[0], job)
    if cell.settings["part"] == LINK:
        chosen = choose_link(build_setup(settings), copy_share=1.0)
        return {"bytes_per_second": chosen.bytes_per_second}
    _, alone, *bests = cell.needs
    rates = {link: job.row_of(alone)["bytes_per_second"] / LINKS[link] for link in LINKS}
    if cell.settings["part"] == DRIFTING:
        before, after = (Knobs.from_dict(job.row_of(best)["knobs"]) for best in bests)
        return drift(over(settings, rates["fast"]), before, after, job.folder, _lengths(job))
    return _over_a_link(cell, job, over(settings, rates[cell.settings["link"]]))


def _lengths(job: Job) -> Lengths:
    return SHORT if job.smoke else WHOLE


def _over_a_link(cell: Cell, job: Job, settings: TrainSettings) -> Row:
    """Measure a grid, find its best, or hold a contest."""
    assert settings.link is not None
    link, (rate, _) = cell.settings["link"], settings.link
    if cell.settings["part"] == GRID:
        grid = grid_of(list(LINKS).index(link))
        if job.smoke:
            grid = [knobs for knobs in grid if knobs.update_interval <= _SMOKE_WINDOW]
            grid = grid[:_SMOKE_SETTINGS]
        measured = [_row(point) for point in measure_grid(settings, grid)]
        return {"bytes_per_second": rate, "points": measured}
    found = job.row_of(cell.needs[2])
    if cell.settings["part"] == BEST:
        points = [
            GridPoint(Knobs.from_dict(row["knobs"]), row["step_seconds"], row["rho"])
            for row in found["points"]
        ]
        return _row(champion(settings, points, _SMOKE_ROUNDS if job.smoke else ROUNDS))
    seeded = replace(settings, seed=cell.settings["seed"])
    best = Knobs.from_dict(found["knobs"])
    return asdict(contest(seeded, link, best, job.folder, _lengths(job)))


def _row(point: GridPoint) -> dict[str, Any]:
    return {**asdict(point), "progress": point.progress}


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    del config
    grids = {row["link"]: row for row in rows if row["part"] == GRID}
    return {
        "links": {link: row["bytes_per_second"] for link, row in grids.items()},
        "grids": {link: row["points"] for link, row in grids.items()},
        "contests": [_plain(row) for row in rows if row["part"] == CONTEST],
        "drifts": [_plain(row) for row in rows if row["part"] == DRIFTING],
    }


def _plain(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "part"}


def _contests(data: Data) -> list[Contest]:
    return [Contest(**item) for item in data["contests"]]


def _windows_until_back(data: Data) -> list[int]:
    """Return each drifting run's number; for one that was not back, the number there were."""
    return [
        len(row["regrets_by_window"])
        if row["windows_until_back"] is None
        else row["windows_until_back"]
        for row in data["drifts"]
    ]


def _findings(data: Data) -> Sequence[Finding]:
    contests = _contests(data)
    own = [[c for c in contests if c.link == link] for link in data["links"]]
    number = len(data["grids"]["fast"])
    return [
        aim(
            f"Tuned goodput over that of the best of {number} fixed settings, on every link",
            LEAST_OF_BEST, Tolerance.at_least(),
            emulated=min(fmean(c.of_best for c in of_link) for of_link in own),
        ),
        aim(
            "Tuned goodput over that of the defaults, on every link",
            LEAST_OF_DEFAULT, Tolerance.at_least(),
            emulated=min(fmean(c.of_default for c in of_link) for of_link in own),
        ),
        aim(
            "Share of its time that a run spends on searching, at most",
            MOST_SEARCHED, Tolerance.at_most(), emulated=max(c.searched for c in contests),
        ),
        aim(
            f"Windows until a run whose link slowed {DRIFT:g} times is within {WITHIN:.0%} of the "
            "new best, median",
            MOST_WINDOWS, Tolerance.at_most(), emulated=median(_windows_until_back(data)),
        ),
    ]  # fmt: skip


def _about(data: Data) -> str:
    windows = sorted(_windows_until_back(data))
    lost = sum(row["windows_until_back"] is None for row in data["drifts"])
    return (
        f"After the link became {DRIFT:g} times slower goodput is within {WITHIN:.0%} of the new "
        f"best after {', '.join(map(str, windows))} windows of "
        f"{data['drifts'][0]['steps_per_window']} steps"
        + (f", in {lost} runs in none that were left." if lost else ".")
    )


def _tables(data: Data) -> Sequence[Table]:
    contests = _contests(data)

    def spread(values: Sequence[float]) -> str:
        return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    rows = []
    for link, rate in data["links"].items():
        own = [item for item in contests if item.link == link]
        rows.append(
            {
                "link": link,
                "rate": rate / 1e6,
                "of best": spread([c.of_best for c in own]),
                "of default": spread([c.of_default for c in own]),
                "search": max(c.searched for c in own),
                "best": own[0].best,
                "final": "; ".join(sorted({c.final for c in own})),
            }
        )
    columns: Sequence[Column] = [
        key("link"),
        key("rate", ".0f", "MB/s"),
        key("of best"),
        key("of default"),
        key("search", ".2%"),
        key("best", head="best fixed setting"),
        key("final", head="where tuned runs ended"),
    ]
    return [Table(columns=columns, rows=rows)]


def _draw(data: Data) -> Figure:
    title = "Tuned runs beside fixed settings, over emulated links"
    figure, (left, right) = panels(10, 4, count=2, title=title)
    sides = (("of_best", "auto", -0.12), ("of_default", "zenflow", 0.12))
    for place, link in enumerate(data["links"]):
        own = [item for item in _contests(data) if item.link == link]
        for name, colour, off in sides:
            left.plot([place + off] * len(own), [getattr(item, name) for item in own], "o",
                      color=STRATEGY_COLOURS[colour],
                      label=name.replace("_", " ") if place == 0 else None)  # fmt: skip
    left.axhline(1, color="#444444", linewidth=1)
    left.set_xticks(range(len(data["links"])), [f"{link} link" for link in data["links"]])
    left.set_ylabel("tuned goodput over the fixed setting's")
    left.legend(fontsize=8, frameon=False)
    for row in data["drifts"]:
        regrets = [100 * regret for regret in row["regrets_by_window"]]
        right.plot(range(1, len(regrets) + 1), regrets, color=STRATEGY_COLOURS["auto"], alpha=0.6)
    right.axhline(100 * WITHIN, color="#d62728", linewidth=1, linestyle="--")
    right.set_xlabel(f"window of {data['drifts'][0]['steps_per_window']} steps after the drift")
    right.set_ylabel("behind the new best, %")
    return figure


STUDY = Study(
    name="tuned_goodput",
    title="Tuned runs beside the best of fixed settings",
    cells=_cells,
    run=_run,
    summarise=_summarise,
    findings=_findings,
    about=_about,
    tables=_tables,
    draw=_draw,
    seeds=SEEDS,
    one_at_a_time=True,
    minutes=60,
)
