"""What studies over an emulated link begin with: a link sized by the machine, a common start.

Both are cells that others need: made once, and then the same for all runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console

from experiments.lab.study import Cell, Job, Row
from experiments.output.progress import Reporter
from experiments.training.comparison import started
from experiments.training.emulated_link import COPY_SHARE, choose_link
from experiments.training.settings import TrainSettings
from experiments.training.setup import build_setup
from experiments.training.stop import StopRequest

START, LINK = "start", "link"
SMALL = TrainSettings(
    model="tiny", sequence=32, batch_size=2, steps=16, start_steps=3, eval_batches=2,
    device_threads=1, host_threads=1,
)  # fmt: skip
"""Settings of smoke tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun(Cell):
    """A cell of runs that share settings."""

    training: TrainSettings
    """Settings of its runs, without link and start."""


def start_cell(training: TrainSettings) -> Begun:
    """Return the cell of the run whose weights others go on from."""
    return Begun(settings={"part": START, "seed": training.seed}, training=training)


def link_cell(training: TrainSettings, copy_share: float = COPY_SHARE) -> Begun:
    """Return the cell that measures forward and backward, and sizes a link by them.

    Args:
        training: Settings of the runs that are measured.
        copy_share: Time of a copy of the model each way over that of forward and backward.
    """
    return Begun(settings={"part": LINK, "copy_share": copy_share}, training=training)


def begin(cell: Cell, job: Job) -> Row:
    """Make a start or a link."""
    assert isinstance(cell, Begun)
    if cell.settings["part"] == START:
        go_on(cell.training, cell, job)
        return {}
    bench = build_setup(cell.training)
    chosen = choose_link(bench, copy_share=cell.settings["copy_share"])
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


def quiet() -> Reporter:
    """Return a reporter that says nothing."""
    return Reporter(Console(quiet=True))
