import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from matplotlib.colors import to_hex

from experiments.cli import main
from experiments.output.plots import SPAN_COLOURS, STALL_COLOUR
from experiments.traces.compare import Trace, align, compare_sides, load, whole_steps
from experiments.traces.picture import MOST_STEPS, draw_overlay
from zenflow.errors import ConfigError
from zenflow.trace.timeline import Span, Timeline


def slow(num_steps=3, first=1):
    """Return steps of 10 s that wait 4 s for the host; each copies 6 MB down in 2 s."""
    spans = []
    for index in range(num_steps):
        start, step = 100.0 + 10 * index, first + index
        spans += [
            Span("device", "forward", start, start + 1, step),
            Span("device", "backward", start + 1, start + 5, step),
            Span("device", "step", start + 5, start + 10, step),
            Span("device", "stall:host", start + 6, start + 10, step),
            Span("d2h", "grads", start + 4, start + 6, step, 6_000_000),
            Span("host", "adam", start + 6, start + 9, step),
        ]
    return Timeline(tuple(spans), {"emulated_link": True, "device": "cpu"})


def fast(num_steps=5, first=1):
    """Return steps of 5 s that never wait; each one's 3 MB go down during the next, in 1 s."""
    spans = []
    for index in range(num_steps):
        start, step = 5.0 * index, first + index
        spans += [
            Span("device", "forward", start, start + 1, step),
            Span("device", "backward", start + 1, start + 5, step),
            Span("d2h", "grads", start + 6, start + 7, step, 3_000_000),
            Span("nvme", "read", start, start + 2, step, 8_000_000),
        ]
    return Timeline(tuple(spans), {"source": "simulated"})


def sides(a, b, steps=None):
    return align(Trace(path="a", timeline=a), Trace(path="b", timeline=b), steps)


def figures(a, b, steps=None):
    """Return (A, B) of every row by its group, lane and name."""
    rows = compare_sides(*sides(a, b, steps))
    return {(row.group, row.lane, row.name): (row.a, row.b) for row in rows}


def test_the_figures_are_those_of_a_step_by_hand():
    found = figures(slow(), fast())
    assert found["step", "", ""] == (10, 5)
    assert found["stall", "device", ""] == found["stall", "device", "host"] == (4, 0)
    assert found["busy", "device", ""] == (6, 5)
    assert found["share", "device", ""] == (0.6, 1)
    assert found["busy", "d2h", ""] == (2, 1)
    assert found["share", "d2h", ""] == (0.2, 0.2)
    assert found["bytes", "d2h", ""] == (6e6, 3e6)
    assert found["rate", "d2h", ""] == (3e6, 3e6)
    assert found["span", "device", "backward"] == (4, 4)
    assert found["span", "device", "step"] == (5, 0)
    assert found["span", "host", "adam"] == (3, 0)


def test_a_lane_that_only_one_has_counts_nothing_in_the_other():
    found = figures(slow(), fast())
    assert found["busy", "nvme", ""] == found["span", "nvme", "read"] == (0, 2)
    assert found["bytes", "nvme", ""] == (0, 8e6)
    assert found["rate", "nvme", ""] == (None, 4e6)


def test_difference_and_ratio_are_of_b_against_a():
    rows = {(row.group, row.lane, row.name): row for row in compare_sides(*sides(slow(), fast()))}
    step = rows["step", "", ""]
    assert (step.difference, step.ratio) == (-5, 0.5)
    assert rows["busy", "nvme", ""].ratio is None
    assert rows["rate", "nvme", ""].difference is None


def test_waits_have_one_row_each_and_lanes_keep_their_order():
    rows = compare_sides(*sides(slow(), fast()))
    assert [row.name for row in rows if "host" in row.name] == ["host"]
    assert [row.lane for row in rows if row.group == "busy"] == ["device", "d2h", "host", "nvme"]


def test_the_last_step_ends_nowhere_so_it_is_not_compared():
    a, b = sides(slow(num_steps=3), fast(num_steps=5))
    assert (list(a.starts), list(b.starts)) == ([1, 2], [1, 2])
    assert (a.end, b.end) == (120, 10)


def test_a_lone_step_lasts_until_all_it_caused_is_done():
    side = whole_steps(Trace(path="a", timeline=fast(num_steps=1)))
    assert (list(side.starts), side.step_seconds) == ([1], 7)


def test_steps_with_other_numbers_are_compared_by_their_means():
    a, b = sides(slow(num_steps=3, first=489), fast(num_steps=5))
    assert (a.num_steps, b.num_steps) == (2, 4)
    found = figures(slow(num_steps=3, first=489), fast(num_steps=5))
    assert found == figures(slow(), fast())


def test_traces_that_overlap_are_compared_where_they_do():
    a, b = sides(slow(num_steps=6, first=1), fast(num_steps=6, first=4))
    assert list(a.starts) == list(b.starts) == [4, 5]
    assert (a.start, a.end, b.start, b.end) == (130, 150, 0, 10)


def test_only_the_steps_asked_for_are_compared():
    uneven = slow().spans + tuple(
        Span("device", "forward", 130.0 + 7 * index, 134.0 + 7 * index, 4 + index)
        for index in range(3)
    )
    found = figures(Timeline(uneven), fast(num_steps=6), steps=(4, 5))
    assert found["step", "", ""] == (7, 5)
    assert found["span", "device", "forward"] == (4, 1)


def test_a_copy_that_runs_after_the_compared_steps_is_still_theirs():
    found = figures(fast(num_steps=3), fast(num_steps=3), steps=(1, 1))
    assert found["bytes", "d2h", ""] == (3e6, 3e6)


@pytest.mark.parametrize(
    ("metadata", "label"),
    [
        ({"source": "simulated"}, "simulated"),
        ({"source": "measured", "emulated_link": True}, "measured, emulated link"),
        ({"emulated_link": False}, "measured"),
        ({}, "source unknown"),
    ],
)
def test_a_trace_says_what_it_is(metadata, label):
    assert Trace(path="a", timeline=Timeline((), metadata)).label == label


MINI = {"source": "measured", "model": "mini", "num_params": 800_000, "batch_size": 4,
        "sequence": 128, "grad_accum": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"strategy": "delayed", "machine": "another", "model": "renamed"}, []),
        ({"model": "base", "num_params": 9_000_000}, ["mini (0.8M", "base (9M"]),
        ({"batch_size": 2}, ["4 x 128 tokens", "2 x 128 tokens"]),
        ({"sequence": 64}, ["4 x 128 tokens", "4 x 64 tokens"]),
        ({"grad_accum": 2}, ["4 x 128 tokens", "2 x 4 x 128 tokens"]),
        ({"source": "simulated"}, ["A is measured, and B is simulated"]),
        ({"emulated_link": True}, ["B is measured, emulated link"]),
        ({"num_params": None}, ["which model B is of"]),
    ],
)
def test_what_makes_two_traces_different_work_is_named(tmp_path, changes, words):
    replace(fast(), metadata=MINI).write(tmp_path / "a.json")
    replace(fast(), metadata={**MINI, **changes}).write(tmp_path / "b.json")
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    done = CliRunner().invoke(main, ["compare", *files])
    assert done.exit_code == 0, done.output
    assert done.output.count("Warning:") == bool(words), done.output
    assert all(word in done.output for word in words), done.output
    record = json.loads(CliRunner().invoke(main, ["compare", *files, "--json"]).stdout)
    assert len(record["warnings"]) == bool(words)


@pytest.fixture
def runs(tmp_path):
    """Return a run's directory with the slow trace and a compressed file with the fast one."""
    (tmp_path / "runs" / "slow").mkdir(parents=True)
    slow().write(tmp_path / "runs" / "slow" / "trace.json")
    fast().write(tmp_path / "fast.json.gz")
    return tmp_path / "runs" / "slow", tmp_path / "fast.json.gz"


def compared(*arguments):
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


def cells(output):
    """Return the table's rows as lists of words."""
    return [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines()
        if line.startswith("│")
    ]  # fmt: skip


def test_the_command_prints_sources_and_table(runs):
    result = compared(*runs)
    assert result.exit_code == 0, result.output
    assert f"A: {runs[0]} (measured, emulated link), means over steps 1 to 2 (2)" in result.output
    assert f"B: {runs[1]} (simulated), means over steps 1 to 2 (2)" in result.output
    rows = cells(result.output)
    assert ["step", "ms", "10000", "5000", "-5000", "0.500"] in rows
    assert ["stalled: host", "ms", "4000", "0", "-4000", "0.000"] in rows
    assert ["device busy, of the step", "%", "60", "100", "+40", "1.667"] in rows
    assert ["d2h bytes", "MB", "6", "3", "-3", "0.500"] in rows
    assert ["nvme rate while busy", "GB/s", "-", "0.004", "-", "-"] in rows
    assert ["host: adam", "ms", "3000", "0", "-3000", "0.000"] in rows


def test_the_command_says_that_no_step_numbers_are_shared(tmp_path, runs):
    slow(first=489).write(tmp_path / "late.json")
    result = compared(tmp_path / "late.json", runs[1])
    assert "share no step numbers" in result.output
    assert "means over steps 489 to 490 (2)" in result.output
    assert "means over steps 1 to 4 (4)" in result.output
    assert "share no step numbers" not in compared(*runs).output


def test_json_has_the_same_figures_in_si_units_and_nothing_else_on_stdout(tmp_path, runs):
    result = compared(*runs, "--json", "--steps", "2:2", "--plot", tmp_path / "both.png")
    found = json.loads(result.stdout)
    assert found["a"]["label"] == "measured, emulated link"
    assert (found["b"]["first_step"], found["b"]["num_steps"], found["b"]["seconds"]) == (2, 1, 5)
    assert found["rows"][0] == {
        "group": "step", "lane": "", "name": "", "unit": "s", "a": 10, "b": 5, "difference": -5,
        "ratio": 0.5,
    }  # fmt: skip
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert "both.png" in result.stderr


def test_each_lane_is_drawn_twice_from_its_own_start_with_stalls_red():
    a, b = sides(slow(num_steps=4), fast(num_steps=4))
    figure = draw_overlay(a, b)
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [
        f"{lane}  {mark}" for lane in ("device", "d2h", "host", "nvme") for mark in "AB"
    ]
    bars = {}
    for drawn in axes.collections:
        if colours := drawn.get_facecolor().tolist():
            for path in drawn.get_paths():
                box = path.get_extents()
                row = round((box.y0 + box.y1) / 2, 6)
                bars.setdefault((row, to_hex(colours[0])), []).append((box.x0, box.x1))
    places = dict(zip(labels, axes.get_yticks().tolist(), strict=True))
    assert bars[places["device  A"], STALL_COLOUR] == [(6, 10), (16, 20), (26, 30)]
    assert (places["device  B"], STALL_COLOUR) not in bars
    assert bars[places["d2h  B"], SPAN_COLOURS["grads"]] == [(6, 7), (11, 12)]
    assert axes.get_xlim() == (0, 30)


def test_a_picture_shows_as_many_steps_of_both_and_names_its_sources():
    a, b = sides(slow(num_steps=20, first=100), fast(num_steps=30))
    figure = draw_overlay(a, b)
    assert figure.axes[0].get_xlim() == (0, 10 * MOST_STEPS)
    assert (
        figure.axes[0].get_xlabel().endswith("A's steps 100 to 107 (8) and B's steps 1 to 8 (8)")
    )
    title = figure.get_suptitle()
    assert "A: a (measured, emulated link): 10000.00 ms per step, 40.0% of it stalled" in title
    assert (
        "B: b (simulated): 5000.00 ms per step, 0.0% of it stalled, mean over steps 1 to 29"
        in title
    )


def test_span_names_of_one_trace_alone_have_colours_and_a_legend():
    figure = draw_overlay(*sides(slow(), fast()))
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [
        "forward",
        "backward",
        "step",
        "grads",
        "adam",
        "read",
        "stall (device waits)",
    ]


def test_bad_input_ends_with_rule_value_and_remedy(tmp_path, runs):
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "half.json.gz").write_bytes(runs[1].read_bytes()[:50])
    (tmp_path / "text.json").write_text("not JSON")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "empty").mkdir()
    Timeline().write(tmp_path / "none.json")
    Timeline((Span("moon", "orbit", 0, 1, 1),)).write(tmp_path / "moon.json")
    for name, words in {
        "missing.json": ["doesn't exist", "zenflow train --out"],
        "empty": ["must hold a trace.json", "zenflow train --out"],
        "runs": ["must hold a trace.json", "name one of its runs: slow"],
        "other.json": ["can't be read", "no 'zenflow' entry"],
        "half.json.gz": ["can't be read", "Timeline.write"],
        "text.json": ["can't be read", "Timeline.write"],
        "deep.json": ["can't be read", "Timeline.write"],
        "none.json": ["has none", "timeline_steps"],
        "moon.json": ["must share a lane", "has moon", "device, d2h, nvme"],
    }.items():
        result = compared(tmp_path / name, runs[1])
        assert result.exit_code == 2, name
        assert "Traceback" not in result.output
        for word in [name, *words]:
            assert word in result.output, (name, result.output)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", "3"], ["FIRST:LAST", "'3'"]),
        (["--steps", "4:2"], ["4:2", "swap"]),
        (["--steps", "8:9"], ["has none of 8 to 9", "whole steps are 1 to 2"]),
        (["--plot", "/no/such/folder/x.png"], ["/no/such/folder", "in a folder that exists"]),
        (["--plot", "x.painting"], ["x.painting", "must end in .png, .svg"]),
    ],
)
def test_bad_flags_end_with_rule_value_and_remedy(runs, flags, words):
    result = compared(*runs, *flags)
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output


def test_a_run_may_hold_a_compressed_trace(tmp_path):
    slow().write(tmp_path / "trace.json.gz")
    assert load(tmp_path).timeline == slow()
    with pytest.raises(ConfigError, match="doesn't exist"):
        load(tmp_path / "trace.json")
