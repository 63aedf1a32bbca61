"""A study from the command line: its progress, its tables, and the files it leaves."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from autotune.offline.objective import OBJECTIVES, goodput
from autotune.offline.result import Candidate, TuneResult
from autotune.offline.study import tune
from autotune.offline.trial_loop import TuningTask
from experiments.output.bar import Bar, wide_console
from experiments.output.files import write_json, write_text
from experiments.output.plots import save_figure
from experiments.search.plots import draw_found, draw_importance
from experiments.training.settings.file import file_content, toml_of
from zenflow.provenance import machine_name, provenance

_SHOWN = 5


def run_study(
    task: TuningTask,
    settings: Mapping[str, Any],
    folder: Path,
    *,
    num_workers: int,
    timeout: float | None,
) -> TuneResult:
    """Run a study with a bar, write its files and print its best settings.

    Args:
        task: What is tuned.
        settings: What else ``best.toml`` is to say, as in a config file of `zenflow train`.
        folder: Where the files go; those of an earlier call are replaced.
        num_workers: Processes.
        timeout: Seconds after which no trial begins.

    Raises:
        ConfigError: The study can't be carried out.
    """
    console = wide_console()
    with Bar(console, f"{task.sampler}, {task.backend.kind}", task.num_trials) as bar:

        def on_progress(trials: Sequence[FrozenTrial]) -> None:
            done = [trial for trial in trials if trial.state is TrialState.COMPLETE]
            bar.update(len(done), text=_best_value(task, done))

        result = tune(task, num_workers=num_workers, timeout=timeout, on_progress=on_progress)
    write_results(result, settings, folder)
    say_results(console, result, folder)
    return result


def _best_value(task: TuningTask, done: Sequence[FrozenTrial]) -> str:
    goal = task.goals[0]
    values = [trial.values[0] for trial in done]
    if not values:
        return ""
    return f"{goal.name} {max(values) if goal.is_maximised else min(values):.4g} {goal.unit}"


def write_results(result: TuneResult, settings: Mapping[str, Any], folder: Path) -> None:
    """Write best.toml, trials.csv, summary.json and the pictures, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    if result.best:
        write_text(folder / "best.toml", best_toml(result, settings))
    write_text(folder / "trials.csv", trials_csv(result))
    write_json(folder / "summary.json", record_of(result))
    save_figure(draw_importance(result), folder / "importance.png")
    if result.candidates:
        save_figure(draw_found(result), folder / "pareto.png")


def best_toml(result: TuneResult, settings: Mapping[str, Any]) -> str:
    """Return the best setting, by the first objective, as a config file of `zenflow train`."""
    best = result.best[0]
    config = {**settings["zenflow"], **best.knobs.to_dict()}
    figures = ", ".join(f"{name} {value:.6g}" for name, value in best.values.items())
    backend = result.task.backend
    tuned_for = {
        "model": backend.describe().get("model", settings.get("model")),
        "machine": backend.describe().get("machine", machine_name()),
        "figures": backend.kind,
    }
    said = {name: value for name, value in settings.items() if name != "zenflow"}
    return (
        f"# The best of {len(result.candidates)} settings, {backend.kind}: {figures}.\n"
        + toml_of({**file_content(said, config), "tuned_for": tuned_for})
    )


def trials_csv(result: TuneResult) -> str:
    """Return a row for each setting that was tried, seconds and bytes."""
    text = io.StringIO()
    rows = [_row(candidate) for candidate in result.candidates]
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["number"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(candidate: Candidate) -> dict[str, Any]:
    return {
        "number": candidate.number,
        **candidate.knobs.to_dict(),
        **candidate.measurement.to_dict(),
        "goodput": goodput(candidate.measurement, candidate.knobs),
        "allowed": candidate.allowed,
    }


def record_of(result: TuneResult) -> dict[str, Any]:
    """Return a study's outcome as JSON values: summary.json."""
    task = result.task
    return {
        "study": task.study_name,
        "storage": task.storage,
        "backend": task.backend.describe(),
        "figures_are": task.backend.kind,
        "sampler": task.sampler,
        "seed": task.seed,
        "objectives": {goal.name: goal.direction for goal in task.goals},
        "constraints": {name: getattr(task.constraints, name) for name in task.constraints.names},
        "space": {name: list(values) for name, values in task.space.values.items()},
        "num_trials": _counts(result),
        "asked_for": task.num_trials,
        "is_complete": result.is_complete,
        "interrupted": result.interrupted,
        "best": [candidate.to_dict() for candidate in result.best],
        "default": None if result.default is None else result.default.to_dict(),
        "importance": {name: dict(own) for name, own in result.importance.items()},
        **provenance(),
    }


def _counts(result: TuneResult) -> dict[str, int]:
    """Return the number of trials by what became of them; those with figures by their kind."""
    kind = result.task.backend.kind
    return {
        kind if name == "measured" else name: count for name, count in result.num_trials.items()
    }


def say_results(console: Console, result: TuneResult, folder: Path) -> None:
    """Print the best settings beside the default, and where everything is."""
    if result.best:
        console.print(_table(result))
    counts = ", ".join(f"{count} {name}" for name, count in _counts(result).items())
    lines = [f"Trials: {counts or 'none'}."]
    if result.interrupted:
        lines.append("Interrupted; the running trial is marked, and the same command goes on.")
    elif not result.is_complete:
        lines.append(f"Fewer settings than the {result.task.num_trials} asked for were tried.")
    if not result.best:
        lines.append("No setting that keeps the constraints has been tried.")
    if result.default is None:
        lines.append("The default setting is not among those that were tried.")
    lines.append(f"Results are in {folder}: {', '.join(sorted(p.name for p in folder.iterdir()))}")
    if result.best:
        data = " --data TEXTS" if result.task.backend.kind == "simulated" else ""
        file = shlex.quote(f"{folder}/best.toml")
        lines.append(f"Train with it: zenflow train --config {file}{data}")
    if result.task.storage is not None:
        where = shlex.quote(result.task.storage)
        lines.append(f"Look at the study (pip install optuna-dashboard): optuna-dashboard {where}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _table(result: TuneResult) -> Table:
    shown = list(result.best[:_SHOWN])
    if len(result.task.objectives) == 1:
        shown = _ranked(result)[:_SHOWN]
    table = Table(title=f"Best settings, {result.task.backend.kind}", title_justify="left")
    table.add_column("setting")
    columns = dict.fromkeys((*result.task.objectives, *OBJECTIVES))
    for name in (*columns, "captured"):
        table.add_column(_heading(name), justify="right")
    rows = [(str(candidate.knobs), candidate) for candidate in shown]
    if result.default is not None:
        broken = "" if result.default.allowed else " (breaks a constraint)"
        rows.append((f"default: {result.default.knobs}{broken}", result.default))
    for label, own in rows:
        values = {
            name: goal.value(own.measurement, own.knobs) for name, goal in OBJECTIVES.items()
        }
        cells = [_shown(name, values[name]) for name in columns]
        table.add_row(label, *cells, f"{own.measurement.captured:.2f}")
    return table


def _ranked(result: TuneResult) -> list[Candidate]:
    (goal,) = result.task.goals
    sign = -1 if goal.is_maximised else 1
    allowed = [candidate for candidate in result.candidates if candidate.allowed]
    return sorted(allowed, key=lambda candidate: sign * candidate.values[goal.name])


def _heading(name: str) -> str:
    headings = {
        "goodput": "goodput, tokens/s", "step_seconds": "step, ms", "stall_seconds": "stall, ms",
        "device_bytes": "device, GB", "host_bytes": "host, GB",
    }  # fmt: skip
    return headings.get(name, name)


def _shown(name: str, value: float) -> str:
    if name.endswith("_seconds"):
        return f"{value * 1e3:.1f}"
    if name.endswith("_bytes"):
        return f"{value / 1e9:.3g}"
    return f"{value:,.0f}"
