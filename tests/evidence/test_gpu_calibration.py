"""The recorded passes and runs of an H100 are told by a calibration that fits them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from experiments.output.provenance import RESULTS
from experiments.training.settings.training import TrainSettings
from sim.fitting.device import ComputeTimes, fit_device
from sim.fitting.refine import Observation, predict, refine
from sim.hardware.catalog import find_machine
from sim.hardware.quantity import Quantity
from sim.simulate import Strategy

RECORD = RESULTS / "2026-11-23_gpu-calibration_nvidia-h100-80gb-hbm3"
HOST_RATE = 132e9
"""Bytes/s of the host's update in that day's training runs on the machine. Its calibration timed
threads of Python, which the engine has none of."""


@pytest.fixture(scope="module")
def profile():
    return json.loads((RECORD / "calibration/profile.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def fitted(profile):
    found = []
    for row in profile["metadata"]["calibration"]["compute"]:
        model, batch, sequence = row["shape"].replace("x", " ").split()
        found.append(
            ComputeTimes(
                label=row["shape"],
                workload=workload(model, int(batch), int(sequence)),
                forward=row["forward_seconds"],
                backward=row["backward_seconds"],
            )
        )
    return fit_device(find_machine("hgx-h100", 1).device, found)


def workload(model, batch, sequence):
    settings = {"model": model, "batch_size": batch, "sequence": sequence}
    return TrainSettings(device="cpu", dtype="bfloat16", **settings).workload()


def observation(label, seconds):
    """Return a recorded run: its strategy, model, shape, knobs and mode, and seconds of a step."""
    strategy, model, shape, *others = label.split()
    batch, sequence = map(int, shape.split("x"))
    given = dict(word.split("=") for word in others if "=" in word)
    knobs = {}
    if strategy.startswith("zenflow"):
        # The default was a rule without fresh steps, whose traffic is the published one's.
        strategy = "zenflow_paper"
        knobs = {
            "topk_ratio": float(given["k"]),
            "update_interval": int(given["S"]),
            "select_interval": 0,
        }
    return Observation(
        label=label,
        workload=workload(model, batch, sequence),
        strategy=Strategy.of(strategy, releases="keep" not in others, **knobs),
        step_seconds=seconds,
        stall_seconds=None,
        busy_seconds={},
    )


def test_passes_are_told_by_launches_and_work(fitted):
    assert len(fitted.residuals) == 16
    assert fitted.median_error < 0.03
    assert fitted.worst_error < 0.15
    device = fitted.device
    assert 25e-6 < device.launch.value < 40e-6
    assert device.product_rate("bfloat16") < device.flops["bfloat16"].value
    assert device.bandwidth_efficiency.value <= 1.0


def test_steps_of_runs_that_calibrated_nothing_are_told(profile, fitted):
    """Before, the median error was 34.7%, and the largest 318%."""
    recorded = profile["link"]
    machine = find_machine("hgx-h100", 1).with_values(
        {f"link.{name}": recorded[name]["value"] for name in ("d2h", "h2d", "duplex")}
    )
    rate = Quantity(value=HOST_RATE)
    host = replace(machine.host, cores=16, sockets=1, dram=rate, adam_share=Quantity(value=1.0))
    machine = replace(machine, device=fitted.device, host=host, host_threads=12)
    runs = [
        observation(run["run"], run["step_seconds"])
        for run in profile["metadata"]["calibration"]["runs"]
    ]
    refined = refine(machine, runs).profile
    assert 0.5e-3 < refined.overheads.bucket.value < 1.2e-3
    rows = (RECORD / "validation/rows.jsonl").read_text(encoding="utf-8").splitlines()
    others = [
        observation(run["run"], run["measured"]["step_seconds"])
        for run in json.loads(rows[1])["runs"]
    ]
    assert len(others) == 13
    off = [abs(predict(refined, run).step_seconds / run.step_seconds - 1) for run in others]
    assert np.median(off) < 0.1
    assert max(off) < 0.35
