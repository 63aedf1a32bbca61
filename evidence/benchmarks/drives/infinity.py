"""Steps beside ZeRO-Infinity's: streamed weights, and states on a drive, under both rules.

    python -m evidence.benchmarks.drives.infinity [--folder DIR] [--out FILE]

Both runs are of this engine. `zero_infinity` passes over all states in each step, between backward
and the next forward: q = 1, without overlap. `zenflow` does so once in S = q = 4 steps, behind
compute. Link, drive and compute are slowed, see `small`, to the proportions of a model of 14B on
an RTX 4090 with a desktop's drive.

The runs take turns with a third one that waits for nothing. Each round's ratio of steps is beside
the simulator's, which is told how long a step of that third run took in the round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from evidence.benchmarks.drives.small import (
    SLOTS,
    Rates,
    Run,
    Small,
    extents_of,
    predicted,
    slowed_drive,
)
from evidence.benchmarks.record import setting, spread, take_turns
from experiments.output.files import write_json
from sim.schedules.streams import Streams
from sim.simulate import Strategy
from zenflow import ZenFlowConfig

LIKE: dict[str, Any] = {
    "model": "qwen3-14b", "machine": "rtx4090-desktop", "tokens": 8192, "params": 14.77e9,
    "compute": 7.7, "link": 22e9,
}  # fmt: skip
"""Step that is imitated: seconds of its compute with all layers recomputed, bytes per second of
its link."""
DRIVES = {"flash (7 and 1.5 GB/s)": (7e9, 1.5e9), "cache (7 and 5 GB/s)": (7e9, 5e9)}
"""Bytes per second that a desktop's drive reads and writes, behind its cache and in it."""
SHORTER = 20
"""Number of times by which all seconds are shorter than those of the step that is imitated."""
LAYERS, WIDTH = 16, 1024
EXTENT = 1 << 16
"""Elements of an extent, so that all buffers have a small share of the states."""
ROUNDS, STEPS = 5, 4
ZENFLOW: dict[str, Any] = {"topk_ratio": 0.0, "update_interval": 4, "queue_depth": 4}


def imitation(drive: tuple[float, float], shorter: float = SHORTER) -> tuple[Small, Rates]:
    """Return the small model and the machine on which its step has the imitated proportions."""
    small = Small(layers=LAYERS, width=WIDTH, seconds=LIKE["compute"] / shorter / (3 * LAYERS))
    share = shorter * small.num_params / LIKE["params"]
    read, write = (share * rate for rate in drive)
    return small, Rates(read=read, write=write, link=share * LIKE["link"])


def strategies() -> dict[str, Strategy]:
    """Return both strategies, as the simulator is told of them."""
    streams = Streams(slots=SLOTS)
    return {
        "zero_infinity": Strategy.of("zero_infinity", streams=streams),
        "zenflow": Strategy.of("zenflow", streams=streams, state_on_drive=True, **ZENFLOW),
    }


def _config(name: str) -> ZenFlowConfig:
    """Return the update rule of a strategy."""
    config = strategies()[name].config
    assert config is not None
    return config


def measure(small: Small, rates: Rates, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the steps of both strategies, measured and predicted."""
    with ExitStack() as ending:
        for context in (extents_of(EXTENT), slowed_drive(rates)):
            ending.enter_context(context)
        runs = {}
        for name in strategies():
            state_dir = ending.enter_context(tempfile.TemporaryDirectory(dir=folder))
            run = Run(small, _config(name), state_dir=state_dir, link=rates.link, streams=True)
            runs[name] = ending.enter_context(closing(run))
        config = _config("zenflow")
        runs["alone"] = ending.enter_context(closing(Run(small, config, streams=True)))
        turns = {name: partial(run.turn, STEPS) for name, run in runs.items()}
        taken = take_turns(turns, rounds, 1)
        alone, update = taken.pop("alone"), _update_seconds(small)
        told = {
            name: [predicted(small, strategy, rates, alone=own, update=update) for own in alone]
            for name, strategy in strategies().items()
        }
    seconds = {name: [one.step_seconds for one in found] for name, found in told.items()}
    return {
        "step_seconds": {name: spread(own) for name, own in taken.items()},
        "speed_up": spread(_ratios(taken)),
        "alone": spread(alone),
        "update": update,
        "predicted": {
            "step_seconds": {name: spread(own) for name, own in seconds.items()},
            "stalled": {
                name: statistics.median(one.stall_fraction for one in found)
                for name, found in told.items()
            },
            "speed_up": spread(_ratios(seconds)),
        },
    }


def _ratios(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    """Return each round's speed-up of `zenflow`."""
    pairs = zip(seconds["zero_infinity"], seconds["zenflow"], strict=True)
    return [slow / fast for slow, fast in pairs]


def _update_seconds(small: Small) -> float:
    """Return the seconds of the host's pass over all states, in memory, for one gradient."""
    with closing(Run(small, _config("zero_infinity"))) as run:
        run.turn(STEPS)
        return run.update_seconds()


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [f"{'drive':<24}{'run':<16}{'step':>9}{'predicted':>11}{'stalled':>9}"]
    for drive, row in rows.items():
        told = row["predicted"]
        for name, own in row["step_seconds"].items():
            lines.append(
                f"{drive:<24}{name:<16}{own['median']:>7.2f} s"
                f"{told['step_seconds'][name]['median']:>9.2f} s"
                f"{told['stalled'][name]:>9.0%}"
            )
        said = [
            "{1:.2f} times as fast (quartiles {0:.2f} to {2:.2f})".format(*found["quartiles"])
            for found in (row["speed_up"], told["speed_up"])
        ]
        lines.append(f"{drive:<24}zenflow is {said[0]}, predicted {said[1]}")
    return "\n".join(lines)


def main() -> None:
    """Measure both drives, print a table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="folder on a local drive")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file for the record")
    options = parser.parse_args()
    rows = {
        name: measure(*imitation(drive), options.folder, options.rounds)
        for name, drive in DRIVES.items()
    }
    print(table(rows))
    if options.out is not None:
        facts = {"like": LIKE, "shorter": SHORTER, "layers": LAYERS, "width": WIDTH}
        write_json(options.out, {**setting(**facts), "rows": rows})


if __name__ == "__main__":
    main()
