"""Validation: predicted against measured, on runs that calibrated nothing.

All runs of one process are one cell, and all runs of several ranks another: they are measured in
turn, so that a noisy minute disturbs all of them and no median of any. Runs that give the profile
take turns with them, so that a machine whose speed drifts has the same speed for both. A record
keeps what was measured, and what its profile predicted. When the simulator changes, so do the
predictions: `read_validation` makes them anew.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments.calibration import plans
from experiments.calibration.calibrate import (
    WINDOWS,
    CalibrationOptions,
    calibrate,
    observe_runs,
)
from experiments.calibration.ranks import RankFigures, num_ranks, observe_ranks, refined
from experiments.calibration.runs import ObservedRun, observation
from experiments.lab import record as records
from experiments.lab.columns import Column, Table, key
from experiments.lab.record import Record
from experiments.lab.study import Cell, Data, Job, Progress, Row, Scope, Study
from experiments.output.provenance import RESULTS
from experiments.output.stages import Stages
from experiments.training.settings.training import TrainSettings
from experiments.validation.picture import draw_validation
from sim.fitting.refine import Observation, predict
from sim.hardware.catalog import find_machine
from sim.hardware.file import content_of, profile_of
from sim.hardware.profile import HardwareProfile
from sim.simulate import Prediction
from zenflow.errors import ConfigError

LANES = ("device", "d2h", "h2d", "host")


def validation(
    device: str = "auto",
    dtype: str | None = None,
    turns: int = 8,
    profile: HardwareProfile | None = None,
) -> Study:
    """Return the study of a device.

    Args:
        device: auto, cpu or cuda.
        dtype: Precision of the parameters; None takes the device's own.
        turns: Number of turns of each run.
        profile: What other runs gave; None calibrates first.
    """

    def options(scope: Scope) -> CalibrationOptions:
        return CalibrationOptions.of(device, dtype, turns=1 if scope.smoke else turns)

    def run(cell: Cell, job: Job) -> Row:
        found = options(job)
        if cell.needs:
            sizing = profile_in(job.row_of(*cell.needs))
            return _measured_by_ranks(cell.work, sizing, found, job.progress)
        return _measured(cell.work, profile, found, job)

    def settings(scope: Scope) -> Data:
        found = options(scope)
        given = None if profile is None else hashlib.sha256(repr(profile).encode()).hexdigest()
        return {"device": found.device.type, "dtype": found.dtype, "turns": found.turns,
                "profile": given}  # fmt: skip

    return Study(
        name="validation",
        title="Predictions beside measurements of this engine",
        revision=2,
        cells=lambda scope: _cells(options(scope), smoke=scope.smoke),
        run=run,
        summarise=_summarise,
        findings=lambda data: (),
        about=_about,
        tables=_tables,
        draw=draw_validation,
        settings=settings,
        one_at_a_time=True,
        minutes=11,
    )


def _cells(options: CalibrationOptions, *, smoke: bool) -> Sequence[Cell]:
    is_cpu = options.device.type == "cpu"
    whole = plans.CPU_VALIDATION if is_cpu else plans.GPU_VALIDATION
    chosen = plans.SMOKE_VALIDATION if smoke else whole
    named = {"part": "one process", "plans": [asdict(plan) for plan in chosen]}
    cells = [Cell(settings=named, work=chosen)]
    if num_ranks(options.device) > 1:
        shared = plans.of_ranks(options.device, smoke=smoke)
        told = {name: [asdict(plan) for plan in each] for name, each in shared._asdict().items()}
        settings = {"part": "ranks", **told}
        cells.append(Cell(settings=settings, needs=(cells[0],), work=shared))
    return cells


def profile_in(row: Row) -> HardwareProfile:
    """Return the profile of a record's first row."""
    return profile_of(row["profile"], "the record's profile")


def _measured(
    chosen: Sequence[plans.RunPlan],
    profile: HardwareProfile | None,
    options: CalibrationOptions,
    job: Job,
) -> Row:
    """Return the profile and all runs. It sizes emulated links, and decides nothing else of them.

    Without one other runs give it, in turn with these.
    """
    if profile is None and not job.smoke:
        done = calibrate(options, Stages(Console(quiet=True), job.progress), chosen)
        profile, runs = done.profile, done.others
    else:
        profile = profile or find_machine("dgx-a100-80", 1)
        settings = [plan.resolve(profile, options.settings) for plan in chosen]
        turns = itertools.count(1)

        def show() -> None:
            job.progress(next(turns) / (len(settings) * options.turns), "runs to predict")

        runs = observe_runs(settings, options, show)
    return {"profile": content_of(profile), "runs": _rows(runs, profile)}


def _measured_by_ranks(
    shared: plans.RankPlans,
    profile: HardwareProfile,
    options: CalibrationOptions,
    progress: Progress,
) -> Row:
    """Return the costs of several ranks, and their runs, those that calibrate included."""
    base = options.settings
    settings = [plan.resolve(profile, base) for plan in itertools.chain(*shared)]
    turns = itertools.count(1)

    def show() -> None:
        progress(next(turns) / (len(settings) * options.turns), "runs of several ranks")

    probed, runs = observe_ranks(
        settings,
        count=num_ranks(options.device),
        turns=options.turns,
        windows=WINDOWS,
        on_turn=show,
    )
    count = len(shared.calibrating)
    first, rest = runs[:count], runs[count:]
    figures = refined(probed, profile, [run.observation for run in first])
    return {"figures": asdict(figures), "runs": _rows(rest, figures.of(profile))}


def _rows(runs: Sequence[ObservedRun], profile: HardwareProfile) -> list[Row]:
    return [
        {
            "run": run.observation.label,
            "training": run.settings.to_dict(),
            "spread": run.spread,
            "measured": _figures(run.observation),
            **prediction_of(profile, run.observation),
        }
        for run in runs
    ]


def prediction_of(profile: HardwareProfile, seen: Observation) -> Row:
    """Return the part of a run that follows from a profile."""
    told = predict(profile, seen)
    error = told.step_seconds / seen.step_seconds - 1.0
    return {"predicted": _figures(told), "error": error}


def _figures(found: Observation | Prediction) -> Data:
    return {"step_seconds": found.step_seconds, "stall_seconds": found.stall_seconds,
            "busy_seconds": dict(found.busy_seconds)}  # fmt: skip


def read_validation(folder: Path) -> Record:
    """Return a validation's record as today's simulator predicts its runs.

    One of the former update rule is returned as it was recorded: its settings are no more.

    Raises:
        ConfigError: The folder has no record, or another study's.
    """
    found = records.read(folder)
    records.refuse_others(folder, {"study": found.name}, {"study": STUDY.key})
    if not found.is_of(STUDY):
        return found
    profile = profile_in(found.rows[0])
    rows = [
        {**row, "runs": _predicted_again(row, profile)} if "runs" in row else row
        for row in found.rows
    ]
    return replace(found, rows=rows)


def _predicted_again(row: Row, profile: HardwareProfile) -> list[Row]:
    """Return a row's runs as today's simulator predicts them."""
    count = 1
    if "figures" in row:
        figures = RankFigures(**row["figures"])
        count, profile = figures.count, figures.of(profile)
    runs = []
    for run in row["runs"]:
        settings = TrainSettings.from_dict(run["training"])
        whole = settings.workload()
        workload = replace(whole, batch_size=whole.batch_size // count)
        seen = observation(settings, workload, **run["measured"])
        runs.append({**run, **prediction_of(profile, seen)})
    return runs


def newest(results: Path = RESULTS, *, is_cpu: bool) -> Record | None:
    """Return the newest validation whose device is a CPU, or is none; None if there is none."""
    paths = results.glob(f"*_validation_*/{records.RECORD}")
    found = (read_validation(path.parent) for path in sorted(paths, reverse=True))
    own = (record for record in found if (record.config["device"] == "cpu") == is_cpu)
    return next(own, None)


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    # The profile is the first row's; former records have it in a row of its own.
    profile, alone = rows[0]["profile"], [row for row in rows if "figures" not in row]
    runs = [run for row in alone for run in row.get("runs", ())]
    link, errors = ", emulated links" if profile["device"]["is_cpu"] else "", errors_of(runs)
    lanes = ", ".join(f"{lane} {share:.1%}" for lane, share in errors["lanes"].items())
    said = (
        f"{_told(errors, len(runs))}\n"
        f"of a step: stall off by {errors['stall']:.1%} (median); busy time {lanes}"
    )
    where = f"{profile['name']}{link}"
    ranks: Data | None = None
    for row in rows[len(alone) :]:
        off = errors_of(row["runs"])
        said_of_ranks = _told(off, len(row["runs"]))
        ranks = {**row["figures"], "runs": row["runs"], "errors": off, "said": said_of_ranks}
    return {"where": where, "runs": runs, "errors": errors, "said": said, "ranks": ranks}


def _about(data: Data) -> str:
    parts = [data["said"]]
    if ranks := data["ranks"]:
        parts.append(f"{ranks['count']} ranks over {ranks['backend']}: {ranks['said']}")
    return "\n\n".join([*parts, "Times in the tables are in milliseconds."])


def _told(errors: Data, count: int) -> str:
    return (
        f"{count} runs: step time off by {errors['median']:.1%} (median), "
        f"{errors['p90']:.1%} (90th percentile), {errors['worst']:.1%} (worst); rank correlation "
        f"{errors['rank_correlation']:.3f}"
    )


def _tables(data: Data) -> list[Table]:
    found = [
        Table(columns=RUN_COLUMNS, rows=data["runs"]),
        Table(columns=_LANE_COLUMNS, rows=data["runs"], title="Busy time of lanes"),
    ]
    if ranks := data["ranks"]:
        title = f"{ranks['count']} ranks over {ranks['backend']}"
        found.append(Table(columns=RANK_COLUMNS, rows=ranks["runs"], title=title))
    return found


def errors_of(runs: Sequence[Row]) -> Data:
    """Return statistics over all runs, as shares, not per cent.

    ``median``, ``p90`` and ``worst`` are of the absolute errors of step time, ``rank_correlation``
    is Spearman's, of predicted and measured step times. ``stall`` and ``lanes`` have median
    absolute errors as shares of the measured step.

    Raises:
        ConfigError: There are no runs.
    """
    if not runs:
        raise ConfigError("errors are of runs, and there is none: give at least one")
    off = np.abs([run["error"] for run in runs])
    steps = [[run[side]["step_seconds"] for run in runs] for side in ("measured", "predicted")]
    return {
        "median": float(np.median(off)),
        "p90": float(np.quantile(off, 0.9)),
        "worst": float(off.max()),
        "rank_correlation": rank_correlation(*steps),
        "stall": _median_error(runs, "stall_seconds"),
        "lanes": {lane: _median_error(runs, "busy_seconds", lane) for lane in LANES},
    }


def _median_error(runs: Sequence[Row], *path: str) -> float:
    """Return the median absolute error of a figure, where it was measured."""
    off = [
        abs((_figure(run, "predicted", *path) or 0.0) - seen) / run["measured"]["step_seconds"]
        for run in runs
        if (seen := _figure(run, "measured", *path)) is not None
    ]
    return float(np.median(off or [0.0]))


def _figure(run: Row, side: str, name: str, lane: str | None = None) -> float | None:
    found: Any = run[side][name]
    seconds: float | None = found if lane is None else found.get(lane)
    return seconds


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation; NaN where one side does not vary.

    >>> round(rank_correlation([1, 2, 3, 4], [10, 20, 40, 30]), 3)
    0.8
    """
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def _milliseconds(head: str, *path: str) -> Column:
    def show(run: Row) -> str:
        seconds = _figure(run, *path)
        return "-" if seconds is None else f"{1e3 * seconds:.1f}"

    return Column(head=head, show=show)


RUN_COLUMNS = (
    key("run"),
    _milliseconds("measured", "measured", "step_seconds"),
    key("spread", ".1%"),
    _milliseconds("predicted", "predicted", "step_seconds"),
    key("error", "+.1%"),
    _milliseconds("stall", "measured", "stall_seconds"),
    _milliseconds("predicted", "predicted", "stall_seconds"),
)
"""Columns of a table of runs, times in milliseconds."""
RANK_COLUMNS = RUN_COLUMNS[:5]
"""Columns of a table of several ranks' runs, whose stalls are not told apart from collectives."""
_LANE_COLUMNS = (
    key("run"),
    *(
        _milliseconds(head, side, "busy_seconds", lane)
        for lane in LANES
        for head, side in ((lane, "measured"), ("predicted", "predicted"))
    ),
)

STUDY = validation()
