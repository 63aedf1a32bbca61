import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.decisions.file import (
    Decision,
    DecisionLog,
    Header,
    WindowRecord,
    read_decisions,
)
from autotune.decisions.records import line_of, record_of
from tests.test_layering import modules_after
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

START = Knobs.of(ZenFlowConfig())


def knobs(**changes):
    return Knobs.from_dict({**START.to_dict(), **changes})


def header(settings=None):
    return Header(
        settings=settings or {"steps": 30},
        knobs=START,
        largest_interval=16,
        hardware={"cpu": "x"},
        versions={},
        commit=None,
    )


def decision(step, old, new, **changes):
    values = {
        "step": step, "window": 1, "by": "twin", "old": old, "new": new,
        "predicted_step_seconds": 0.9, "measured_step_seconds": 1.0, "gain": 0.1, "error": 0.02,
        "rho": 0.3, "reason": "the host had time to spare",
    }  # fmt: skip
    return Decision(**{**values, **changes})


def window(step, **changes):
    values = {
        "step": step, "window": 1, "knobs": START, "step_seconds": 1.0, "stall_seconds": 0.1,
        "predicted_step_seconds": None, "goodput": 10.0, "rho": 0.3, "constants": {"host": 1.1},
        "search_seconds": 0.2,
    }  # fmt: skip
    return WindowRecord(**{**values, **changes})


SECOND = knobs(update_interval=8)
THIRD = knobs(update_interval=8, topk_ratio=0.2)


def write(path, *, finished=True):
    """Write a small run: two windows, two decisions, and its end."""
    log = DecisionLog(path)
    log.start(header())
    log.append(window(4))
    log.append(decision(5, START, SECOND))
    log.append(window(9, knobs=SECOND, predicted_step_seconds=1.5))
    log.append(decision(9, SECOND, THIRD, by="zen-auto", gain=None))
    if finished:
        log.end(step=30, search_seconds=0.5, run_seconds=60.0)
    log.close()
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "decisions.jsonl")


def test_what_is_written_is_read(path):
    found = read_decisions(path)
    assert found.header == header()
    assert found.windows[1] == window(9, knobs=SECOND, predicted_step_seconds=1.5)
    assert found.changes == [(5, SECOND), (9, THIRD)]
    assert found.decisions[1].by == "zen-auto"
    assert (found.end.step, found.end.num_decisions) == (30, 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["n"] for line in lines] == list(range(6))
    kinds = ["header", "window", "decision", "window", "decision", "end"]
    assert [line["kind"] for line in lines] == kinds


def test_every_line_is_there_before_the_run_goes_on(tmp_path):
    log = DecisionLog(tmp_path / "decisions.jsonl")
    log.start(header())
    log.append(window(4))
    assert log.path.read_text().count("\n") == log.num_lines == 2
    log.close()


def test_a_file_cut_anywhere_is_refused_or_is_the_whole(path):
    content, whole = path.read_bytes(), read_decisions(path)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        if length == len(content) - 1:  # all but the last line's end
            assert read_decisions(path) == whole
            continue
        with pytest.raises(ConfigError, match=rf"line|{path.name} is empty"):
            read_decisions(path)


def test_a_run_that_was_cut_off_is_to_be_resumed(tmp_path):
    path = write(tmp_path / "decisions.jsonl", finished=False)
    with pytest.raises(ConfigError, match="ends at line 5 without its end record") as caught:
        read_decisions(path)
    assert f"resume the run in {tmp_path}" in str(caught.value)
    path.write_text(path.read_text() + '{"n": 5, "ki')
    with pytest.raises(ConfigError, match=r"line 6: not JSON .* cut off: .* resume the run"):
        read_decisions(path)


@pytest.mark.parametrize("number", range(1, 7))
def test_a_lost_or_a_doubled_line_is_named(path, number):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: number - 1] + lines[number:]))
    named = "ends at line 5" if number == 6 else f"line {number}: n must be {number - 1}"
    with pytest.raises(ConfigError, match=named):
        read_decisions(path)
    path.write_text("".join(lines[:number] + lines[number - 1 :]))
    with pytest.raises(ConfigError, match=f"line {number + 1}: n must be {number}"):
        read_decisions(path)


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (1, {"kind": "window"}, "line 1: field 'format' is unknown"),
        (1, {"format": 1}, "line 1: format must be 2, but is 1: another version"),
        (2, {"kind": "windwo"}, "line 2: kind 'windwo' is unknown; did you mean 'window'"),
        (2, {"goodputt": 3}, "line 2: field 'goodputt' is unknown; did you mean 'goodput'"),
        (2, {"step": 4.5}, "line 2: step can't be 4.5"),
        (2, {"step": True}, "line 2: step can't be True"),
        (2, {"step": 0}, "line 2: step must be at least 1"),
        (2, {"rho": "much"}, "line 2: rho can't be 'much'"),
        (2, {"constants": {"host": "x"}}, "line 2: constants can't be"),
        (2, {"knobs": 3}, "line 2: knobs can't be 3"),
        (2, {"n": True}, "line 2: n must be 1, but is True"),
        (3, {"by": "chance"}, "line 3: by can't be 'chance'"),
        (3, {"reason": None}, "line 3: reason can't be None"),
        (3, {"new": {**SECOND.to_dict(), "topk_ratio": 1.5}}, r"line 3: new: .*topk_ratio must"),
        (3, {"new": {**SECOND.to_dict(), "update_interval": "x"}}, "line 3: new: "),
        (3, {"new": {"topk_ratio": 0.1}}, "line 3: new: knobs need .* is missing"),
        (3, {"old": SECOND.to_dict(), "new": THIRD.to_dict()}, "line 3: old is k=0.1 S=8 .*S=4"),
        (3, {"new": START.to_dict()}, "line 3: new and old are both"),
        (4, {"step": 4}, "line 4: step must be at least 5, but is 4"),
        (5, {"step": 5}, "line 5: step must be at least 6, but is 5"),
        (6, {"step": 8}, "line 6: the run ended at step 8, but has a line of step 9"),
        (6, {"num_decisions": 3}, "line 6: num_decisions is 3, but there are 2"),
    ],
)
def test_a_line_that_was_changed_is_named(path, number, changes, message):
    lines = path.read_text().splitlines(keepends=True)
    lines[number - 1] = json.dumps({**json.loads(lines[number - 1]), **changes}) + "\n"
    path.write_text("".join(lines))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        read_decisions(path)


@pytest.mark.parametrize("number", range(1, 7))
def test_a_missing_field_is_named(path, number):
    lines = path.read_text().splitlines(keepends=True)
    for key in list(json.loads(lines[number - 1]))[2:]:
        content = json.loads(lines[number - 1])
        del content[key]
        changed = [*lines[: number - 1], json.dumps(content) + "\n", *lines[number:]]
        path.write_text("".join(changed))
        with pytest.raises(ConfigError, match=f"line {number}: .*{key}"):
            read_decisions(path)


def test_lines_of_other_kinds_in_the_wrong_place_are_named(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def put(*order):
        chosen = [{**lines[index], "n": n} for n, index in enumerate(order)]
        path.write_text("".join(json.dumps(line) + "\n" for line in chosen))

    put(1, 2, 3, 4, 5)
    with pytest.raises(ConfigError, match="line 1: the header must be the first line"):
        read_decisions(path)
    put(0, 0)
    with pytest.raises(ConfigError, match="line 2: the header must be the first line"):
        read_decisions(path)
    put(0, 1, 2, 3, 4, 5, 4)
    with pytest.raises(ConfigError, match="line 7: it stands behind the end record"):
        read_decisions(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[1]\n", r"line 1: must be an object, but is \[1\]"),
        ('{"n": 0, "n": 0}\n', "line 1: not JSON .*comes twice"),
        ('{"n": NaN}\n', "line 1: not JSON .*NaN is no number"),
        ('{"n": 0, "kind": ["header"]}\n', "line 1: kind .* is unknown"),
    ],
)
def test_what_is_no_decisions_file_is_said(path, text, message):
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_decisions(path)


def test_a_file_that_is_absent_or_no_text_is_said(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        read_decisions(tmp_path / "absent.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_decisions(tmp_path / "binary.jsonl")


def test_a_resumed_file_is_as_if_it_had_never_gone_further(path, tmp_path):
    whole = path.read_text()
    for num_lines in range(1, 6):
        log = DecisionLog(path)
        log.resume(num_lines, header())
        assert log.num_lines == num_lines
        assert path.read_text() == "".join(whole.splitlines(keepends=True)[:num_lines])
        log.close()
        write(path)
    log = DecisionLog(path)
    log.resume(3, header({"steps": 50}))
    log.append(decision(7, SECOND, THIRD))
    log.end(step=50, search_seconds=0.0, run_seconds=1.0)
    log.close()
    found = read_decisions(path)
    assert found.changes == [(5, SECOND), (7, THIRD)]
    assert found.header.settings == {"steps": 50}
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_resuming_drops_a_torn_line_and_refuses_a_file_that_lacks_one(tmp_path):
    path = write(tmp_path / "decisions.jsonl", finished=False)
    path.write_text(path.read_text() + '{"n": 5, "ki')
    log = DecisionLog(path)
    log.resume(5, header())
    assert len(log.decisions) == 2
    log.close()
    with pytest.raises(ConfigError, match="has 5 lines, but had 6"):
        log.resume(6, header())
    with pytest.raises(ConfigError, match="other knobs"):
        log.resume(5, replace(header(), knobs=THIRD))
    assert len(path.read_text().splitlines()) == 5


def test_a_record_that_does_not_follow_is_not_written(tmp_path):
    log = DecisionLog(tmp_path / "decisions.jsonl")
    with pytest.raises(ConfigError, match="not open"):
        log.append(window(1))
    log.start(header())
    with pytest.raises(ConfigError, match=r"old is .*S=8.* but in force were .*S=4"):
        log.append(decision(5, SECOND, THIRD))
    log.append(decision(5, START, SECOND))
    with pytest.raises(ConfigError, match="steps ascend"):
        log.append(decision(5, SECOND, THIRD))
    log.end(step=9, search_seconds=0.0, run_seconds=1.0)
    log.close()
    assert read_decisions(log.path).changes == [(5, SECOND)]


real = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(max_size=20)
some_knobs = st.builds(
    Knobs,
    topk_ratio=st.floats(0, 1),
    update_interval=st.integers(1, 64),
    select_interval=st.integers(0, 500),
)
records = st.one_of(
    st.builds(
        Header,
        settings=st.dictionaries(text, st.none() | st.booleans() | real | text),
        knobs=some_knobs,
        largest_interval=st.none() | st.integers(1),
        hardware=st.dictionaries(text, text),
        versions=st.dictionaries(text, text),
        commit=st.none() | text,
    ),
    st.builds(
        WindowRecord,
        step=st.integers(0),
        window=st.integers(0),
        knobs=some_knobs,
        step_seconds=real,
        stall_seconds=real,
        predicted_step_seconds=st.none() | real,
        goodput=real,
        rho=real,
        constants=st.dictionaries(text, real),
        search_seconds=real,
    ),
    st.builds(
        Decision,
        step=st.integers(0),
        window=st.integers(0),
        by=st.sampled_from(["twin", "zen-auto"]),
        old=some_knobs,
        new=some_knobs,
        predicted_step_seconds=st.none() | real,
        measured_step_seconds=st.none() | real,
        gain=st.none() | real,
        error=st.none() | real,
        rho=st.none() | real,
        reason=text,
    ),
)


@given(records, st.integers(0, 1000))
def test_any_record_comes_back_from_its_line(record, n):
    line = line_of(n, record)
    assert line.count("\n") == 1
    assert record_of(n, line) == record


def test_numbers_that_are_not_finite_are_null():
    line = line_of(0, window(1, goodput=math.nan, predicted_step_seconds=math.inf))
    found = record_of(0, line)
    assert json.loads(line)["goodput"] is None
    assert math.isnan(found.goodput)
    assert found.predicted_step_seconds is None


@pytest.mark.parametrize(
    "module", ["decisions.file", "online.logged_controller", "online.zen_auto"]
)
def test_decisions_are_read_without_torch(module):
    assert not {"torch", "optuna"} & modules_after(f"import autotune.{module}")
