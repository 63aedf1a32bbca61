"""Training runs as studies have them: quiet, made once, gone on with after an interruption.

Studies over an emulated link begin with two cells that all their runs need: a link that is sized
by the machine, and a common start.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.lab.study import Cell, Job, Row
from experiments.output.progress import Reporter
from experiments.training.parts.files.checkpoint import CHECKPOINTS, latest_checkpoint
from experiments.training.parts.setup import build_setup
from experiments.training.run.comparison import started
from experiments.training.run.emulated_link import COPY_SHARE, choose_link
from experiments.training.run.single import run
from experiments.training.run.stop import StopRequest
from experiments.training.settings.training import TrainSettings

START, LINK = "start", "link"
SMALL = TrainSettings(
    model="tiny", sequence=32, batch_size=2, steps=16, start_steps=3, eval_batches=2,
    device_threads=1, host_threads=1,
)  # fmt: skip
"""Settings of smoke tests."""


def trained(settings: TrainSettings, folder: Path) -> dict[str, Any]:
    """Return the summary of a finished run, made now unless the folder has it.

    Raises:
        KeyboardInterrupt: A signal ended the run early.
    """
    finished = folder / "summary.json"
    if not finished.is_file():
        resume = latest_checkpoint(folder / CHECKPOINTS) is not None
        with StopRequest() as stop:
            outcome = run(settings, folder, reporter=quiet(), stop=stop, resume=resume)
        if outcome.stopped:
            finished.unlink()
            raise KeyboardInterrupt
    summary: dict[str, Any] = json.loads(finished.read_text(encoding="utf-8"))
    return summary


def quiet() -> Reporter:
    """Return a reporter that says nothing."""
    return Reporter(Console(quiet=True))


def start_cell(training: TrainSettings) -> Cell:
    """Return the cell of the run whose weights others go on from."""
    return Cell(settings={"part": START, "seed": training.seed}, work=training)


def link_cell(training: TrainSettings) -> Cell:
    """Return the cell that measures forward and backward, and sizes a link by them."""
    return Cell(settings={"part": LINK, "copy_share": COPY_SHARE}, work=training)


def begin(cell: Cell, job: Job) -> Row:
    """Make a start or a link."""
    if cell.settings["part"] == START:
        go_on(cell.work, cell, job)
        return {}
    chosen = choose_link(build_setup(cell.work), copy_share=cell.settings["copy_share"])
    return {"bytes_per_second": chosen.bytes_per_second}


def go_on(training: TrainSettings, start: Cell, job: Job) -> TrainSettings:
    """Return settings that go on from a start; it is made if it is not there.

    Raises:
        KeyboardInterrupt: It was stopped.
    """
    with StopRequest() as stop:
        found, outcome = started(training, job.folder_of(start), reporter=quiet(), stop=stop)
    if outcome is not None and outcome.stopped:
        raise KeyboardInterrupt
    return found


def over(training: TrainSettings, rate: float) -> TrainSettings:
    """Return the settings over a link of so many bytes/s each way."""
    return replace(training, link=(rate, rate))
