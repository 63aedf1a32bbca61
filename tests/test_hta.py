"""Holistic Trace Analysis reads our traces and finds the figures that the Timeline has.

The extra ``dev-all`` has the package. Where ``import hta`` fails these tests are skipped.
"""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from sim.hardware.catalog import find_machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from tests.models import TinyStack
from zenflow import PacedLink, Span, Timeline, ZenFlowAdamW, ZenFlowConfig

pytest.importorskip("hta", reason="pip install HolisticTraceAnalysis", exc_type=ImportError)

# Its own: pandas' deprecations, and files that it leaves to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore")

COPIES = {"d2h": "Memcpy DtoH", "h2d": "Memcpy HtoD"}
STREAMS = {"device": 7, "d2h": 20, "h2d": 21}


def made_up():
    """Return two steps with gaps, waits, overlaps, a copy that outlasts them, and an extra lane.

    The device works 1.0 s; the copies take 0.9 s, of which 0.4 s beside it.
    """
    return Timeline(
        [
            Span("device", "forward", 0.1, 0.4, 1),
            Span("device", "backward", 0.4, 0.7, 1),
            Span("d2h", "grads", 0.5, 0.9, 1, 800_000_000),
            Span("device", "step", 0.7, 1.0, 1),
            Span("device", "stall:host", 0.8, 0.9, 1),
            Span("host", "adam", 0.9, 1.3, 1),
            Span("nvme", "write", 1.0, 1.2, 1, 50_000_000),
            Span("device", "forward", 1.1, 1.3, 2),
            Span("h2d", "params", 1.2, 1.6, 2, 400_000_000),
            Span("d2h", "grads", 1.8, 1.9, 2, 100_000_000),
            Span("device", "stall:h2d", 1.9, 2.0, 2),
        ],
        {"source": "simulated", "device": "made up"},
    )


def simulated():
    """Return what the simulator predicts of a small model, with stalls of several causes."""
    workload = Workload.of_config(*find_model("gpt2"), batch_size=1, sequence=128)
    hardware = find_machine("rtx4090-desktop").with_values({"host.dram": 2e10})
    strategy = Strategy.of("zenflow", update_interval=2)
    return simulate(costs_of(workload, hardware), strategy).timeline


def measured():
    """Return what the engine records of a tiny training over a slow link."""
    config = ZenFlowConfig(min_split_elements=16, update_interval=2)
    torch.manual_seed(0)
    model = TinyStack(num_layers=4, width=24)
    optimizer = ZenFlowAdamW(
        model.parameters(), config=config, timeline_steps=6, link=PacedLink(5e6, 5e6)
    )
    with closing(optimizer):
        for step in range(8):
            with optimizer.span("forward"):
                loss = model.loss(step)
            with optimizer.span("backward"):
                loss.backward()
            optimizer.step()
        optimizer.synchronize()
        return optimizer.timeline


@pytest.fixture(
    scope="module", params=[made_up, simulated, measured], ids=lambda make: make.__name__
)
def timeline(request):
    return request.param()


@pytest.fixture
def analysis(timeline, tmp_path):
    """Return HTA's view of the written trace, the last step included."""
    from hta.trace_analysis import TraceAnalysis

    path = tmp_path / "trace.json"
    timeline.write(path)
    return TraceAnalysis(trace_files={0: str(path)}, include_last_profiler_step=True)


def rounding(timeline, lane=None):
    """Return the seconds that HTA may lose: it takes inner whole microseconds of every event.

    The made-up times are whole microseconds. A wait makes two events of the span around it.
    """
    if timeline.metadata["device"] == "made up":
        return 1e-9
    return 4e-6 * sum(
        span.lane == lane if lane else span.lane != "host" for span in timeline.spans
    )


def test_it_finds_the_time_of_compute_of_copies_alone_and_of_neither(timeline, analysis):
    (found,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    sides = {"device": "device", "d2h": "copies", "h2d": "copies"}
    line = Timeline(
        replace(span, lane=sides[span.lane]) for span in timeline.spans if span.lane in sides
    )
    compute = line.busy("device")
    copies_alone = line.busy("copies") - line.overlap("device", "copies")
    near = {"abs": rounding(timeline)}
    # A wait at the timeline's beginning or end, as of a late landing, is no event of a kernel.
    work = Timeline(span for span in line.spans if not span.is_stall)
    assert found["kernel_time(us)"] / 1e6 == pytest.approx(work.makespan, **near)
    assert found["compute_time(us)"] / 1e6 == pytest.approx(compute, **near)
    assert found["non_compute_time(us)"] / 1e6 == pytest.approx(copies_alone, **near)
    idle = work.makespan - compute - copies_alone
    assert found["idle_time(us)"] / 1e6 == pytest.approx(idle, **near)
    if timeline.metadata["device"] == "made up":  # the same once by hand
        assert (compute, copies_alone) == (pytest.approx(1.0), pytest.approx(0.5))


@pytest.mark.parametrize("lane", COPIES)
def test_its_bandwidth_over_time_holds_the_lanes_bytes_and_busy_seconds(timeline, analysis, lane):
    series = analysis.get_memory_bw_time_series()[0]
    copies = series[series["name"] == COPIES[lane]].sort_values("ts", kind="stable")
    seconds = copies["ts"].diff().shift(-1).fillna(0.0) / 1e6
    rates = copies["memory_bw_gbps"].where(copies["memory_bw_gbps"] > 1e-9, 0.0)
    slack = rounding(timeline, lane)
    assert seconds[rates > 0].sum() == pytest.approx(timeline.busy(lane), abs=slack)
    moved = (rates * 1e9 * seconds).sum()
    assert moved == pytest.approx(timeline.num_bytes(lane), abs=slack * rates.max() * 1e9)


def test_its_bandwidth_summary_has_every_copys_speed(timeline, analysis):
    summary = analysis.get_memory_bw_summary()["memory_bw_gbps"]
    for lane, name in COPIES.items():
        copies = [span for span in timeline.spans if span.lane == lane]
        speeds = [span.num_bytes / span.seconds / 1e9 for span in copies]
        row = summary.loc[(0, name)]
        # Where one copy ends in the microsecond in which the next starts, it may add the two.
        assert row["min"] == pytest.approx(min(speeds))
        assert row["max"] <= 2 * max(speeds)
        if timeline.metadata["device"] == "made up":
            assert (row["count"], row["max"]) == (len(copies), pytest.approx(max(speeds)))


@pytest.mark.parametrize("lane", STREAMS)
def test_its_idle_time_of_a_stream_is_the_lanes(timeline, analysis, lane):
    breakdown, _ = analysis.get_idle_time_breakdown(visualize=False)
    found = breakdown[breakdown["stream"] == STREAMS[lane]]["idle_time"].sum() / 1e6
    mine = Timeline(span for span in timeline.spans if span.lane == lane and not span.is_stall)
    idle = mine.makespan - timeline.busy(lane)
    assert found == pytest.approx(idle, abs=rounding(timeline, lane))


def test_its_steps_are_ours_for_copies_that_run_later_too(timeline, analysis):
    steps = {span.step for span in timeline.spans}
    assert analysis.t.get_iterations() == sorted(steps)
    events = analysis.t.get_trace(0)
    symbols = analysis.t.symbol_table.get_sym_table()
    for lane, name in COPIES.items():
        ids = [index for index, symbol in enumerate(symbols) if symbol.startswith(name)]
        found = events[events["name"].isin(ids)].sort_values("ts")["iteration"]
        copies = sorted((s for s in timeline.spans if s.lane == lane), key=lambda s: s.start)
        assert list(found) == [span.step for span in copies]


def test_a_copy_whose_step_was_cut_off_is_still_seen(tmp_path):
    from hta.trace_analysis import TraceAnalysis

    line = Timeline(
        [
            Span("d2h", "grads", 0.2, 0.4, 1, 500_000_000),
            Span("device", "forward", 0.3, 0.5, 2),
            Span("device", "forward", 0.5, 0.8, 3),
        ]
    )
    line.write(tmp_path / "trace.json")
    path = str(tmp_path / "trace.json")
    analysis = TraceAnalysis(trace_files={0: path}, include_last_profiler_step=True)
    summary = analysis.get_memory_bw_summary()["memory_bw_gbps"]
    assert summary.loc[(0, "Memcpy DtoH")]["max"] == pytest.approx(2.5)


def test_the_step_that_it_leaves_out_by_default_is_the_last_with_its_copies(tmp_path):
    from hta.trace_analysis import TraceAnalysis

    made_up().write(tmp_path / "trace.json")
    analysis = TraceAnalysis(trace_files={0: str(tmp_path / "trace.json")})
    (found,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    first = made_up().steps(1, 1)
    assert found["compute_time(us)"] / 1e6 == pytest.approx(first.busy("device")) == 0.8
    assert list(analysis.get_memory_bw_summary().index) == [(0, "Memcpy DtoH")]
