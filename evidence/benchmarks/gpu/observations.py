"""Runs of the GPU benchmark as the calibration and the validation take runs: as observations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evidence.benchmarks.gpu.figures import TRACED_STEPS
from evidence.benchmarks.gpu.setup import Cell
from sim.fitting.refine import Observation
from sim.schedules.streams import Streams, layers_of
from sim.simulate import PASSES, Strategy
from zenflow import ZenFlowConfig

_FIELDS = ("model", "batch", "sequence", "recomputes", "loss_tokens")


def observation(cell: Mapping[str, Any], run: Mapping[str, Any]) -> Observation:
    """Return a run's steady state, from a cell's description and the run's record.

    Step and stall are those of the timed steps, and the lanes' times are the timeline's.
    """
    own = Cell(**{name: cell[name] for name in _FIELDS if name in cell})
    workload = own.workload()
    streams = None
    if visiting := run.get("visiting_layers", 0):
        streams = Streams(resident_layers=len(layers_of(workload.layers)) - visiting)
    busy = {lane: found["busy_seconds"] / TRACED_STEPS for lane, found in run["lanes"].items()}
    return Observation(
        label=f"{cell['name']}: {run['name']}",
        workload=workload,
        strategy=Strategy(
            name=run["preset"],
            config=ZenFlowConfig.from_dict(run["config"]),
            releases=run["mode"] == "release",
            streams=streams,
        ),
        step_seconds=run["step_seconds"]["median"],
        stall_seconds=sum(run["stall_seconds_per_step"].values()),
        busy_seconds=busy,
        passes={name: run["device_seconds"][name] for name in PASSES},
    )


def observations(record: Path) -> Iterator[Observation]:
    """Yield all runs of a record.json that `evidence.benchmarks.gpu.step` has left."""
    whole = json.loads(record.read_text(encoding="utf-8"))
    for cell in whole["cells"]:
        for run in cell["runs"]:
            yield observation(cell["cell"], run)
