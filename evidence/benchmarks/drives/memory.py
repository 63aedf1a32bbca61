"""Memory of a training with states on a drive, under a cap of a quarter of the states.

    python -m evidence.benchmarks.drives.memory [--folder DIR] [--out FILE]

A process makes a model, computes once, and is then capped by a control group of Linux. The cap is
the memory that the process has by then, and a quarter of AdamW's states. All that the optimizer
adds to the host's memory has to fit into that quarter: buffers of the drive, gradients that wait,
uploads, and all that no plan counts. A second process has the states in memory, without a cap, and
the two take turns. A third one has the states in memory under the cap, and the system kills it.

A CPU plays a GPU, whose memory is then in the capped memory too. So the cap has further room for
the device's part of the optimizer's plan, the ring of gradients on their way to the host among it,
and for one layer's gradient. The C library is told to give memory of more than a megabyte back at
once, in all three processes.

The drive is a real one that is slowed, and layers sleep in the place of compute: see `small`. The
simulator says of this setting that the drive is hidden.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from evidence.benchmarks.drives.cap import MemoryCap
from evidence.benchmarks.drives.small import (
    Rates,
    Run,
    Small,
    extents_of,
    pass_of,
    predicted,
    slowed_drive,
)
from evidence.benchmarks.interpreter.played_gpu import played_gpu
from evidence.benchmarks.record import setting, spread, take_turns
from experiments.output.files import write_json
from sim.memory.engine import engine_memory
from sim.simulate import Strategy
from zenflow import MemoryPlan, ZenFlowConfig

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SMALL = Small(layers=96, width=1024, seconds=0.0125)
EXTENT = 1 << 16
"""Elements of an extent, so that all buffers have a small share of the states."""
RATES = Rates(read=250e6, write=250e6)
KNOBS: dict[str, Any] = {
    "topk_ratio": 0.0, "update_interval": 4, "queue_depth": 2, "gradient_link": "e4m3",
}  # fmt: skip
STATE_BYTES = 12
"""Bytes of float32 state of a parameter."""
SHARE = 0.25
"""Part of the states' bytes for which the cap has room."""
MOST_SLOWER = 1.05
ROUNDS = 3
_GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Environment in which the C library keeps no memory of freed tensors."""
_PATIENCE = 600.0
"""Seconds to wait for a process."""


def _train(there: Connection, small: Small, rates: Rates, state_dir: str | None) -> None:
    """Be a process that trains; it says when it is ready, and then takes turns."""
    there.recv()  # once the process is in its group
    importlib.import_module("torch._dynamo")  # which torch imports for the first optimizer
    model = small.module()
    pass_of(model, small.width)
    model.zero_grad()
    there.send("ready")
    there.recv()  # once the group has its cap
    config = ZenFlowConfig(**KNOBS)
    with played_gpu(trains=True), extents_of(EXTENT), slowed_drive(rates):
        run = Run(small, config, model=model, state_dir=state_dir)
        while there.recv() == "turn":
            there.send((run.turn(config.update_interval), run.update_seconds()))
        there.send(run.optimizer.memory.host_bytes)
        run.close()


@dataclass(slots=True)
class Process:
    """A process that trains in a group of its own. `close` ends it."""

    small: Small
    rates: Rates
    share: float | None
    """Part of the states' bytes for which its cap has room; None for no cap."""
    state_dir: str | None
    update: float = 0.0
    """Seconds of the host's work in the last step."""
    before: int = 0
    """Bytes that the process had before it had an optimizer."""
    cap: MemoryCap = field(default_factory=MemoryCap)
    _process: Any = None
    _there: Any = None

    def begin(self) -> None:
        """Start the process, and cap it once it has a model."""
        fresh = multiprocessing.get_context("spawn")
        self._there, its = fresh.Pipe()
        own = (its, self.small, self.rates, self.state_dir)
        self._process = fresh.Process(target=_train, args=own, daemon=True)
        self._process.start()
        its.close()
        self.cap.take(self._process.pid)
        self._there.send("in its group")
        self._hear()
        self.before = self.cap.used
        if self.share is not None:
            self.cap.limit(self.before + allowed(self.small, self.share))
        self._there.send("capped")

    def turn(self) -> float:
        """Return the mean seconds of a window's steps.

        Raises:
            EOFError: The system has killed the process.
        """
        self._there.send("turn")
        seconds, self.update = self._hear()
        return float(seconds)

    def planned(self) -> int:
        """Return the bytes of the host that the optimizer's plan counts; the process ends."""
        self._there.send("end")
        return int(self._hear())

    def _hear(self) -> Any:
        if not self._there.poll(_PATIENCE):
            raise TimeoutError(f"the process says nothing for {_PATIENCE:g} s")
        return self._there.recv()

    def close(self) -> None:
        """End the process."""
        self._there.close()
        self._process.join(_PATIENCE)
        self.cap.close()


def plan_of(small: Small) -> MemoryPlan:
    """Return the plan of the optimizer's memory, with states on a drive."""
    shapes = [(small.width, small.width)] * small.layers
    config = ZenFlowConfig(**KNOBS)
    with extents_of(EXTENT):
        return engine_memory(shapes, config, 2, on_drive=True).plan(has_ring=True)


def room_of_device(small: Small) -> int:
    """Return the bytes that would be on a GPU: the device's part of the plan, and a gradient."""
    plan = plan_of(small)
    return plan.device_extra_bytes + plan.device_ring_bytes + 2 * small.width**2


def allowed(small: Small, share: float) -> int:
    """Return the bytes that a cap leaves to the optimizer: a share of the states, and a device."""
    return int(room_of_device(small) + share * STATE_BYTES * small.num_params)


def is_killed(process: Process) -> bool:
    """Return whether the system kills a process in its first turn."""
    process.begin()
    try:
        process.turn()
    except (EOFError, ConnectionError):
        return True
    finally:
        process.close()
    return False


def measure(small: Small, rates: Rates, folder: Path, rounds: int) -> dict[str, Any]:
    """Return step times and memory of both processes, and whether the third one is killed."""
    with ExitStack() as ending:
        ending.enter_context(mock.patch.dict(os.environ, _GIVEN_BACK))
        state_dir = ending.enter_context(tempfile.TemporaryDirectory(dir=folder))
        on_drive = Process(small, rates, SHARE, state_dir)
        in_memory = Process(small, rates, None, None)
        for process in (on_drive, in_memory):
            process.begin()
            ending.callback(process.close)
        turns = {"in memory": in_memory.turn, "on a drive": on_drive.turn}
        taken = take_turns(turns, rounds, 1)
        alone = statistics.median(taken["in memory"])
        slower = [b / a for a, b in zip(*taken.values(), strict=True)]
        strategy = Strategy.of("zenflow", state_on_drive=True, **KNOBS)
        found = predicted(small, strategy, rates, alone=alone, update=in_memory.update)
        memory = {
            name: {
                "before": process.before,
                "at_most": process.cap.peak - process.before,
                "planned": process.planned(),
            }
            for name, process in (("in memory", in_memory), ("on a drive", on_drive))
        }
        killed = is_killed(Process(small, rates, SHARE, None))
    return {
        "params": small.num_params,
        "state_bytes": STATE_BYTES * small.num_params,
        "cap": allowed(small, SHARE),
        "device": room_of_device(small),
        "buffers": plan_of(small).buffer_bytes,
        "memory": memory,
        "step_seconds": {name: spread(own) for name, own in taken.items()},
        "slower": spread(slower),
        "predicted": {"slower": found.step_seconds / alone, "stalled": found.stall_fraction},
        "in_memory_under_the_cap_is_killed": killed,
    }


def table(found: dict[str, Any]) -> str:
    """Return the findings as text."""
    state, cap = found["state_bytes"], found["cap"]
    lines = [
        f"{found['params']:,} parameters, states of {state / 1e6:,.0f} MB",
        f"room for the optimizer under the cap: {cap / 1e6:,.0f} MB, {found['device'] / 1e6:,.0f} "
        "of them for the device's part",
    ]
    for name, own in found["memory"].items():
        step = found["step_seconds"][name]["median"]
        lines.append(
            f"{name:<12}{own['at_most'] / 1e6:>8,.0f} MB at most, {own['planned'] / 1e6:,.0f} "
            f"planned; {step:.2f} s a step"
        )
    low, middle, high = found["slower"]["quartiles"]
    told = found["predicted"]
    lines.append(
        f"a step takes {middle:.3f} times as long as in memory (quartiles {low:.3f} to "
        f"{high:.3f}); predicted {told['slower']:.3f}, stalled {told['stalled']:.1%}"
    )
    end = "is killed" if found["in_memory_under_the_cap_is_killed"] else "is NOT killed"
    lines.append(f"states in memory under the cap: the process {end}")
    word = "reached" if middle <= MOST_SLOWER else "NOT reached"
    lines.append(f"at most {MOST_SLOWER - 1:.0%} slower under the cap: {word}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="folder on a local drive")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file for the record")
    options = parser.parse_args()
    found = measure(SMALL, RATES, options.folder, options.rounds)
    print(table(found))
    if options.out is not None:
        facts = {"knobs": KNOBS, "read": RATES.read, "write": RATES.write}
        write_json(options.out, {**setting(**facts), **found})


if __name__ == "__main__":
    main()
