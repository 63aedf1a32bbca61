import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zenflow import LANES, Span, Timeline, compare

times = st.integers(0, 40)  # whole seconds: sums are exact, touching spans are common


@st.composite
def spans(draw, lanes=LANES):
    start, end = sorted((draw(times), draw(times)))
    lane = draw(st.sampled_from(lanes))
    name = draw(st.sampled_from(["forward", "adam", "stall:host"]))
    return Span(lane, name, float(start), float(end), draw(st.integers(1, 5)), draw(times))


timelines = st.lists(spans(), max_size=12).map(lambda drawn: Timeline(tuple(drawn)))


def seconds_by_counting(timeline, condition):
    """Return the number of whole seconds for which the condition on a moment holds."""
    first, last = int(timeline.start), int(timeline.end)
    return sum(condition(second + 0.5) for second in range(first, last))


def works(timeline, lane, moment):
    here = [s for s in timeline.spans if s.lane == lane and s.start < moment < s.end]
    return bool(here) and not any(span.is_stall for span in here)


@given(timelines, st.sampled_from(LANES), st.sampled_from(LANES))
def test_busy_idle_and_overlap_are_what_counting_seconds_gives(timeline, one, other):
    busy = seconds_by_counting(timeline, lambda moment: works(timeline, one, moment))
    both = seconds_by_counting(
        timeline, lambda moment: works(timeline, one, moment) and works(timeline, other, moment)
    )
    assert timeline.busy(one) == busy
    assert timeline.idle(one) == timeline.makespan - busy
    assert timeline.overlap(one, other) == timeline.overlap(other, one) == both


@given(timelines, times)
def test_cutting_in_two_loses_no_work(timeline, moment):
    parts = timeline.between(-math.inf, moment), timeline.between(moment, math.inf)
    for lane in LANES:
        assert sum(part.busy(lane) for part in parts) == timeline.busy(lane)
    waited = [part.stalls() for part in parts]
    assert sum(part.get("host", 0) for part in waited) == timeline.stalls().get("host", 0)


@given(timelines)
def test_steps_share_the_spans_out(timeline):
    shares = [timeline.steps(step, step).spans for step in range(1, 6)]
    assert sorted(sum(shares, ()), key=repr) == sorted(timeline.spans, key=repr)
    assert timeline.steps(1, 5) == timeline


@given(timelines)
def test_an_exported_trace_reads_back_the_same(timeline):
    exported = json.loads(json.dumps(timeline.to_chrome_trace()))
    assert Timeline.from_chrome_trace(exported) == timeline


@given(timelines)
def test_events_of_one_thread_do_not_overlap(timeline):
    by_thread = {}
    for event in timeline.to_chrome_trace()["traceEvents"]:
        if event["ph"] == "X" and "ProfilerStep" not in event["name"] and event["dur"]:
            ends = (event["ts"], event["ts"] + event["dur"])
            by_thread.setdefault((event["pid"], event["tid"]), []).append(ends)
    for events in by_thread.values():
        events.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(events))


def two_steps():
    """Return two steps, of which the first waits 0.15 s for the host amid its own work."""
    return Timeline(
        [
            Span("device", "forward", 0.1, 0.4, 1),
            Span("device", "backward", 0.4, 0.8, 1),
            Span("d2h", "grads", 0.5, 0.9, 1, 800_000_000),
            Span("device", "step", 0.8, 1.1, 1),
            Span("device", "stall:host", 0.85, 1.0, 1),
            Span("host", "adam", 0.9, 1.3, 1),
            Span("device", "forward", 1.1, 1.4, 2),
            Span("h2d", "params", 1.2, 1.6, 2, 400_000_000),
            Span("nvme", "read", 1.2, 1.3, 2),
        ],
        {"source": "measured", "device": "cpu", "emulated_link": True},
    )


def test_a_wait_inside_a_step_is_not_work():
    timeline = two_steps()
    assert timeline.busy("device") == pytest.approx(1.15)
    assert timeline.stalls() == {"host": pytest.approx(0.15)}
    assert timeline.num_bytes("d2h") == 800_000_000
    assert timeline.lanes == ("device", "d2h", "h2d", "host", "nvme")


def test_bytes_are_cut_with_their_span():
    assert two_steps().between(0.5, 0.6).num_bytes("d2h") == 200_000_000


def test_kineto_readers_find_what_they_look_for():
    trace = two_steps().to_chrome_trace()
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert trace["schemaVersion"] == 1
    assert trace["distributedInfo"]["rank"] == 0
    copies = [event for event in events if event["cat"] == "gpu_memcpy"]
    assert [event["name"][:11] for event in copies] == ["Memcpy DtoH", "Memcpy HtoD"]
    assert [event["args"]["memory bandwidth (GB/s)"] for event in copies] == pytest.approx([2, 1])
    assert all(event["args"]["stream"] == event["tid"] for event in copies)
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    ends = [(event["name"][-1], event["ts"], event["ts"] + event["dur"]) for event in steps]
    first = ("1", pytest.approx(0.1e6), pytest.approx(1.1e6))
    assert ends == [first, ("2", pytest.approx(1.1e6), pytest.approx(1.4e6))]


def test_a_wait_shows_on_the_training_loop_and_not_as_a_kernel():
    events = two_steps().to_chrome_trace()["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert sum(event["dur"] for event in kernels) == pytest.approx(1.15e6)
    (wait,) = [event for event in events if event["name"] == "stall:host"]
    assert (wait["cat"], wait["pid"]) == ("user_annotation", 1)


def test_what_is_measured_simulated_or_emulated_is_labelled():
    labels = [
        event["args"]["labels"]
        for event in two_steps().to_chrome_trace()["traceEvents"]
        if event["name"] == "process_labels"
    ]
    assert labels == ["measured, emulated link"] * 2


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_written_trace_reads_back_the_same(tmp_path, name):
    two_steps().write(tmp_path / name)
    assert Timeline.read(tmp_path / name) == two_steps()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_failed_write_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    two_steps().write(path)

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        Timeline().write(path)
    assert Timeline.read(path) == two_steps()
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_of_another_tool_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no 'zenflow' entry"):
        Timeline.from_chrome_trace({"traceEvents": []})
    trace = Timeline().to_chrome_trace()
    trace["zenflow"]["version"] = 99
    with pytest.raises(ValueError, match="version 1, got 99"):
        Timeline.from_chrome_trace(trace)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object, got list"):
        Timeline.read(tmp_path / "list.json")


def test_an_empty_timeline_is_all_zeros():
    empty = Timeline()
    assert (empty.makespan, empty.busy("device"), empty.lanes, empty.stalls()) == (0, 0, (), {})
    assert Timeline.from_chrome_trace(empty.to_chrome_trace()) == empty


def test_a_lane_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="got 'devise'"):
        two_steps().busy("devise")


@pytest.mark.parametrize(("start", "end"), [(2.0, 1.0), (0.0, math.nan), (-math.inf, 0.0)])
def test_a_span_ends_after_it_starts(start, end):
    with pytest.raises(ValueError, match="must start before it ends"):
        Span("host", "adam", start, end, 1)


def test_a_comparison_has_a_row_for_each_name_of_either_side():
    measured = Timeline([Span("device", "forward", 0, 2, 1), Span("host", "adam", 0, 4, 1)])
    predicted = Timeline([Span("device", "forward", 0, 3, 1), Span("d2h", "grads", 0, 1, 1)])
    assert str(compare(measured, predicted)).splitlines() == [
        "lane    span              measured s  predicted s   ratio",
        "device  forward                    2            3   1.500",
        "d2h     grads                      0            1     nan",
        "host    adam                       4            0   0.000",
        "all     makespan                   4            3   0.750",
    ]
