"""Ways to tune a run, against machines whose truth is known: how much is lost until it is tuned.

``python -m experiments.studies.hidden_machines.study`` lets every method tune the same hidden
machines
(`experiments.studies.hidden_machines.machine`), with and without a link that becomes slower in
mid-run, and writes
``experiments/results/<date>_tuning_study_<cpu>/``: every stretch's setting and regret, a table, a
picture. A record that is there already is completed: its rows are not made again.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import optuna

from autotune.offline.samplers import check_sampler
from autotune.space import SearchSpace
from experiments.output.files import write_json, write_text
from experiments.output.plots import save_figure
from experiments.output.progress import Reporter
from experiments.output.provenance import provenance, results_folder
from experiments.studies.hidden_machines.machine import HiddenMachine, case_of
from experiments.studies.hidden_machines.methods import METHODS, START, AbstractMethod, Problem
from experiments.studies.hidden_machines.results import draw_study, report, table
from zenflow.errors import ConfigError, ZenFlowError
from zenflow.knobs import Knobs

RECORD = "record.jsonl"
TABLE = "table.txt"
PICTURE = "study.png"
DRIFTING = ("twin", "default")
"""Methods that are also shown a machine that changes; the others have no answer to it."""
_FORMAT = 1
_DIGITS = 6

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is the same for every seed."""

    num_windows: int = 20
    """Stretches measured, each at one setting."""
    num_trials: int = 25
    """Of the twin's search, for each question."""
    drift_at: int = 10
    """Stretches after which both directions of the link become slower."""
    drift: float = 4.0
    """By this factor."""
    space: SearchSpace = field(
        default_factory=lambda: SearchSpace(
            topk_ratios=(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
            update_intervals=(1, 2, 4, 8, 16),
            lags=(1, 2, 4),
            select_intervals=(START.select_interval,),
        )
    )

    def __post_init__(self) -> None:
        """Check that there is something before the drift and after it."""
        if not 0 < self.drift_at < self.num_windows:
            raise ConfigError(
                f"the drift must come between the first and the last of {self.num_windows} "
                f"windows, got {self.drift_at}"
            )

    def header(self) -> dict[str, Any]:
        """Return the first line of a record: rows under another one are not comparable.

        ``knobs`` names the values of a setting in the rows.
        """
        settings = json.loads(json.dumps(asdict(self)))
        return {"format": _FORMAT, "knobs": list(START.to_dict()), **settings}


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a method did to one machine."""

    knobs: Sequence[Knobs]
    """Of every stretch."""
    final: Knobs
    search_seconds: float
    """CPU time of choosing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Methods to be played on one seed's machine."""

    study: Study
    seed: int
    steady: Sequence[str]
    drifting: Sequence[str]


def play(method: AbstractMethod, world: HiddenMachine, study: Study, *, drifts: bool) -> Played:
    """Let a method tune a machine to the end."""
    knobs, seconds = [], 0.0
    for window in range(study.num_windows):
        if drifts and window == study.drift_at:
            world.drift = study.drift
        started = time.process_time()
        knobs.append(method.next_knobs())
        seconds += time.process_time() - started
        stretch = world.measure(knobs[-1])
        started = time.process_time()
        method.record(stretch)
        seconds += time.process_time() - started
    return Played(knobs=knobs, final=method.final_knobs(), search_seconds=seconds)


def rows_of(task: Task) -> list[Row]:
    """Return a row for each method: what it played, and what that cost beside the truth."""
    study = task.study
    problem = Problem.of(task.seed, study.space, study.num_windows, study.num_trials)
    world = HiddenMachine(task.seed)
    before = world.truth(problem.settings)
    after = before
    if task.drifting:
        world.drift = study.drift
        after = world.truth(problem.settings)
    rows = []
    for drifts, names in ((False, task.steady), (True, task.drifting)):
        late = after if drifts else before
        truths = [before] * study.drift_at + [late] * (study.num_windows - study.drift_at)
        for name in names:
            played = play(METHODS[name](problem), world.afresh(), study, drifts=drifts)
            rows.append(_row(task.seed, name, played, truths, drifts=drifts))
    return rows


def _row(
    seed: int, name: str, played: Played, truths: Sequence[Mapping[Knobs, float]], *, drifts: bool
) -> Row:
    pairs = list(zip(played.knobs, truths, strict=True))
    last = truths[-1]
    best = max(last, key=last.__getitem__)
    return {
        "seed": seed,
        "case": str(case_of(seed)),
        "method": name,
        "drifts": drifts,
        "knobs": [list(knobs.to_dict().values()) for knobs in played.knobs],
        "regrets": [
            round(max(truth.values()) / truth[knobs] - 1, _DIGITS) for knobs, truth in pairs
        ],
        "over_default": [round(truth[START] / truth[knobs], _DIGITS) for knobs, truth in pairs],
        "final": list(played.final.to_dict().values()),
        "final_regret": round(last[best] / last[played.final] - 1, _DIGITS),
        "best": list(best.to_dict().values()),
        "search_seconds": round(played.search_seconds, _DIGITS),
    }


# ---- record -----------------------------------------------------------------------------------


def read_record(folder: Path, study: Study | None = None) -> list[Row]:
    """Return the rows of a record; none where there is no file. A torn last line is dropped.

    Args:
        folder: Of the record.
        study: What it must be of; None takes any.

    Raises:
        ConfigError: It is the record of another study.
    """
    path = folder / RECORD
    if not path.is_file():
        return []
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    header = rows[0] if rows else None
    if study is not None and header != study.header():
        raise ConfigError(
            f"{path} was made with {header}, and this study has {study.header()}: go on with the "
            "same settings, or write another record"
        )
    return rows[1:]


def write_record(folder: Path, study: Study, rows: Sequence[Row]) -> None:
    """Replace a record, whole or not at all; rows by seed, then in the order of the methods."""
    order = {name: place for place, name in enumerate(METHODS)}
    rows = sorted(rows, key=lambda row: (row["drifts"], row["seed"], order[row["method"]]))
    lines = (json.dumps(item) + "\n" for item in (study.header(), *rows))
    write_text(folder / RECORD, "".join(lines))


def missing(study: Study, seeds: int, methods: Sequence[str], rows: Sequence[Row]) -> list[Task]:
    """Return what a record lacks."""
    known = {(row["seed"], row["method"], row["drifts"]) for row in rows}
    tasks = [
        Task(
            study=study,
            seed=seed,
            steady=[name for name in methods if (seed, name, False) not in known],
            drifting=[
                name for name in methods if name in DRIFTING and (seed, name, True) not in known
            ],
        )
        for seed in range(seeds)
    ]
    return [task for task in tasks if task.steady or task.drifting]


def _carried_out(tasks: Sequence[Task], workers: int) -> Iterator[list[Row]]:
    """Yield every task's rows as they come."""
    if workers == 1:
        yield from map(rows_of, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            for future in as_completed([pool.submit(rows_of, task) for task in tasks]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def complete(
    folder: Path, study: Study, seeds: int, methods: Sequence[str], workers: int = 1
) -> list[Row]:
    """Return all rows of a record once those that it lacks are made; they are kept as they come.

    Raises:
        ConfigError: The record is another study's, or the default does not fit a case's machine.
    """
    reporter = Reporter()
    rows = read_record(folder, study)
    tasks = missing(study, seeds, methods, rows)
    folder.mkdir(parents=True, exist_ok=True)
    for number, found in enumerate(_carried_out(tasks, workers), 1):
        rows += found
        write_record(folder, study, rows)
        finals = ", ".join(
            f"{row['method']} {row['final_regret']:.1%}" for row in found if not row["drifts"]
        )
        reporter.say(f"{number}/{len(tasks)}  seed {found[0]['seed']}, final regrets: {finals}")
    return rows


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=30, show_default=True)
@click.option("--methods", default=",".join(METHODS), show_default=True)
@click.option("--trials", type=click.IntRange(1), default=Study().num_trials, show_default=True,
              help="Of the twin's search, for each question.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True)
@click.option("--record", type=click.Path(path_type=Path), help="Folder of the record.")
def main(seeds: int, methods: str, trials: int, workers: int, record: Path | None) -> None:
    """Let every method tune machines whose truth is known, and write the record."""
    folder = record or results_folder("tuning_study")
    chosen = methods.split(",")
    try:
        if unknown := set(chosen) - set(METHODS):
            raise ConfigError(f"methods are {', '.join(METHODS)}, got {', '.join(unknown)}")
        if "GP" in chosen:
            check_sampler("gp", 1)
        study = Study(num_trials=trials)
        rows = complete(folder, study, seeds, chosen, workers)
    except ZenFlowError as error:
        raise click.ClickException(str(error)) from error
    origin = provenance()
    origin["versions"]["optuna"] = optuna.__version__
    write_json(folder / "provenance.json", {**study.header(), **origin})
    write_text(folder / TABLE, table(rows, study.drift_at))
    write_text(folder / "README.md", report(rows, study.header(), origin))
    save_figure(draw_study(rows, study.drift_at), folder / PICTURE)
    Reporter().say("\n" + table(rows, study.drift_at))


if __name__ == "__main__":
    main()
