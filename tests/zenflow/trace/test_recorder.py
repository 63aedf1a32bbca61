"""The recorder: spans of the last steps, whatever order lanes leave them in."""

from __future__ import annotations

from zenflow.trace.recorder import Recorder


def steps_kept(recorder):
    return [span.step for span in recorder.timeline({}).spans]


def test_it_keeps_the_last_steps_alone():
    recorder = Recorder(3, float)
    for step in range(1, 8):
        recorder.add("device", "step", float(step), step + 0.5, step)
        recorder.forget_before(step)
    assert steps_kept(recorder) == [5, 6, 7]


def test_what_a_lane_was_late_with_goes_too():
    recorder = Recorder(2, float)
    recorder.add("device", "step", 4.0, 4.5, 4)
    recorder.add("host", "adam", 1.0, 4.2, 1)  # of an early step, and done late
    recorder.add("device", "step", 5.0, 5.5, 5)
    recorder.forget_before(5)
    assert steps_kept(recorder) == [4, 5]


def test_without_steps_to_keep_it_keeps_none():
    recorder = Recorder(0, float)
    recorder.add("device", "step", 0.0, 1.0, 1)
    recorder.forget_before(1)
    assert steps_kept(recorder) == []
