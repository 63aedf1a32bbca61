"""Refinement finds constants that it can know, and leaves the others at their probes' values."""

import math
from dataclasses import replace

import numpy as np
import pytest

from sim.fitting.marquardt import _better
from sim.fitting.refine import Observation, on_link, predict, refine
from sim.hardware.catalog import find_machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy
from sim.steady import steady
from sim.timing.costs import costs_of

# Launches that bind the device would hide what the update takes.
FIGURES = {
    "overheads.device_update": 4e10,
    "overheads.bucket": 1e-6,
    "device.launch": 5e-6,
    "device.backward_launch": 5e-6,
}
TRUTH = replace(find_machine("dgx-a100-80", 1).with_values(FIGURES), host_threads=8)
NAMES = ("host.core_bandwidth", "overheads.step", "overheads.device_update")


def observation(strategy, batch, link=None, **knobs):
    workload = Workload.of_config(*find_model("gpt2"), batch_size=batch, sequence=512)
    chosen = Strategy.of(strategy, **knobs)
    seen = steady(costs_of(workload, on_link(TRUTH, link)), chosen)
    return Observation(
        label=f"{strategy} {batch}",
        workload=workload,
        strategy=chosen,
        step_seconds=seen.step_seconds,
        stall_seconds=seen.stall_seconds,
        busy_seconds=seen.busy_seconds,
        link=link,
    )


RUNS = [
    observation("on_device", 4),
    observation("zero_offload", 2),
    observation("zero_offload", 4),
    observation("zenflow", 1, select_interval=0),
    observation("delayed", 1),
]


def test_hidden_constants_are_found_again():
    wrong = TRUTH.with_values(
        {
            "host.core_bandwidth": TRUTH.host.core_bandwidth.value * 0.6,
            "overheads.device_update": 4e10 * 1.3,
        }
    )
    found = refine(wrong, RUNS, names=NAMES)
    assert found.before > 0.05
    assert found.after < 0.02
    assert all(abs(error) < 0.03 for error in found.residuals.values())
    assert found.factors["host.core_bandwidth"] == pytest.approx(1 / 0.6, rel=0.1)
    assert 1 / 1.3 < found.factors["overheads.device_update"] < 1.0  # its probe counts for more


def test_what_is_at_its_bound_holds_up_nothing_else():
    """Together the first would go to -0.25 and the second to 0.3; alone that is best at 0.2."""
    slopes = np.array([[1.0, 0.5], [0.0, 1.0]])

    def errors(at):
        return np.array([0.1, -0.3]) + slopes @ at

    start, low, high = np.zeros(2), np.array([0.0, -9.0]), np.array([9.0, 9.0])
    moved, off = _better(errors, start, errors(start), slopes, low, high)
    assert moved == pytest.approx([0.0, 0.2], abs=0.01)
    assert off == pytest.approx(errors(moved))


def test_passes_tell_what_a_constant_costs_where():
    """A step too short by one constant is as long again with another; its passes are not."""
    cpu = replace(TRUTH, device=replace(TRUTH.device, is_cpu=True))
    truth = cpu.with_values({"overheads.bucket": 2e-4, "overheads.step": 2e-3})
    names = ("overheads.bucket", "overheads.step")
    seen = predict(truth, RUNS[3])
    run = replace(
        RUNS[3],
        step_seconds=seen.step_seconds,
        stall_seconds=seen.stall_seconds,
        busy_seconds={},
        passes=seen.passes,
    )
    wrong = truth.with_values({"overheads.bucket": 1e-4, "overheads.step": 3e-3})
    blind, told = (
        refine(wrong, [replace(run, passes=passes)], names=names).profile.overheads
        for passes in ({}, run.passes)
    )
    assert told.bucket.value == pytest.approx(2e-4, rel=0.1)
    assert told.step.value == pytest.approx(2e-3, rel=0.2)
    assert abs(blind.bucket.value - 2e-4) > 2 * abs(told.bucket.value - 2e-4)


def test_errors_of_passes_do_not_make_up_for_one_another():
    seen = predict(TRUTH, RUNS[3])
    known = {"step_seconds": seen.step_seconds, "stall_seconds": seen.stall_seconds}
    run = replace(RUNS[3], **known, busy_seconds={}, passes=seen.passes)
    more = 0.1 * seen.step_seconds
    signs = {"forward": more, "backward": -more}
    shifted = {name: seconds + signs[name] for name, seconds in seen.passes.items()}
    right, wrong = (
        refine(TRUTH, [replace(run, passes=passes)], names=("overheads.step",))
        for passes in (seen.passes, shifted)
    )
    assert right.before == pytest.approx(0.0, abs=1e-9)
    assert wrong.before > 0.04


def test_python_between_launches_is_found_in_steps_that_it_bounds():
    """The device's spans then last as long as launching, and tell nothing of the device."""
    truth = TRUTH.with_values({"overheads.bucket": 4e-3})
    seen = predict(truth, RUNS[3])
    launching, forward = seen.busy_seconds["launch"], seen.passes["forward"]
    assert launching > 1.5 * seen.busy_seconds["device"]
    run = replace(
        RUNS[3],
        step_seconds=seen.step_seconds,
        stall_seconds=seen.stall_seconds,
        busy_seconds={"device": launching},
        passes={"forward": forward, "backward": launching - forward},
    )
    found = refine(TRUTH.with_values({"overheads.bucket": 1e-3}), [run])
    assert found.factors["overheads.bucket"] == pytest.approx(4.0, rel=0.05)
    for name in ("overheads.column_update", "overheads.device_update", "overheads.pack_bandwidth"):
        assert found.factors.get(name, 1.0) == pytest.approx(1.0, abs=0.05)


def test_runs_that_are_told_already_move_nothing():
    found = refine(TRUTH, RUNS, names=NAMES)
    assert found.after == pytest.approx(0.0, abs=1e-9)
    assert found.factors == pytest.approx(dict.fromkeys(NAMES, 1.0))
    assert found.profile == TRUTH


def test_a_constant_that_no_run_depends_on_stays_and_is_not_sensitive():
    only_device = [RUNS[0]]
    wrong = TRUTH.with_values({"host.core_bandwidth": 1e9})
    found = refine(wrong, only_device, names=NAMES)
    assert found.factors["host.core_bandwidth"] == 1.0
    assert found.sensitivity["host.core_bandwidth"] < 1e-4
    assert found.sensitivity["overheads.device_update"] > 1e-3


def test_an_emulated_link_takes_the_profiles_place():
    link = (3e9, 5e9)
    seen = observation("zero_offload", 1, link=link)
    assert predict(TRUTH, seen).step_seconds == seen.step_seconds
    other = replace(seen, link=None)
    assert predict(TRUTH, other).step_seconds < 0.7 * seen.step_seconds
    assert math.isclose(on_link(TRUTH, link).link.h2d.value, 5e9)
