"""A run, from its folder to what the page shows of it, finished or not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from autotune.decisions.file import DECISIONS, DecisionFile
from experiments.output.run_types import StepRow
from experiments.report.trace_view import TraceView, read_view
from experiments.report.tuning import read_story
from experiments.traces.compare import TRACE_FILES
from experiments.traces.facts import TraceFacts
from experiments.training.parts.files.step_log import read_steps
from experiments.training.run.summary import step_figures
from zenflow.errors import ConfigError

MOST_POINTS = 1200
"""Most points of a curve; a longer run's are means over as many equal parts."""
_TABLES = ("settings", "config", "emulated_link", "tuning", "hardware", "versions")
"""Keys of config.json and summary.json that hold objects."""
_NUMBERS = (
    "steps", "planned_steps", "run_seconds", "mean_step_seconds", "median_step_seconds",
    "p95_step_seconds", "stall_seconds", "stall_fraction", "d2h_bytes_per_step",
    "h2d_bytes_per_step", "host_bytes_per_param", "tokens_per_second", "captured_energy",
    "max_staleness", "eval_loss", "eval_accuracy", "final_train_loss", "num_params",
)  # fmt: skip
"""Keys of summary.json that hold numbers, or null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Content of a run's files."""

    name: str
    """Label of the run; the page makes one from it and the path that no other run has."""
    path: str
    summary: Mapping[str, Any]
    """Figures as in summary.json, or of the steps so far."""
    rows: Sequence[Mapping[str, Any]] = ()
    """The lines of steps.jsonl."""
    trace: TraceView | None = None
    story: DecisionFile | None = None
    """None of a run that nobody tuned."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """Missing parts of the run, in sentences."""

    @property
    def source(self) -> str:
        """Kind of the run's numbers, such as measured or emulated."""
        return "measured, emulated link" if self.summary.get("emulated_link") else "measured"

    @property
    def facts(self) -> TraceFacts:
        """Model, batch and machine of the run's steps."""
        return TraceFacts.read({**self.settings, **self.summary})


def read_run(folder: Path) -> Run:
    """Return the run in a folder.

    Raises:
        ConfigError: A file of it can't be read, or neither steps nor a summary are there.
    """
    config = _checked(json_if_there(folder / "config.json"), folder / "config.json")
    rows, notes = read_steps(folder / "steps.jsonl"), []
    summary_path = folder / "summary.json"
    if summary_path.is_file():
        summary = _checked(read_json(summary_path), summary_path)
    elif rows:
        summary = _so_far(config, rows)
        planned = summary.get("planned_steps")
        notes.append(
            f"{folder} has no summary.json: the run has taken {len(rows)} steps"
            + (f" of {planned}" if planned else "")
            + ", and its figures are of those"
        )
    else:
        raise ConfigError(
            f"{folder} has neither summary.json nor a step in steps.jsonl, so there is nothing "
            f"to show: let the run take a step (zenflow train --resume {folder})"
        )
    trace = next((folder / name for name in TRACE_FILES if (folder / name).is_file()), None)
    if trace is None:
        notes.append(f"{folder} has no trace, so no lanes of it are drawn")
    if not rows:
        notes.append(f"{folder} has no steps.jsonl, so no curves of it are drawn")
    decisions = folder / DECISIONS
    return Run(
        name=str(summary.get("strategy", folder.name)),
        path=str(folder),
        summary=summary,
        rows=rows,
        trace=None if trace is None else read_view(trace),
        story=read_story(decisions) if decisions.is_file() else None,
        settings=config.get("settings") or {},
        notes=notes,
    )


def run_of_summary(summary: Mapping[str, Any], path: str) -> Run:
    """Return a run of which a record has kept the summary alone."""
    name = str(summary.get("strategy", "run"))
    return Run(name=name, path=path, summary=_checked(summary, path))


def curves(run: Run) -> dict[str, list[Any]]:
    """Return the run's losses, each point of training the mean over an equal share of steps.

    Held-out losses stay at their steps: [step, elapsed, loss]. ``elapsed`` counts the seconds of
    training alone, from 0 at the run's start, as everywhere in this project.
    """
    rows = pd.DataFrame(run.rows, columns=["step", "loss", "seconds", "eval_loss"])
    rows["elapsed"] = rows["seconds"].cumsum()
    final, last = run.summary.get("eval_loss"), len(rows) - 1
    if final is not None and math.isnan(rows["eval_loss"].astype(float)[last]):
        rows.loc[last, "eval_loss"] = final
    parts = rows.groupby(rows.index // (-(-len(rows) // MOST_POINTS)))
    held_out = rows[["step", "elapsed", "eval_loss"]].dropna()
    return {
        "step": parts["step"].last().tolist(),
        "elapsed": parts["elapsed"].last().tolist(),
        "loss": parts["loss"].mean().tolist(),
        "held_out": held_out.to_numpy(float).tolist(),
    }


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; numbers that are not finite are None.

    Raises:
        ConfigError: It can't be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} can't be read as JSON ({error}): restore it, or run again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold an object, but holds {type(content).__name__}")
    return content


def json_if_there(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no file.

    Raises:
        ConfigError: It can't be read, or holds something else.
    """
    return read_json(path) if path.is_file() else {}


def _checked(content: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    """Return a run's config.json or summary.json, whose values are of the types they need."""
    checks = {"an object": (_TABLES, Mapping), "a number": (_NUMBERS, int | float)}
    for kind, (names, allowed) in checks.items():
        for name in names:
            value = content.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, allowed)):
                raise ConfigError(
                    f"{where}: {name} must be {kind}, but is {value!r:.80}: restore the file, or "
                    "run again"
                )
    return content


def _so_far(config: Mapping[str, Any], rows: Sequence[StepRow]) -> dict[str, Any]:
    settings, rule = config.get("settings") or {}, config.get("config") or {}
    link = settings.get("link")
    told = [row for row in rows if row["loss"] is not None]
    return {
        "strategy": settings.get("strategy", "run"),
        "emulated_link": None
        if not link
        else {"d2h_bytes_per_second": link[0], "h2d_bytes_per_second": link[1]},
        **step_figures(told, int(rule.get("update_interval") or 1), 0),
        "planned_steps": settings.get("steps"),
        "seed": settings.get("seed"),
        **{name: config[name] for name in ("hardware", "versions", "commit") if name in config},
    }
