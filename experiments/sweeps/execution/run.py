"""Run: works through a sweep with a bar, keeps every point, and leaves its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments.output.bar import Bar
from experiments.output.provenance import provenance
from experiments.sweeps.execution.journal import Journal
from experiments.sweeps.execution.pool import local_rows
from experiments.sweeps.grid import Sweep
from experiments.sweeps.points import Row
from experiments.sweeps.table import write_table
from experiments.training.stop import StopRequest
from zenflow.errors import ConfigError
from zenflow.host.limits import usable_cores

ENGINES = ("local", "dask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Who works through the points.

    Raises:
        ConfigError: A scheduler is given to an engine without one.
    """

    name: str = "local"
    workers: int | None = None
    """Processes; None is one for each core."""
    scheduler: str | None = None
    """Address of a Dask cluster; None makes one on this machine."""

    def __post_init__(self) -> None:
        """Check that the options belong together."""
        if self.name not in ENGINES:
            raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, got {self.name!r}")
        if self.scheduler is not None and self.name != "dask":
            raise ConfigError("--scheduler is for --engine dask: leave it out, or change --engine")
        if self.scheduler is not None and self.workers is not None:
            raise ConfigError(
                "the cluster at --scheduler has its own workers: leave out --workers"
            )
        if self.name == "dask":
            from experiments.sweeps.execution.cluster import check_cluster

            check_cluster()

    def rows(
        self, sweep: Sweep, points: Sequence[int], must_stop: Callable[[], bool]
    ) -> Iterator[tuple[int, Row]]:
        """Yield every point's row as it is found."""
        workers = self.workers or usable_cores()
        if self.name == "local":
            return local_rows(sweep, points, workers, must_stop)
        from experiments.sweeps.execution.cluster import cluster_rows

        return cluster_rows(
            sweep, points, workers=workers, scheduler=self.scheduler, must_stop=must_stop
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call of `run_sweep` came to."""

    rows: dict[int, Row]
    """Row of every point that has one, by index."""
    files: list[Path]
    exit_code: int
    """128 + the signal's number where it was interrupted, else 0."""


def run_sweep(
    sweep: Sweep, folder: Path, engine: Engine, console: Console | None = None
) -> Outcome:
    """Predict every point that the folder does not hold yet, and write the table of all.

    Args:
        sweep: What is predicted.
        folder: New, empty, or of an earlier call with the same sweep.
        engine: Who does it.
        console: For the bar; None is standard output.

    Raises:
        ConfigError: No point makes sense, or the folder is another sweep's.
        ZenFlowError: Workers can't be kept alive.
    """
    console = console or Console(highlight=False)
    sweep.check()
    journal = Journal(folder, sweep.to_dict())
    rows = dict(journal.rows)
    missing = [index for index in range(sweep.num_points) if index not in rows]
    if rows:
        console.print(f"{len(rows)} of {sweep.num_points} points are there already", style="dim")
    with StopRequest() as stop, journal.open(provenance()):
        with Bar(console, "points", sweep.num_points, done=len(rows)) as bar:
            for index, row in engine.rows(sweep, missing, lambda: stop.requested):
                journal.add(index, row)
                rows[index] = row
                bar.update(len(rows))
                if bar.is_line_due():
                    console.print(f"{len(rows)}/{sweep.num_points} points")
        files = write_table(sweep, rows, journal.sessions, folder) if rows else []
    return Outcome(
        rows=rows, files=files, exit_code=stop.exit_code if len(rows) < sweep.num_points else 0
    )
