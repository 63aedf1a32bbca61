"""What every strategy does when, in a model of two layers: event logs to be read.

A layer takes 1 s of forward and 2 s of backward. Its gradients or weights take 1 s to copy in 16
bits, its CPU update 2.8 s: 0.1 s for each of the 28 bytes that an element moves. The device would
update it in 1 s. Of elementwise operations it does 20 bytes an element in 1 s: it measures the
rows of a layer's gradients in 0.1 s, moves its weights by them in 0.7 s, and updates it with 8-bit
moments in 0.5 s: gradient 2, weight twice 2, moments and scales twice 2.03 bytes. The drives read
or write a layer's state in 4 s; a ring of two devices reduces or gathers it in 1 s.

`golden/NAME.txt` has the logs of a strategy, parted by empty lines. Each begins with comments and
its case. A line is start and end in seconds from the end of the step before, lane, name, and the
step that caused it.

    python -m tests.sim.test_golden --write

writes the lines of every case anew, and those of a case without lines: read the difference.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sim.hardware.components import Fabric, Nvme
from sim.hardware.quantity import Quantity
from sim.machine import Machine
from sim.schedules.parallel import ddp
from sim.simulate import STRATEGIES, Strategy
from sim.timing.phases import costs_of_phases

PARAMS = 20_000
GOLDEN = Path(__file__).parent / "golden"
LANES = ("device", "fabric", "d2h", "h2d", "host", "main", "nvme read", "nvme write", "drive")


def two_layers(devices=1, accumulation=1):
    found = costs_of_phases(
        forward=2.0, backward=4.0, d2h=2.0, update=5.6, h2d=2.0, num_params=PARAMS, num_layers=2
    )
    hardware = replace(
        found.hardware.with_values(
            {"overheads.device_update": PARAMS / 2.0, "device.bandwidth": 20.0 * PARAMS / 2}
        ),
        num_devices=devices,
        fabric=Fabric(name="ring", bandwidth=figure(PARAMS / 2), latency=figure(1e-12)),
        nvme=Nvme(
            name="drives",
            read=figure(12 * PARAMS / 8.0),
            write=figure(12 * PARAMS / 8.0),
            capacity=figure(1e12),
        ),
    )
    return replace(found, hardware=hardware, intake_factor=1.0, accumulation=accumulation)


def figure(value):
    return Quantity(value=value)


def log(strategy, first, last, devices=1, accumulation=1):
    """Return what begins in these steps, a line each."""
    costs = two_layers(devices, accumulation)
    machine = Machine(costs.hardware)
    schedule = strategy.schedule(machine, costs)
    machine.run(schedule.run(last + 1))
    start = schedule.step_ends[first - 2] if first > 1 else 0.0
    length = schedule.step_ends[last - 1] - start
    rows = [
        (round(span.start - start, 6) + 0.0, LANES.index(span.lane), span)
        for span in machine.recording.timeline({}).spans
        if span.seconds > 1e-6
    ]
    return "\n".join(
        f"{begin:5.1f}-{span.end - start:5.1f} {span.lane} {span.name} {span.step}"
        for begin, _, span in sorted(rows, key=lambda row: (row[0], row[1], row[2].name))
        if 0 <= begin < round(length, 6)
    )


HALF_DEFERRED = {
    "topk_ratio": 0.5,
    "update_interval": 2,
    "select_interval": 0,
    "min_split_elements": 0,
    "block_elements": PARAMS,
}


def cases():
    """Return what each log shows, its case and its lines, by strategy."""
    found = {}
    for path in sorted(GOLDEN.glob("*.txt")):
        for part in path.read_text(encoding="utf-8").strip("\n").split("\n\n"):
            lines = part.split("\n")
            at = next(place for place, line in enumerate(lines) if line.startswith("{"))
            case = (lines[:at], lines[at], lines[at + 1 :])
            found.setdefault(path.stem, []).append(case)
    return found


def lines_of(name, case):
    """Return the log of a case as lines."""
    case = json.loads(case)
    options = {**(HALF_DEFERRED if case.get("half_deferred") else {}), **case.get("options", {})}
    with pytest.MonkeyPatch.context() as patched:
        if size := case.get("bucket_bytes"):
            patched.setattr(ddp, "FIRST_BUCKET_BYTES", size)
            patched.setattr(ddp, "BUCKET_BYTES", size)
        return log(
            Strategy.of(name, **options), *case["steps"],
            case.get("devices", 1), case.get("accumulation", 1),
        ).splitlines()  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case", "expected"),
    [(name, case, lines) for name, logs in cases().items() for _, case, lines in logs],
)
def test_what_happens_when(name, case, expected):
    assert lines_of(name, case) == expected


def test_every_strategy_has_a_log():
    assert set(cases()) == set(STRATEGIES)


def write():
    """Write every log anew."""
    if os.environ.get("CI"):
        sys.exit("golden logs are written by people, who read what changed: not where CI is set")
    for name, logs in cases().items():
        parts = ["\n".join([*about, case, *lines_of(name, case)]) for about, case, _ in logs]
        (GOLDEN / f"{name}.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("give --write to write the golden logs anew")
    write()
