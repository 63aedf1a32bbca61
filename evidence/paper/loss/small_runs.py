"""The small runs behind the figures that are measured or emulated here: one model, one set-up.

A decoder is trained a little on the default data, on the device; that start stands in for a
pretrained model. Fine-tuning goes on from it with Python's documentation as its text. Every
finished run stays in the job's folder, so that an interrupted figure goes on behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evidence.studies.regimes import documentation
from evidence.studies.trained import trained
from experiments.lab.study import Job
from experiments.output.files import write_json
from experiments.training.parts.files.step_log import read_steps
from experiments.training.parts.setup import build_setup
from experiments.training.run.emulated_link import choose_link
from experiments.training.settings.training import TrainSettings

_START_STEPS = 800
_START_LR = 2e-3
_SMOKE_STEPS = 8
LR = 1e-3
"""Peak learning rate of fine-tuning: in the accuracy record the device learns most with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run from its files."""

    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    """Rows of steps.jsonl, in order."""


def common(job: Job, steps: int) -> TrainSettings:
    """Return the settings of all runs: a model with random weights on the default data.

    In a smoke test the model is tiny and the steps are few.
    """
    return TrainSettings(
        model="own:tiny" if job.smoke else "own:mini",
        steps=min(steps, _SMOKE_STEPS) if job.smoke else steps,
        lr=LR,
        eval_batches=2 if job.smoke else 24,
        device_threads=1,
        host_threads=1,
        timeline_steps=0,
        seed=job.seed,
    )


def fine_tuning(job: Job, steps: int) -> TrainSettings:
    """Return the settings of fine-tuning; the model that it starts from is trained if need be."""
    started = job.folder / "start"
    start = common(job, _START_STEPS)
    # Another seed than the runs', or they would see its batches again.
    trained(replace(start, strategy="on_device", lr=_START_LR, seed=job.seed + 1), started)
    shared = common(job, steps)
    return replace(shared, model=f"own:{started / 'model'}", data=str(documentation()))


def with_link(job: Job, settings: TrainSettings) -> TrainSettings:
    """Return the settings with the emulated link; its rate is measured once for a figure."""
    kept = job.folder / "link.json"
    if not kept.is_file():
        write_json(kept, {"rate": choose_link(build_setup(settings)).bytes_per_second})
    rate = json.loads(kept.read_text(encoding="utf-8"))["rate"]
    return replace(settings, link=(rate, rate))


def run(job: Job, name: str, settings: TrainSettings) -> Run:
    """Return a run, made now unless the job's folder has it.

    Raises:
        KeyboardInterrupt: A signal ended it early.
    """
    folder = job.folder / name
    summary = trained(settings, folder)
    return Run(summary=summary, rows=read_steps(folder / "steps.jsonl"))


def settled(run: Run) -> Sequence[Mapping[str, Any]]:
    """Return the rows of whole windows behind the first two, in which landings settle."""
    interval = int(run.summary["config"]["update_interval"])
    rows = run.rows[max(4, 2 * interval) :]
    return rows[: len(rows) - len(rows) % interval] or run.rows


def describe(settings: TrainSettings) -> dict[str, Any]:
    """Return a record's description of its runs."""
    return {
        "steps": settings.steps,
        "lr": settings.lr,
        "batch_size": settings.batch_size,
        "sequence": settings.sequence,
        "link_bytes_per_second": None if settings.link is None else settings.link[0],
        "model": Path(settings.model).parent.name if "/" in settings.model else settings.model,
    }
