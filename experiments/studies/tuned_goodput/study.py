"""What tuning claims on the real engine, measured: no fixed setting is much better.

``python -m experiments.studies.tuned_goodput.study`` goes on training a small decoder over three
emulated links.
For each it measures a grid of fixed settings, then lets a tuned run, the grid's best setting and
the defaults take turns, and compares goodput, everything that tuning costs included. A further run
has its link slowed four times in the middle. Run it alone: other work on the machine is noise.
Run again with the same ``--runs``, it goes on where it was interrupted. Writes
``experiments/results/<date>_tuning_<cpu>/``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from experiments.lab.cell_cache import Parts
from experiments.output.files import write_json, write_text
from experiments.output.progress import Reporter
from experiments.output.provenance import provenance, results_folder
from experiments.studies.tuned_goodput.contests import DRIFT, WITHIN, Contest, contest, drift
from experiments.studies.tuned_goodput.turns import GridPoint, champion, measure_grid
from experiments.training.comparison import START, started
from experiments.training.emulated_link import choose_link
from experiments.training.settings import TrainSettings
from experiments.training.setup import build_setup
from experiments.training.stop import StopRequest
from zenflow.errors import ZenFlowError
from zenflow.knobs import Knobs

LINKS: Mapping[str, float] = {"fast": 0.5, "medium": 1.0, "slow": 2.0}
"""Time that a copy of the model takes each way, as a share of forward and backward, which are
measured first: so the three mean the same on any machine."""
SEEDS = (0, 1, 2)
LEAST_OF_BEST, LEAST_OF_DEFAULT = 0.97, 1.0
MOST_SEARCHED = 0.01
DECISIONS = "decisions"
"""Directory of decisions files."""


def grid_of(seed: int) -> list[Knobs]:
    """Return the fixed settings, 70 of them, in an order in which k changes seldom."""
    draw = random.Random(seed)
    found: list[Knobs] = []
    for ratio in draw.sample((0.05, 0.1, 0.2, 0.3, 0.5), 5):
        inner = [
            Knobs(
                topk_ratio=ratio,
                update_interval=interval,
                lag=lag,
                rolling=rolling,
                select_interval=100,
            )
            for interval in (1, 2, 4, 8)
            for lag in (1, 2)
            if lag <= interval
            for rolling in (True, False)
        ]
        found += draw.sample(inner, len(inner))
    return found


def run_all(
    settings: TrainSettings, folder: Path, seeds: Sequence[int], reporter: Reporter
) -> dict[str, Any]:
    """Return everything that the record holds, its parts kept in ``folder`` as they are made."""
    parts, settings = begun(settings, folder, reporter)
    rates = link_rates(parts, settings)
    grids, bests, contests = {}, {}, []
    for number, (link, rate) in enumerate(rates.items()):
        own = over(settings, rate)
        reporter.say(f"{link} link: {rate / 1e6:.0f} MB/s, {len(grid_of(0))} fixed settings")
        grids[link] = parts.get(f"grid-{link}", _grid, own, number)
        best = Knobs.from_dict(parts.get(f"best-{link}", _best, own, grids[link])["knobs"])
        bests[link] = best
        reporter.say(f"best of them: {best}")
        for seed in seeds:
            seeded = replace(own, seed=seed)
            found = Contest(
                **parts.get(f"contest-{link}-{seed}", _contest, seeded, link, best, folder)
            )
            contests.append(found)
            reporter.say(
                f"seed {seed}: tuned {found.of_best:.3f} of the best, {found.of_default:.3f} of "
                f"the defaults, {found.final}"
            )
    before, after = bests["fast"], bests["slow"]
    return {
        "drift": parts.get(
            "drift", drift, over(settings, rates["fast"]), before, after, folder / DECISIONS
        ),
        "links": rates,
        "grids": grids,
        "contests": [asdict(found) for found in contests],
    }


def begun(
    settings: TrainSettings, folder: Path, reporter: Reporter
) -> tuple[Parts, TrainSettings]:
    """Return a study's parts, and settings that go on from its common start.

    Raises:
        ConfigError: The folder's parts are another commit's or another machine's.
    """
    parts = Parts(folder / "parts")
    with StopRequest() as stop:
        settings, _ = started(settings, folder / START, reporter=reporter, stop=stop)
    return parts, settings


def link_rates(parts: Parts, settings: TrainSettings) -> dict[str, float]:
    """Return the links' bytes/s each way by name, a part as well."""

    def measured() -> dict[str, float]:
        alone = choose_link(build_setup(settings), copy_share=1.0).bytes_per_second
        return {link: alone / share for link, share in LINKS.items()}

    found: dict[str, float] = parts.get("links", measured)
    return found


def over(settings: TrainSettings, rate: float) -> TrainSettings:
    """Return the settings over a link of so many bytes/s each way."""
    return replace(settings, link=(rate, rate))


def _grid(settings: TrainSettings, number: int) -> list[dict[str, Any]]:
    return [_row(point) for point in measure_grid(settings, grid_of(number))]


def _best(settings: TrainSettings, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    points = [
        GridPoint(
            knobs=Knobs.from_dict(row["knobs"]), step_seconds=row["step_seconds"], rho=row["rho"]
        )
        for row in rows
    ]
    return _row(champion(settings, points))


def _row(point: GridPoint) -> dict[str, Any]:
    return {**asdict(point), "progress": point.progress}


def _contest(settings: TrainSettings, link: str, best: Knobs, folder: Path) -> dict[str, Any]:
    return asdict(contest(settings, link, best, folder / DECISIONS))


def table(record: Mapping[str, Any]) -> str:
    """Return what a record shows, and which aims hold."""
    contests = [Contest(**item) for item in record["contests"]]
    lines = [
        f"{'link':<8}{'MB/s':>6}{'of best':>9}{'spread':>16}{'of default':>12}{'spread':>16}"
        f"{'search':>8}  best fixed setting, and where tuned runs ended"
    ]
    for link, rate in record["links"].items():
        own = [item for item in contests if item.link == link]
        best, default = [c.of_best for c in own], [c.of_default for c in own]
        share = max(c.searched for c in own)
        lines.append(
            f"{link:<8}{rate / 1e6:>6.0f}{fmean(best):>9.3f}{_spread(best):>16}"
            f"{fmean(default):>12.3f}{_spread(default):>16}{share:>8.2%}  {own[0].best}; "
            + "; ".join(sorted({c.final for c in own}))
        )
    return "\n".join([*lines, "", *_aims(record, contests), _after_drift(record["drift"])])


def _aims(record: Mapping[str, Any], contests: Sequence[Contest]) -> list[str]:
    own = [[c for c in contests if c.link == link] for link in LINKS]
    best = min(fmean(c.of_best for c in of_link) for of_link in own)
    default = min(fmean(c.of_default for c in of_link) for of_link in own)
    searched = max(c.searched for c in contests)
    return [
        f"Tuned goodput at least {LEAST_OF_BEST:.2f} of the best of "
        f"{len(record['grids']['fast'])} fixed settings on every link: "
        f"{verdict(best >= LEAST_OF_BEST)} ({best:.3f})",
        f"Tuned goodput at least that of the defaults on every link: "
        f"{verdict(default >= LEAST_OF_DEFAULT)} ({default:.3f})",
        f"Searching takes less than {MOST_SEARCHED:.0%} of every run's time: "
        f"{verdict(searched < MOST_SEARCHED)} ({searched:.2%})",
    ]


def _after_drift(shown: Mapping[str, Any]) -> str:
    back = shown["windows_until_back"]
    found = f"after {back} windows" if back is not None else "in none of the windows"
    return (
        f"After the link became {DRIFT:g} times slower goodput is within {WITHIN:.0%} of the "
        f"new best {found} of {shown['steps_per_window']} steps; then {shown['final']}"
    )


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


def verdict(holds: bool) -> str:
    """Return whether an aim holds, in words that can't be overlooked."""
    return "holds" if holds else "DOES NOT HOLD"


@click.command(help=__doc__)
@click.option("--seeds", default=len(SEEDS), show_default=True, help="Tuned runs on each link.")
@click.option(
    "--runs", type=click.Path(path_type=Path), default=Path("runs/tuning"), show_default=True,
    help="Directory of the common start, of parts that are done and of decisions files.",
)  # fmt: skip
@click.option("--record", type=click.Path(path_type=Path), help="Directory of the record.")
def main(seeds: int, runs: Path, record: Path | None) -> None:
    """Run the command."""
    reporter = Reporter()
    settings = TrainSettings(
        lr=3e-4, schedule="constant", warmup=0.0, start_steps=300, device_threads=1, host_threads=1
    )
    try:
        found = run_all(settings, runs, range(seeds), reporter) | provenance()
    except ZenFlowError as error:
        raise click.ClickException(str(error)) from error
    folder = record or results_folder("tuning")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tuning.json", found)
    write_text(folder / "table.txt", table(found) + "\n")
    reporter.say(table(found))


if __name__ == "__main__":
    main()
