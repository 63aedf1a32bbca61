"""Run: works through a sweep with a bar, keeps every point, and leaves its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments.output.bar import Bar
from experiments.output.provenance import provenance
from experiments.sweeps.columns import Batch
from experiments.sweeps.execution.journal import Journal
from experiments.sweeps.execution.pool import local_batches
from experiments.sweeps.grid import Sweep
from experiments.sweeps.rates import in_groups
from experiments.sweeps.table import write_table
from experiments.training.run.stop import StopRequest
from zenflow.errors import ConfigError
from zenflow.host.limits import usable_cores

ENGINES = ("local", "dask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Means by which points are computed: processes here, or a cluster.

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

    def batches(
        self, sweep: Sweep, points: Sequence[int], must_stop: Callable[[], bool]
    ) -> Iterator[Batch]:
        """Yield every point's results as they are found."""
        workers = self.workers or usable_cores()
        if self.name == "local":
            return local_batches(sweep, points, workers, must_stop)
        from experiments.sweeps.execution.cluster import cluster_batches

        return cluster_batches(
            sweep, points, workers=workers, scheduler=self.scheduler, must_stop=must_stop
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a call of `run_sweep`."""

    found: Batch
    """Every point that has a result, in the order of the grid."""
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
    done = journal.done
    missing = in_groups(sweep, np.setdiff1d(np.arange(sweep.num_points), done.points)).tolist()
    count = len(done)
    if count:
        console.print(f"{count} of {sweep.num_points} points are there already", style="dim")
    batches = [done]
    with StopRequest() as stop, journal.open(provenance()):
        with Bar(console, "points", sweep.num_points, done=count) as bar:
            for batch in engine.batches(sweep, missing, lambda: stop.requested):
                journal.add(batch)
                batches.append(batch)
                count += len(batch)
                bar.update(count)
                if bar.is_line_due():
                    console.print(f"{count}/{sweep.num_points} points")
        found = Batch.joined(batches).sorted()
        files = write_table(sweep, found, journal.sessions, folder) if count else []
    return Outcome(
        found=found, files=files, exit_code=stop.exit_code if count < sweep.num_points else 0
    )
