"""``zenflow report`` reads what it is given whole, or says what is missing."""

import base64
import gzip
import hashlib
import json
import math
import re
from dataclasses import replace

import pandas as pd
import pytest
from bokeh.models import HBar, PlainText
from bokeh.resources import Resources
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from autotune.decisions.file import DECISIONS, read_decisions
from experiments.cli import main
from experiments.report.charts import bar_chart
from experiments.report.decimation import MOST_ROWS, decimate
from experiments.report.loading import Contents, load
from experiments.report.page import page_data, render, unique_names
from experiments.report.runs import MOST_POINTS, curves, read_run
from experiments.report.sections import figures_by_name, work
from experiments.report.timelines import timeline_chart
from experiments.report.trace_view import read_view, view_of
from experiments.report.tuning import changes, knobs_over_steps, measured_after, read_story
from experiments.report.units import TIMES
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


def drawn_bars(chart):
    """Return lane, start and end of each bar of a timeline, in seconds."""
    factor = next(factor for factor, unit in TIMES if unit == chart.below[0].axis_label)
    return [
        (drawn.name, start * factor, end * factor)
        for drawn in chart.renderers
        if isinstance(drawn.glyph, HBar)
        for start, end in zip(
            drawn.data_source.data["start"], drawn.data_source.data["end"], strict=True
        )
    ]


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
    assert {bar.row for bar in device.bars} == {0}


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
    found = {bar.name: bar.busy_seconds for bar in read_view(tmp_path / "t.json").lanes[0].bars}
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
    bars = [bar for lane in drawn.lanes for bar in lane]
    assert sum(bar.count for bar in bars) + drawn.num_hidden == len(spans)
    shown = [bar for lane in view.lanes for bar in lane.bars if bar.row < MOST_ROWS]
    assert sum(bar.num_bytes for bar in bars) == sum(bar.num_bytes for bar in shown)
    total = sum(bar.busy_seconds for bar in shown)
    assert sum(bar.busy_seconds for bar in bars) == pytest.approx(total)
    if drawn.resolution == 0:
        assert {bar.count for bar in bars} <= {1}
    for bar in bars:
        # Merged are only spans shorter than the resolution, that begin within it.
        if bar.count > 1:
            assert bar.end - bar.start <= 2 * drawn.resolution * (1 + 1e-9)


@pytest.mark.timeout(20)
def test_spans_without_length_are_merged_too():
    view = view_of(Timeline((Span("device", "mark", 1.0, 1.0, 1),) * 50), "t")
    drawn = decimate(view, 10)
    assert [bar.count for lane in drawn.lanes for bar in lane] == [50]


def test_a_long_trace_becomes_few_bars_whose_long_spans_stay():
    short = [Span("device", "forward", n * 1e-3, n * 1e-3 + 5e-4, 1) for n in range(20_000)]
    long = Span("h2d", "params", 3.0, 9.0, 1, 77)
    view = view_of(Timeline((*short, long)), "t")
    drawn = decimate(view, 1000)
    assert 250 <= drawn.num_bars <= 1000
    (kept,) = drawn.lanes[1]
    assert (kept.start, kept.end, kept.count) == (3.0, 9.0, 1)
    assert len(drawn_bars(timeline_chart("t", view, drawn))) == drawn.num_bars
    # What the page says of the lane is of all spans.
    assert view.lanes[0].busy_seconds == pytest.approx(10.0)
    assert figures_by_name(view.lanes[0]) == [("forward", 20_000, pytest.approx(10.0), 0)]


def test_every_span_is_drawn_where_it_was_to_the_nanosecond():
    view = view_of(timeline(), "t")
    expected = [(lane.name, bar.start, bar.end) for lane in view.lanes for bar in lane.bars]
    drawn = drawn_bars(timeline_chart("t", view, decimate(view, 10_000)))
    assert len(drawn) == len(expected)
    for bar, span in zip(sorted(drawn), sorted(expected), strict=True):
        assert bar == (span[0], pytest.approx(span[1], abs=1e-9), pytest.approx(span[2], abs=1e-9))


def test_many_names_of_a_lane_become_one_row_without_a_loss():
    spans = [Span("device", f"n{n}", n, n + 0.5 + n / 100, 1, n) for n in range(30)]
    rows = figures_by_name(view_of(Timeline(tuple(spans)), "t").lanes[0])
    assert rows[0][0] == "n29"  # the longest
    assert rows[-1][0] == "18 other names"
    counts, seconds, moved = (sum(column) for column in list(zip(*rows, strict=True))[1:])
    assert (counts, moved) == (30, sum(range(30)))
    assert seconds == pytest.approx(sum(span.seconds for span in spans))


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
    assert data["runs"][0].run.summary["steps"] == 4
    assert data["runs"][0].stall == pytest.approx(0.3)
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
    [(side, charts)] = data_of(tmp_path / "run")["tuned"]
    story = side.run.story
    (decision,) = story.decisions
    assert changes(decision) == [("update_interval", 2, 4)]
    assert measured_after(story, 0) == 0.9
    points = [(step, knobs["update_interval"]) for step, knobs in knobs_over_steps(story)]
    assert points == [(0, 2), (3, 4)]
    titles = [title for title, _, _ in charts]
    assert (side.name, titles[0], titles[-1]) == (
        "auto", "S over the run", "Step time: predicted against measured",
    )  # fmt: skip


def test_a_change_names_every_knob_that_moved_whatever_its_value(tmp_path):
    write_decisions(write_run(tmp_path / "run", "auto"))
    (decision,) = read_story(tmp_path / "run" / "decisions.jsonl").decisions
    old = replace(decision.old, topk_ratio=0.5, select_interval=4)
    new = replace(decision.old, topk_ratio=0.0, select_interval=0)
    moved = [("topk_ratio", 0.5, 0.0), ("select_interval", 4, 0)]
    assert changes(replace(decision, old=old, new=new)) == moved


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
    [(side, _)] = data_of(folder)["tuned"]
    assert (len(side.run.story.decisions), side.run.story.end) == (1, None)


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
    assert [side.name for side in data["runs"]] == ["zero_offload", "zenflow"]
    assert any("auto has no run yet" in note for note in data["notes"])


def test_a_comparison_of_which_no_run_has_begun_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"compare": ["zenflow", "auto"]}))
    with pytest.raises(ConfigError, match="comparison of zenflow, auto, but no run"):
        load([tmp_path])


def test_a_committed_comparison_without_its_runs_is_shown_from_its_record(tmp_path):
    summaries = {"zenflow": {"strategy": "zenflow", "mean_step_seconds": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps({"compare": ["zenflow"]}))
    (tmp_path / "compare.json").write_text(json.dumps({"runs": summaries}))
    data = data_of(tmp_path)
    (side,) = data["runs"]
    assert (side.step, side.run.rows) == (2.0, ())
    assert [title for title, _, _ in data["comparison"]] == ["Time of a step"]


def test_a_kept_summary_is_checked_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"compare": ["zenflow"]}))
    kept = {"runs": {"zenflow": {"mean_step_seconds": "fast"}}}
    (tmp_path / "compare.json").write_text(json.dumps(kept))
    with pytest.raises(ConfigError, match="zenflow: mean_step_seconds must be a number"):
        load([tmp_path])


def test_a_run_that_diverged_and_one_without_figures_are_shown(tmp_path):
    folder = write_run(tmp_path / "run", final_train_loss=float("nan"), stall_fraction=None,
                       mean_step_seconds=None, eval_loss=float("inf"), seed=None)  # fmt: skip
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    rows = [{**row, "loss": None} for row in rows[:1]] + rows[1:2]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = own_part(render(load([folder]), title="t", made={"command": "", "at": ""}))
    assert not re.search(r"\b(nan|None|inf)\b", page.partition('id="data"')[0])


def test_a_sweep_has_its_axes_from_its_record_and_its_constants_aside(tmp_path):
    [(table, _)] = data_of(write_sweep(tmp_path / "sweep"))["sweeps"]
    assert [column.name for column in table.axes] == ["S", "k", "gpu"]  # numbers first
    assert [column.name for column in table.measures] == ["step_seconds"]
    assert table.constants == {"model": "llama", "stall_share": 0.25}
    steps = next(column for column in table.columns if column.name == "step_seconds")
    assert steps.values[:2] == [None, 2.2]
    assert table.source == "predicted"


def test_a_huge_table_is_thinned_and_says_so(tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n" + "".join(f"{n},{n % 7}\n" for n in range(90_000)))
    contents = load([tmp_path])
    assert len(contents.tables[0].rows) == 45_000
    assert any("45,000 of 90,000 rows" in note for note in contents.notes)


def test_a_long_sweeps_table_is_parquet_and_stays_a_grid_where_it_is_thinned(tmp_path):
    folder = write_sweep(tmp_path / "sweep")
    (folder / "table.csv").unlink()
    grid = pd.MultiIndex.from_product(
        [range(600), range(400), ["a", "b"]], names=["S", "k", "gpu"]
    )
    frame = grid.to_frame(index=False).assign(status="ok", reason="", step_seconds=float("nan"))
    frame.loc[frame["S"] > 0, "step_seconds"] = frame["S"] + frame["k"] / 7
    frame.to_parquet(folder / "table.parquet", index=False)
    contents = load([folder])
    [table] = contents.tables
    assert any("of 480,000 rows are on this page" in note for note in contents.notes)
    cells = {column.name: column.values for column in table.columns}
    levels = [len(set(cells[name])) for name in ("S", "k", "gpu")]
    assert 120_000 / 6 / 2 < math.prod(levels) == len(table.rows) <= 120_000 / 6
    assert levels[2] == 2  # the short axis is whole
    assert table.constants == {"status": "ok", "reason": None}
    seconds = dict(
        zip(zip(cells["S"], cells["k"], strict=True), cells["step_seconds"], strict=True)
    )
    assert seconds[0.0, 0.0] is None
    assert all(
        value == pytest.approx(row + column / 7, rel=1e-5)
        for (row, column), value in seconds.items()
        if row
    )
    page = tmp_path / "page.html"
    assert report(page, folder).exit_code == 0
    (folder / "table.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ConfigError, match="can't be read as Parquet"):
        load([folder])


def test_names_tell_runs_apart():
    named = [("zenflow", "runs/a/x"), ("zenflow", "runs/b/x"), ("auto", "runs/c")]
    assert unique_names(named) == ["zenflow (a/x)", "zenflow (b/x)", "auto"]
    assert len(set(unique_names([("t.json", f"{n}/t.json") for n in "ab"]))) == 2


def test_figures_that_are_not_measured_never_go_unlabelled(tmp_path):
    timeline(source="simulated").write(tmp_path / "s.json")
    link = {"d2h_bytes_per_second": 1e6, "h2d_bytes_per_second": 1e6}
    write_run(tmp_path / "run", emulated_link=link)
    data = data_of(tmp_path / "s.json", tmp_path / "run")
    assert [side.source for side in data["sides"]] == ["measured, emulated link", "simulated"]
    assert {view.source for _, view, *_ in data["timelines"]} == {"simulated", "measured"}
    for title, _, chart in data["comparison"][:2]:
        labels = [label.text for label in chart.yaxis[0].major_label_overrides.values()]
        assert labels == ["zenflow\nmeasured, emulated link", "s.json\nsimulated"], title


def test_what_a_step_computes_stands_with_runs_and_traces(tmp_path):
    facts = {"model": "big", "num_params": 2_000_000, "batch_size": 4, "sequence": 8,
             "machine": "a GPU", "commit": "c0ffee"}  # fmt: skip
    simulated = timeline(source="simulated")
    replace(simulated, metadata={**simulated.metadata, **facts}).write(tmp_path / "s.json")
    write_run(tmp_path / "run", num_params=1_000_000)
    data = data_of(tmp_path / "s.json", tmp_path / "run")
    [(_, _, read)] = data["traces"]
    assert work(read) == "2M parameters, 4 x 8 tokens"
    assert read.to_metadata() == facts
    assert [side.work for side in data["sides"]] == ["1M parameters", work(read)]
    assert data["comparison"][0][0] == "Loss against time"  # no bars: steps of different work


# ---- the page ----------------------------------------------------------------------------------


def own_part(page):
    """Return the page without the library's bundle, which is not ours to look through."""
    bundle = Resources(mode="inline", components=["bokeh"]).js_raw[0]
    assert page.count(bundle) == 1
    return page.replace(bundle, "")


EVIL = "</script><script>alert(1)</script><img src=x>"


def test_nothing_in_a_name_can_become_markup(tmp_path):
    spans = (Span("device", EVIL, 0.0, 1.0, 1), Span(EVIL, "a", 0.0, 1.0, 1))
    Timeline(spans, {"source": EVIL}).write(tmp_path / "t.json")
    write_decisions(write_run(tmp_path / "run", EVIL))
    sweep = write_sweep(tmp_path / "sweep")
    table = (sweep / "table.csv").read_text()
    (sweep / "table.csv").write_text(table.replace("gpu", EVIL).replace("a100", EVIL))
    contents = load([tmp_path / "t.json", tmp_path / "run", sweep])
    page = own_part(render(contents, title=EVIL, made={"command": EVIL, "at": EVIL}))
    assert page.lower().count("<script") == page.lower().count("</script") == 3
    assert "<img" not in page
    assert "<b>" not in page  # of a decision's reason
    assert page.count("&lt;img src=x&gt;") > 10


def test_a_name_between_dollars_is_no_formula():
    """Bokeh takes a plain string on an axis for TeX, and would want a library to draw it."""
    name = "$$x^2$$"
    view = view_of(Timeline((Span(name, "a", 0.0, 1.0, 1),), {"source": name}), "t")
    rows = bar_chart("t", [(name, name, "")], {"a": ("#000000", [1.0])}, TIMES)
    for chart, text in ((timeline_chart("t", view, decimate(view, 9)), name),
                        (rows, f"{name}\n{name}")):  # fmt: skip
        (label,) = chart.left[0].major_label_overrides.values()
        assert isinstance(label, PlainText)
        assert label.text == text


def test_a_page_asks_for_nothing_and_runs_only_its_own_scripts(tmp_path):
    page = render(load([write_run(tmp_path / "run")]), title="t", made={"command": "", "at": ""})
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert set(rules) == {"default-src", "base-uri", "form-action", "img-src", "style-src",
                          "script-src"}  # fmt: skip
    assert rules["img-src"] == "data:"
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    ]
    assert rules["script-src"].split() == hashes
    assert not re.search(r"(https?:)?//\w+\.|@import|url\(", own_part(page))


def test_a_page_of_a_huge_trace_stays_small():
    spans = [Span("device", "forward", n * 1e-3, n * 1e-3 + 9e-4, n // 9) for n in range(70_000)]
    contents = Contents(traces=[view_of(Timeline(tuple(spans)), "t")])
    page = render(contents, title="t", made={"command": "", "at": ""})
    assert len(page) < 4_000_000
    assert "70,000 spans are drawn as " in page


def test_the_command_writes_a_page_of_real_runs(tmp_path, clock):
    text = write_text(tmp_path / "text.txt")
    flags = ("--data", text, *FAST, "--min-split-elements", "256", "--steps", "9")
    tuned = trained(tmp_path / "tuned", *flags, "--auto")
    done = report(tmp_path / "page.html", tuned)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text()
    decisions = read_decisions(tuned / DECISIONS).decisions
    assert decisions
    for decision in decisions:
        assert str(escape(decision.reason)) in page
    assert "Timeline of auto: device, d2h, h2d, host" in page
    assert f"Made by <code>zenflow report {tmp_path / 'page.html'}" in page
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
    (folder / "loop.json").symlink_to("loop.json")
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
        "missing": "does not exist", "loop.json": "does not exist", "empty": "neither a run",
        "runs": "name some of a, b",
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
    [("trace.json", "must end in .html"), ("nowhere/a.html", "in a folder that exists"),
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
