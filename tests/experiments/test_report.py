"""``zenflow report`` reads what it is given whole, or says what is missing."""

import gzip
import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from autotune.decisions.file import DECISIONS, read_decisions
from experiments.cli import main
from experiments.report.decimation import MOST_ROWS, decimate
from experiments.report.loading import Contents, load
from experiments.report.page import page_data, render, timeline_data, unique_names
from experiments.report.runs import MOST_POINTS, curves, read_run
from experiments.report.trace_view import read_view, view_of
from experiments.report.tuning import measured_after, read_story
from tests.experiments.reported import (
    timeline,
    write_decisions,
    write_profile,
    write_run,
    write_sweep,
)
from tests.experiments.runs import FAST, trained, write_text
from zenflow.errors import ConfigError
from zenflow.trace.timeline import Span, Timeline


def report(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def data_of(*paths):
    return page_data(load(paths), title="t", made={})


def spans_of(lane):
    """Return a lane's (start, length) in nanoseconds, as the page decodes them."""
    starts, at = [], 0
    for difference in lane["columns"]["start"]:
        at += difference
        starts.append(at)
    return list(zip(starts, lane["columns"]["length"], strict=True))


# ---- traces ------------------------------------------------------------------------------------


def test_a_trace_of_ours_keeps_every_span_and_its_figures(tmp_path):
    timeline().write(tmp_path / "a.json.gz")
    view = read_view(tmp_path / "a.json.gz")
    assert view.source == "measured"
    assert view.num_spans == len(timeline().spans)
    assert view.step_seconds == pytest.approx(1.0)
    assert view.stall_fraction == pytest.approx(0.3)
    assert view.bytes_per_step == {"d2h": 3e6, "h2d": 1e6}
    device = next(lane for lane in view.lanes if lane.name == "device")
    assert device.busy_seconds == pytest.approx(6 * 0.7)
    assert device.num_rows == 1


def test_a_profilers_trace_has_its_threads_steps_and_calls_in_rows(tmp_path):
    view = read_view(write_profile(tmp_path / "p.json"))
    (lane,) = view.lanes
    assert (lane.name, view.source) == ("main", "PyTorch profiler")
    assert view.seconds == pytest.approx(1e-3)  # the profiler's own span does not count
    assert view.step_seconds == pytest.approx(0.5e-3)
    assert view.stall_fraction is None
    rows = {bar.name: bar.row for bar in lane.bars}
    assert (rows["ProfilerStep#1"], rows["aten::linear"], rows["aten::addmm"]) == (0, 1, 2)
    copy = next(bar for bar in lane.bars if bar.name == "Memcpy HtoD")
    assert (copy.step, copy.num_bytes) == (2, 4096)


def test_pairs_of_begin_and_end_are_spans(tmp_path):
    events = [
        {"ph": "B", "name": "outer", "ts": 0, "pid": 1, "tid": 1},
        {"ph": "B", "name": "inner", "ts": 10, "pid": 1, "tid": 1},
        {"ph": "E", "ts": 20, "pid": 1, "tid": 1},
        {"ph": "E", "ts": 50, "pid": 1, "tid": 1},
    ]
    (tmp_path / "t.json").write_text(json.dumps(events))
    found = {bar.name: bar.seconds for bar in read_view(tmp_path / "t.json").lanes[0].bars}
    assert found == pytest.approx({"outer": 50e-6, "inner": 10e-6})


# ---- decimation --------------------------------------------------------------------------------

_TIMES = st.lists(
    st.tuples(st.floats(0, 100), st.floats(0, 3), st.integers(0, 10**9), st.booleans()),
    min_size=1, max_size=120,
)  # fmt: skip


@given(times=_TIMES, most=st.integers(1, 150))
def test_merging_loses_no_span_no_second_and_no_byte(times, most):
    spans = [
        Span("device", "stall:d2h" if stall else f"n{size % 3}", start, start + length, 1, size)
        for start, length, size, stall in times
    ]
    view = view_of(Timeline(tuple(spans)), "t")
    drawn = decimate(view, most)
    blocks = [block for lane in drawn.lanes for block in lane]
    assert sum(block.count for block in blocks) + drawn.num_hidden == len(spans)
    shown = [bar for lane in view.lanes for bar in lane.bars if bar.row < MOST_ROWS]
    assert sum(block.num_bytes for block in blocks) == sum(bar.num_bytes for bar in shown)
    total = sum(bar.seconds for bar in shown)
    assert sum(block.busy_seconds for block in blocks) == pytest.approx(total)
    if drawn.resolution == 0:
        assert {block.count for block in blocks} <= {1}
    for block in blocks:
        # Merged are only spans shorter than the resolution, that begin within it.
        if block.count > 1:
            assert block.end - block.start <= 2 * drawn.resolution * (1 + 1e-9)


@pytest.mark.timeout(20)
def test_spans_without_length_are_merged_too():
    view = view_of(Timeline((Span("device", "mark", 1.0, 1.0, 1),) * 50), "t")
    drawn = decimate(view, 10)
    assert [block.count for lane in drawn.lanes for block in lane] == [50]


def test_a_long_trace_becomes_few_blocks_whose_long_spans_stay():
    short = [Span("device", "forward", n * 1e-3, n * 1e-3 + 5e-4, 1) for n in range(20_000)]
    long = Span("h2d", "params", 3.0, 9.0, 1, 77)
    view = view_of(Timeline((*short, long)), "t")
    drawn = decimate(view, 1000)
    assert 250 <= drawn.num_blocks <= 1000
    (kept,) = drawn.lanes[1]
    assert (kept.start, kept.end, kept.count) == (3.0, 9.0, 1)
    data = timeline_data("t", view, drawn)
    assert (data["num_spans"], data["num_drawn"]) == (20_001, drawn.num_blocks)
    assert data["lanes"][0]["busy_seconds"] == pytest.approx(10.0)  # of all spans


def test_times_reach_the_page_to_the_nanosecond(tmp_path):
    view = view_of(timeline(), "t")
    data = timeline_data("t", view, decimate(view, 10_000))
    for lane, encoded in zip(view.lanes, data["lanes"], strict=True):
        expected = [(round(bar.start * 1e9), round(bar.end * 1e9)) for bar in lane.bars]
        assert [(start, start + length) for start, length in spans_of(encoded)] == expected


# ---- runs, comparisons, sweeps -----------------------------------------------------------------


def test_a_runs_curves_are_its_rows(tmp_path):
    found = curves(read_run(write_run(tmp_path / "run")))
    assert found["loss"] == [4 - n / 4 for n in range(1, 7)]
    assert found["elapsed"] == pytest.approx([1, 2, 3, 4, 5, 6])
    assert found["held_out"] == [[3, 3.0, 3.5], [6, 6.0, 2.5]]


def test_a_long_runs_curve_is_of_means_over_all_steps(tmp_path):
    folder = write_run(tmp_path / "run")
    row = json.loads((folder / "steps.jsonl").read_text().splitlines()[0])
    rows = [{**row, "step": n, "loss": float(n)} for n in range(1, 5001)]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = curves(read_run(folder))
    assert len(found["loss"]) <= MOST_POINTS
    assert found["loss"][0] == 3.0  # the mean of the first five
    assert found["step"][-1] == 5000


def test_an_unfinished_run_is_shown_as_far_as_it_came(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    lines = (folder / "steps.jsonl").read_text().splitlines(keepends=True)
    (folder / "steps.jsonl").write_text("".join(lines[:4]) + '{"step": 5, "lo')
    data = data_of(folder)
    assert data["runs"][0]["figures"]["steps"] == 4
    assert data["runs"][0]["figures"]["stall_fraction"] == pytest.approx(0.3)
    assert any("4 steps of 6" in note for note in data["notes"])


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("summary.json", "emulated_link", "none"), ("summary.json", "config", [1]),
        ("summary.json", "eval_loss", "low"), ("summary.json", "stall_fraction", True),
        ("config.json", "settings", 5), ("config.json", "config", "x"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_named_with_its_file(tmp_path, file, key, value):
    folder = write_run(tmp_path / "run")
    path = folder / file
    content = json.loads(path.read_text()) if path.is_file() else {}
    (folder / file).write_text(json.dumps({**content, key: value}))
    with pytest.raises(ConfigError, match=f"{file}: {key} must be"):
        read_run(folder)


def test_a_decision_is_shown_with_what_came_of_it(tmp_path):
    write_decisions(write_run(tmp_path / "run", "auto"))
    tuning = data_of(tmp_path / "run")["runs"][0]["tuning"]
    (decision,) = tuning["decisions"]
    assert decision["change"] == {"update_interval": [2, 4]}
    found = [decision[key] for key in ("before", "predicted", "after")]
    assert found == [1.0, 0.8, 0.9]
    assert [step for step, _ in tuning["knobs"]] == [0, 3]


def test_what_came_of_a_decision_was_measured_after_it_and_before_the_next(tmp_path):
    write_decisions(write_run(tmp_path / "run", "auto"))
    story = read_story(tmp_path / "run" / "decisions.jsonl")
    (first,), (before, after) = story.decisions, story.windows
    back = replace(first, step=6, old=first.new, new=first.old)
    late = replace(before, step=9, window=2, step_seconds=1.2)
    story = replace(story, decisions=[first, back], windows=[before, after, late])
    assert [measured_after(story, place) for place in (0, 1)] == [0.9, 1.2]


def test_a_tuned_run_in_progress_is_shown_too(tmp_path):
    folder = write_run(tmp_path / "run", "auto")
    write_decisions(folder)
    lines = (folder / "decisions.jsonl").read_text().splitlines(keepends=True)
    (folder / "decisions.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    tuning = data_of(folder)["runs"][0]["tuning"]
    assert (len(tuning["decisions"]), tuning["finished"]) == (1, False)


def test_a_changed_decisions_file_is_refused_by_its_line(tmp_path):
    folder = write_run(tmp_path / "run", "auto")
    write_decisions(folder)
    lines = (folder / "decisions.jsonl").read_text().splitlines(keepends=True)
    (folder / "decisions.jsonl").write_text("".join([lines[0], *lines[2:]]))
    with pytest.raises(ConfigError, match=r"decisions\.jsonl, line 2: n must be 1"):
        load([folder])


def test_a_comparison_is_its_runs_and_says_which_are_missing(tmp_path):
    for name in ("zero_offload", "zenflow"):
        write_run(tmp_path / "cmp" / name, name)
    names = ["zero_offload", "zenflow", "auto"]
    (tmp_path / "cmp" / "config.json").write_text(json.dumps({"compare": names}))
    data = data_of(tmp_path / "cmp")
    assert [run["name"] for run in data["runs"]] == ["zero_offload", "zenflow"]
    assert any("auto has no run yet" in note for note in data["notes"])


def test_a_comparison_of_which_no_run_has_begun_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"compare": ["zenflow", "auto"]}))
    with pytest.raises(ConfigError, match="comparison of zenflow, auto, but no run"):
        load([tmp_path])


def test_a_committed_comparison_without_its_runs_is_shown_from_its_record(tmp_path):
    summaries = {"zenflow": {"strategy": "zenflow", "mean_step_seconds": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps({"compare": ["zenflow"]}))
    (tmp_path / "compare.json").write_text(json.dumps({"runs": summaries}))
    (run,) = data_of(tmp_path)["runs"]
    assert (run["figures"]["mean_step_seconds"], run["curves"]) == (2.0, None)


def test_a_sweep_has_its_axes_from_its_record_and_its_constants_aside(tmp_path):
    (table,) = data_of(write_sweep(tmp_path / "sweep"))["tables"]
    assert {c["name"] for c in table["columns"] if c["axis"]} == {"gpu", "S", "k"}
    assert table["constants"] == {"model": "llama", "stall_share": 0.25}
    steps = next(c for c in table["columns"] if c["name"] == "step_seconds")
    assert steps["values"][:2] == [None, 2.2]
    assert table["source"] == "predicted"


def test_a_huge_table_is_thinned_and_says_so(tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n" + "".join(f"{n},{n % 7}\n" for n in range(90_000)))
    contents = load([tmp_path])
    assert contents.tables[0].num_shown == 45_000
    assert any("45,000 of 90,000 rows" in note for note in contents.notes)


def test_names_tell_runs_apart():
    named = [("zenflow", "runs/a/x"), ("zenflow", "runs/b/x"), ("auto", "runs/c")]
    assert unique_names(named) == ["zenflow (a/x)", "zenflow (b/x)", "auto"]
    assert len(set(unique_names([("t.json", f"{n}/t.json") for n in "ab"]))) == 2


def test_figures_that_are_not_measured_never_go_unlabelled(tmp_path):
    timeline(source="simulated").write(tmp_path / "s.json")
    link = {"d2h_bytes_per_second": 1e6, "h2d_bytes_per_second": 1e6}
    write_run(tmp_path / "run", emulated_link=link)
    data = data_of(tmp_path / "s.json", tmp_path / "run")
    assert data["traces"][0]["source"] == "simulated"
    assert data["runs"][0]["source"] == "measured, emulated link"
    assert {one["source"] for one in data["timelines"]} == {"simulated", "measured"}


def test_what_a_step_computes_stands_with_runs_and_traces(tmp_path):
    facts = {"model": "big", "num_params": 2_000_000, "batch_size": 4, "sequence": 8,
             "machine": "a GPU", "commit": "c0ffee"}  # fmt: skip
    simulated = timeline(source="simulated")
    replace(simulated, metadata={**simulated.metadata, **facts}).write(tmp_path / "s.json")
    write_run(tmp_path / "run", num_params=1_000_000)
    data = data_of(tmp_path / "s.json", tmp_path / "run")
    assert data["traces"][0]["work"] == "2M parameters, 4 x 8 tokens"
    assert data["traces"][0]["facts"] == facts
    assert data["runs"][0]["work"] == "1M parameters"


# ---- the page ----------------------------------------------------------------------------------


def test_nothing_in_a_name_can_become_markup(tmp_path):
    evil = "</script><script>alert(1)</script>"
    spans = (Span("device", evil, 0.0, 1.0, 1), Span("<img src=x>", "a", 0.0, 1.0, 1))
    Timeline(spans, {"source": evil}).write(tmp_path / "t.json")
    write_run(tmp_path / "run", evil)
    page = render(load([tmp_path / "t.json", tmp_path / "run"]), title=evil, made={})
    assert page.lower().count("<script") == page.lower().count("</script") == 2
    assert "<img" not in page
    assert "&lt;/script&gt;" in page  # the title


def test_a_page_asks_for_nothing_and_runs_only_its_own_scripts(tmp_path):
    page = render(load([write_run(tmp_path / "run")]), title="t", made={})
    own = page.partition('<script type="application/json"')[0]
    assert "default-src 'none'" in own
    assert re.findall(r"script-src [^;]*", own)[0].count("sha256-") == 1
    assert "unsafe-inline" not in page
    links = set(re.findall(r"https?://[^\"' ]+", page))
    assert links == {"http://www.w3.org/2000/svg"}  # a name space, which is never fetched


def test_a_page_of_a_huge_trace_stays_small():
    spans = [Span("device", "forward", n * 1e-3, n * 1e-3 + 9e-4, n // 9) for n in range(70_000)]
    contents = Contents(traces=[view_of(Timeline(tuple(spans)), "t")])
    page = render(contents, title="t", made={})
    assert len(page) < 4_000_000


def test_the_command_writes_a_page_of_real_runs(tmp_path, clock):
    text = write_text(tmp_path / "text.txt")
    flags = ("--data", text, *FAST, "--min-split-elements", "256", "--steps", "9")
    tuned = trained(tmp_path / "tuned", *flags, "--auto")
    done = report(tmp_path / "page.html", tuned)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text()
    found = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    (run,) = found["runs"]
    assert run["name"] == "auto"
    decisions = read_decisions(tuned / DECISIONS).decisions
    assert decisions
    assert [shown["step"] for shown in run["tuning"]["decisions"]] == [d.step for d in decisions]
    assert {lane["name"] for lane in found["timelines"][0]["lanes"]} == {
        "device", "d2h", "h2d", "host",
    }  # fmt: skip
    assert found["made"]["command"].startswith("zenflow report")
    assert not list(tmp_path.glob(".page*"))


# ---- bad input ---------------------------------------------------------------------------------


def bad_inputs(folder):
    """Return paths and what the message must say of each."""
    (folder / "empty").mkdir()
    (folder / "runs").mkdir()
    write_run(folder / "runs" / "a")
    (folder / "runs" / "b").mkdir()
    (folder / "runs" / "b" / "config.json").write_text('{"compare": []}')
    (folder / "text.txt").write_text("x")
    (folder / "broken.json").write_text("{")
    (folder / "other.json").write_text("{}")
    (folder / "cut.json.gz").write_bytes(gzip.compress(b"[" * 5000)[:-30])
    (folder / "nothing.json").write_text('{"traceEvents": []}')
    (folder / "odd.json").write_text('{"traceEvents": [{"ph": "X", "name": "a", "ts": "soon"}]}')
    (folder / "ours.json").write_text('{"zenflow": {"version": 1}, "traceEvents": [{}]}')
    (folder / "short.csv").write_text("a,b\n1,2\n3\n")
    (folder / "names.csv").write_text("a,b\n")
    Timeline().write(folder / "no_spans.json")
    return {
        "missing": "does not exist", "empty": "neither a run", "runs": "name some of a, b",
        "text.txt": "kind that a page can't show", "broken.json": "is not JSON",
        "other.json": "lacks a list traceEvents", "cut.json.gz": "can't be read",
        "nothing.json": "no event with a duration", "odd.json": "trace event format",
        "ours.json": "can't be read as one", "short.csv": "row 3: 1 cells under 2 names",
        "names.csv": "a row at least", "no_spans.json": "no spans to draw",
        "runs/a/steps.jsonl": "name its directory",
    }  # fmt: skip


def test_bad_inputs_are_named_with_what_they_lack_and_nothing_is_written(tmp_path):
    good = write_run(tmp_path / "good")
    for name, message in bad_inputs(tmp_path).items():
        done = report(tmp_path / "page.html", good, tmp_path / name)
        assert done.exit_code == 2, name
        said = " ".join(done.output.split())
        assert str(tmp_path / name) in said, said
        assert message in said, said
        assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [("trace.json", "must end in .html"), ("nowhere/a.html", "is no directory"),
     ("dir.html", "is a directory")],
)  # fmt: skip
def test_a_page_that_can_not_be_is_refused_before_anything_is_read(tmp_path, out, message):
    (tmp_path / "dir.html").mkdir()
    done = report(tmp_path / out, tmp_path / "missing")
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_a_log_of_another_kind_is_refused_by_its_line(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "steps.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(ConfigError, match=r"steps\.jsonl, line 1: .*lacks seconds, stall_seconds"):
        load([folder])
