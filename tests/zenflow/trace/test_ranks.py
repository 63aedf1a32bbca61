"""Timelines of several ranks in one trace."""

import json

from zenflow.trace.ranks import STARTED, write_ranks
from zenflow.trace.timeline import Span, Timeline


def timeline(started, start):
    spans = (
        Span("device", "forward", start, start + 1.0, 1),
        Span("d2h", "grads", start + 0.5, start + 2.0, 1, num_bytes=10),
    )
    return Timeline(spans, {"source": "measured", "device": "cpu", STARTED: started})


def test_ranks_have_processes_of_their_own_on_the_first_ones_clock(tmp_path):
    # The second rank began its clock 5 s later, so 0.25 s there is 5.25 s here.
    ranks = [timeline(100.0, 3.0), timeline(105.0, 0.25), timeline(99.0, 4.0)]
    write_ranks(ranks, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    forwards = [event for event in events if event["name"] == "forward"]
    assert [event["ts"] for event in forwards] == [3.0e6, 5.25e6, 3.0e6]
    assert len({event["pid"] for event in forwards}) == 3
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(processes) == [0, 1, 2, 3, 4, 5]
    assert [processes[event["pid"]] for event in forwards] == [f"rank {n}: cpu" for n in range(3)]


def test_a_step_of_a_rank_launches_its_own_kernels(tmp_path):
    write_ranks([timeline(0.0, 1.0), timeline(0.0, 1.0)], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    of_step = {
        event["args"]["correlation"]: event["pid"] // 2
        for event in events
        if event["name"] == "ProfilerStep#1"
    }
    assert sorted(of_step.values()) == [0, 1]
    for event in events:
        if event["ph"] == "X" and "stream" in event["args"]:
            assert of_step[event["args"]["correlation"]] == event["pid"] // 2
            assert event["args"]["device"] == event["pid"]


def test_the_first_ranks_timeline_is_read_back_and_one_rank_is_written_as_ever(tmp_path):
    first = timeline(7.0, 2.0)
    write_ranks([first, timeline(8.0, 2.0)], tmp_path / "two.json")
    assert Timeline.read(tmp_path / "two.json") == first
    write_ranks([first], tmp_path / "one.json")
    first.write(tmp_path / "own.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "own.json").read_bytes()
