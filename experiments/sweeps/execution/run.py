"""Run: works through a sweep with a bar, keeps every point, and leaves its table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments.output.bar import Bar
from experiments.sweeps.columns import Batch
from experiments.sweeps.execution.journal import Journal
from experiments.sweeps.execution.pool import local_batches
from experiments.sweeps.grid import Sweep
from experiments.sweeps.rates import in_groups
from experiments.sweeps.table import write_table
from experiments.training.run.stop import StopRequest
from zenflow.host.limits import usable_cores
from zenflow.provenance import provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a call of `run_sweep`."""

    found: Batch
    """Every point that has a result, in the order of the grid."""
    files: list[Path]
    exit_code: int
    """128 + the signal's number where it was interrupted, else 0."""


def run_sweep(
    sweep: Sweep, folder: Path, workers: int | None = None, console: Console | None = None
) -> Outcome:
    """Predict every point that the folder does not hold yet, and write the table of all.

    Args:
        sweep: What is predicted.
        folder: New, empty, or of an earlier call with the same sweep.
        workers: Processes; None is one for each core.
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
            for batch in local_batches(
                sweep, missing, workers or usable_cores(), lambda: stop.requested
            ):
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
