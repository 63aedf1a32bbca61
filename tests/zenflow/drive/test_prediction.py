"""Measured steps with states on an emulated drive, beside the simulator's."""

import statistics
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from sim.hardware.components import Nvme
from sim.hardware.quantity import Quantity
from sim.schedules.streams import Streams
from sim.simulate import Strategy, simulate
from sim.timing import block_plan, drive_memory
from sim.timing.phases import costs_of_phases
from tests.models import closing
from tests.zenflow.drive.test_lane import settle
from tests.zenflow.streaming.test_prediction import Layer
from zenflow import ZenFlowAdamW, ZenFlowConfig, stream_weights
from zenflow.drive import disk, extents
from zenflow.lanes.copies import PacedDirection
from zenflow.presets import PRESET_CHANGES

LAYERS, WIDTH, WINDOW = 8, 256, 4
EXTENT = 1 << 14
"""Elements of an extent: four of each layer."""
PARAMS = LAYERS * WIDTH * WIDTH


class EmulatedDrive:
    """A drive in memory; reads and writes under way share its bandwidth."""

    def __init__(self, monkeypatch, read, write):
        self._places = {}
        self._ways = {"read": PacedDirection(read), "write": PacedDirection(write)}
        monkeypatch.setattr(disk, "read", self._read)
        monkeypatch.setattr(disk, "write", self._write)

    def _read(self, file, memory, offset):
        with self._ways["read"].carrying(memory.nbytes):
            memory[:] = self._places[offset][: memory.nbytes]

    def _write(self, file, memory, offset):
        with self._ways["write"].carrying(memory.nbytes):
            self._places[offset] = memory.copy()


@pytest.fixture(autouse=True)
def small_extents(monkeypatch):
    block_plan._host_memory.cache_clear()
    for module in (extents, drive_memory):
        monkeypatch.setattr(module, "EXTENT_ELEMENTS", EXTENT)
    yield
    block_plan._host_memory.cache_clear()


def config_of(changes):
    rule = {"topk_ratio": 0, "update_interval": WINDOW, "queue_depth": WINDOW, **changes}
    rule.pop("streams", None)
    return ZenFlowConfig(**rule)


class Run:
    """A run whose compute takes a known time."""

    def __init__(self, seconds, changes, state_dir):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Layer(seconds) for _ in range(LAYERS)))
        self.stream = None
        if (streams := changes.get("streams")) is not None:
            self.stream = stream_weights(
                self.model, "cpu", layers=list(self.model), slots=streams.slots
            )
        config = config_of(changes)
        self.num_steps = config.update_interval
        self.optimizer = ZenFlowAdamW(
            self.model.parameters(), lr=1e-4, config=config, host_threads=1,
            offload_gradients="release", state_dir=state_dir,
        )  # fmt: skip

    def turn(self):
        """Return the mean seconds of the steps of some windows, behind a first one."""
        self.window()
        return statistics.mean(self.window() for _ in range(3))

    def window(self):
        """Return the mean seconds of a window's steps."""
        started = time.perf_counter()
        for _ in range(self.num_steps):
            x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
            self.model(x).float().square().mean().backward()
            self.optimizer.step()
        return (time.perf_counter() - started) / self.num_steps

    def close(self):
        self.optimizer.close()
        if self.stream is not None:
            self.stream.close()


def predicted(alone, seconds, read, write, changes):
    """Return the prediction where a step in memory takes so long."""
    forward = LAYERS * seconds
    costs = costs_of_phases(
        forward=forward, backward=alone - forward, d2h=1e-4, update=1e-3, h2d=1e-4,
        num_params=PARAMS, num_layers=LAYERS,
    )  # fmt: skip
    rates = {"read": Quantity(value=read), "write": Quantity(value=write)}
    hardware = replace(
        costs.hardware, nvme=Nvme(name="emulated", **rates, capacity=Quantity(value=1e12))
    )
    streams = changes.get("streams")
    if streams is not None:  # where a CPU plays the device, no work is launched ahead
        device, host = replace(hardware.device, is_cpu=True), replace(hardware.host, cores=64)
        hardware = replace(hardware, device=device, host=host)
    strategy = Strategy(
        name="zenflow", config=config_of(changes), state_on_drive=True, streams=streams
    )
    return simulate(replace(costs, hardware=hardware), strategy)


BYTES = 12 * PARAMS
CASES = {
    "hidden": (0.016, BYTES / 0.4, BYTES / 0.4, {}),
    "bound by writes": (0.008, BYTES / 0.4, BYTES / 1.6, {}),
    "bound by reads": (0.008, BYTES / 1.6, BYTES / 0.4, {}),
    "two passes of a window": (0.008, BYTES / 0.8, BYTES / 0.8, {"queue_depth": 2}),
    "compact": (0.008, BYTES / 3.2, BYTES / 3.2, {"host_state": "compact"}),
    # Settings that the simulator was not fitted to.
    "queue shorter than a window, by reads": (
        *(0.008, BYTES / 0.9, BYTES / 0.3),
        {"update_interval": 6, "queue_depth": 3},
    ),
    "a pass in each step, both ways slow": (
        *(0.016, BYTES / 1.0, BYTES / 1.2),
        {"update_interval": 2, "queue_depth": 1},
    ),
    "compact, two passes of a window": (
        *(0.008, BYTES / 3.0, BYTES / 2.4),
        {"host_state": "compact", "queue_depth": 2},
    ),
    "two slots of streams": (
        *(0.008, BYTES / 0.8, BYTES / 1.2),
        {"streams": Streams(slots=2)},
    ),
    "zero_infinity": (
        *(0.008, BYTES / 0.2, BYTES / 0.3),
        {"streams": Streams(slots=2), **PRESET_CHANGES["zero_infinity"]},
    ),
}
"""Seconds of a layer's forward, bytes per second each way, and settings."""
GAPS = {"queue shorter than a window, by reads": 0.02}
"""Relative difference of bytes, where the pool of gradients has gaps that the simulator lacks."""


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_window_are_those_predicted(name, state_dir, monkeypatch):
    *_, changes = CASES[name]
    EmulatedDrive(monkeypatch, 1e12, 1e12)
    prediction = predicted(1e-2, 1e-3, 1e9, 1e9, changes)
    run = Run(0.0, changes, state_dir)
    with closing(run):
        for _ in range(3):
            run.window()
        before = settle(run.optimizer)
        for _ in range(2):
            run.window()
        moved = [now - then for now, then in zip(settle(run.optimizer), before, strict=True)]
    found = prediction.drive_read_bytes, prediction.drive_written_bytes
    assert [size / (2 * run.num_steps) for size in moved] == pytest.approx(
        found, rel=GAPS.get(name, 1e-9)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_as_long_as_predicted(name, state_dir, monkeypatch):
    """Runs take turns, as a busy machine's speed drifts. Each turn's first window catches up."""
    seconds, read, write, changes = CASES[name]
    EmulatedDrive(monkeypatch, read, write)
    on_drive, in_memory = Run(seconds, changes, state_dir), Run(seconds, changes, None)
    with closing(on_drive), closing(in_memory):
        for _ in range(4):
            alone, step = in_memory.turn(), on_drive.turn()
            prediction = predicted(alone, seconds, read, write, changes)
            is_close = step == pytest.approx(prediction.step_seconds, rel=0.05)
            if is_close and (name != "hidden" or step < 1.05 * alone):
                break
        else:
            pytest.fail(f"a step takes {step} s, predicted are {prediction.step_seconds} s")
    assert (prediction.stall_fraction < 0.02) == (name == "hidden")
