"""Gathering: which steps make a stretch, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.online.stretches import StretchGatherer, settling_steps, stretch_steps
from tests.zenflow.step.test_reporter import a_report
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs
from zenflow.trace.timeline import Span, Timeline

KNOBS = Knobs.of(ZenFlowConfig())


def report(step, seconds=1.0, *, select=0.0, captured=0.25, curve=None):
    return a_report(
        step=step,
        seconds=seconds + select,
        stall_seconds=0.1 + select,
        stalls={"host": 0.1, "select": select},
        captured_energy=captured,
        energy_curve=curve,
    )


def filled(gatherer, knobs=KNOBS, first=1, **others):
    step = first
    while not gatherer.is_complete(knobs):
        gatherer.take(report(step, **others))
        step += 1
    return step - 1


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 8, 16])
def test_a_stretch_is_whole_windows_at_least_three_and_twelve_steps(interval):
    steps = stretch_steps(replace(KNOBS, update_interval=interval))
    assert steps % interval == 0
    assert steps >= max(12, 3 * interval)


def test_steps_in_which_queues_fill_are_left_out():
    gatherer = StretchGatherer(KNOBS)
    last = filled(gatherer)
    assert last == settling_steps(KNOBS) + stretch_steps(KNOBS)


@pytest.mark.parametrize(("every", "is_starved"), [(3, False), (1, True), (0, False)])
def test_a_stretch_is_starved_where_the_device_ran_dry_in_most_steps(every, is_starved):
    gatherer = StretchGatherer(KNOBS)
    step = 0
    while not gatherer.is_complete(KNOBS):
        step += 1
        dry = int(every > 0 and step % every == 0)
        gatherer.take(replace(report(step), starved=dry))
    stretch, _ = gatherer.finish(step, KNOBS, sees_spans=False)
    assert stretch.is_starved == is_starved


def test_selections_and_their_stalls_are_taken_out():
    gatherer = StretchGatherer(KNOBS)
    for step in range(1, 13):
        gatherer.take(report(step, select=5.0 if step == 10 else 0.0))
    last = filled(gatherer, first=13)
    stretch, curve = gatherer.finish(last, KNOBS, sees_spans=False)
    assert stretch.step_seconds == pytest.approx(1.0)
    assert stretch.stall_seconds == pytest.approx(0.1)
    assert stretch.rho == pytest.approx(0.75)
    assert stretch.busy_seconds == {}
    assert curve is None


def test_the_last_curve_and_whole_recorded_steps_count():
    gatherer = StretchGatherer(KNOBS)
    spans = [
        Span("device", name, s + start, s + end, s)
        for s in range(5, 19)
        for name, start, end in (
            ("backward", 0.0, 0.25), ("step", 0.25, 0.5), ("stall:select", 0.3, 0.4),
        )
    ]  # fmt: skip
    gatherer.attach(type("Observed", (), {"timeline": Timeline(tuple(spans))})())
    last = filled(gatherer, curve={0.1: 0.4})
    stretch, curve = gatherer.finish(last, KNOBS, sees_spans=True)
    assert stretch.busy_seconds == pytest.approx({"device": 0.25, "step": 0.15})
    assert curve.captured(0.1) == pytest.approx(0.4)


def test_a_change_of_k_is_timed_and_starts_the_stretch_anew():
    gatherer = StretchGatherer(KNOBS)
    filled(gatherer)
    other = replace(KNOBS, topk_ratio=0.3)
    gatherer.restart(KNOBS, other)
    assert not gatherer.is_complete(other)
    assert gatherer.resize_seconds is None
    gatherer.take(report(20, select=3.0))
    assert gatherer.resize_seconds == 3.0
    filled(gatherer, other, first=21)
    stretch, _ = gatherer.finish(60, other, sees_spans=False)
    assert stretch.knobs == other
    assert gatherer.resize_seconds == 3.0


@pytest.mark.parametrize("interval", [1, 4, 32])
def test_after_a_shift_a_window_of_the_new_steps_is_a_stretch(interval):
    knobs = replace(KNOBS, update_interval=interval)
    gatherer = StretchGatherer(knobs)
    last = filled(gatherer, knobs)
    gatherer.finish(last, knobs, sees_spans=False)
    for step in range(last + 1, last + 5):
        gatherer.take(report(step))
    end = filled(gatherer, knobs, first=last + 5, seconds=2.0)
    assert end - last - 4 == min(stretch_steps(knobs), interval * max(1, 12 // interval) + 1)
    stretch, _ = gatherer.finish(end, knobs, sees_spans=False)
    assert stretch.step_seconds == pytest.approx(2.0)
    assert stretch.before_shift == pytest.approx(1.0)


def test_a_hopeless_trial_ends_after_a_window():
    knobs = replace(KNOBS, update_interval=16)
    gatherer = StretchGatherer(knobs)
    for step in range(1, settling_steps(knobs) + 18):
        assert not gatherer.is_complete(knobs, hopeless=0.9)
        gatherer.take(report(step))
    assert gatherer.is_complete(knobs, hopeless=0.9)
    assert not gatherer.is_complete(knobs, hopeless=1.1)
