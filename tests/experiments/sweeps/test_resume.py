"""A sweep answers every point once, whatever interrupts it."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pandas as pd
import psutil
import pytest

from experiments.sweeps import table as tables
from experiments.sweeps.columns import Batch
from experiments.sweeps.execution import journal as journals
from experiments.sweeps.execution import pool
from experiments.sweeps.execution import run as runs
from experiments.sweeps.execution.journal import HEADER, PARTS, Journal
from experiments.sweeps.execution.pool import local_batches
from experiments.sweeps.execution.run import run_sweep
from experiments.sweeps.grid import Sweep
from experiments.sweeps.pictures import outputs
from experiments.sweeps.table import CSV, PARQUET, read_table, table_of
from tests.experiments.deadly_sweep import DeadlySweep
from tests.experiments.swept import (
    BASE,
    CARD,
    GRID,
    PROCESSES,
    all_rows,
    run,
    sweep_of,
    table_of_all,
)
from zenflow.errors import ConfigError, ZenFlowError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sweep that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    done = run(*BASE, *CARD, *GRID, "--workers", "1", "--out", str(folder))
    assert done.exit_code == 0, done.output
    return folder


def test_the_table_has_every_point_in_order_and_where_it_comes_from(whole):
    table = pd.read_csv(whole / CSV)
    assert list(table["S"]) == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    assert list(table["dram"]) == [20, 40, 80] * 3
    assert (table["status"] == "ok").all()
    parquet = pd.read_parquet(whole / PARQUET)
    own = read_table(whole)
    pd.testing.assert_frame_equal(parquet, own, check_dtype=False)
    origin = json.loads((whole / "provenance.json").read_text())
    assert origin["sweep"]["axes"] == {"S": [1, 2, 4], "dram": [20.0, 40.0, 80.0]}
    assert origin["finished"] == origin["num_points"] == 9
    assert set(table.columns) == origin["columns"].keys()
    assert origin["sessions"][0]["hardware"]["cpu"]
    assert "nothing here was measured" in origin["kind"]
    assert "assumed as in rtx4090-desktop: host, link, drives" in origin["assumed"]
    assert {"picture.png", "pareto.png"} <= {file.name for file in whole.iterdir()}
    assert not [file for file in whole.iterdir() if file.name.startswith(".")]


def points_in(folder):
    """What lies in the parts of a journal: index and status of every row."""
    parts = [pd.read_parquet(path) for path in sorted((folder / PARTS).glob("*.parquet"))]
    return pd.concat(parts) if parts else pd.DataFrame({"point": [], "status": []})


@pytest.mark.parametrize("kept", [0, 1, 4])
def test_a_killed_sweep_goes_on_to_the_same_table(whole, tmp_path, monkeypatch, kept):
    monkeypatch.setattr(journals, "_SECONDS", 0.0)  # a part for every batch
    sweep, folder = sweep_of("S=1,2,4", "dram=20:80:x2"), tmp_path / "killed"
    expected = table_of_all(sweep)
    with monkeypatch.context() as patched:
        patched.setattr(runs, "local_batches", partial(_killed, after=kept))
        with pytest.raises(_Kill):
            run_sweep(sweep, folder, 1)
    assert len(points_in(folder)) == kept
    for part in list((folder / PARTS).glob("*.parquet"))[:1]:  # and a disk that fails
        part.with_name("999999.parquet").write_bytes(part.read_bytes()[:-300])
    for _ in range(2):  # and once more, with nothing left to do
        outcome = run_sweep(sweep, folder, 1)
        assert outcome.exit_code == 0
        pd.testing.assert_frame_equal(table_of(sweep, outcome.found), expected)
    assert sorted(points_in(folder)["point"]) == list(range(9))


class _Kill(BaseException):
    """Ends a sweep without a word."""


def _killed(*arguments, after):
    """Yield some of the points one by one, then be killed."""
    batch = Batch.joined(list(local_batches(*arguments)))
    for place in range(after):
        yield batch.where(np.array([place]))
    raise _Kill


def test_parts_stay_few_however_long_a_sweep_takes(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(journals.time, "monotonic", lambda: now[0])
    journal = Journal(tmp_path / "a", {})
    batch = Batch.of([0], {"status": "ok"})
    with journal.open({}):
        for second in range(0, 3600, 4):
            now[0] = second / 4
            journal.add(batch)
    assert 60 < len(list((tmp_path / "a" / PARTS).iterdir())) < 250
    assert len(points_in(tmp_path / "a")) == 900


def test_another_sweep_or_another_file_in_the_folder_is_refused(whole, tmp_path):
    before = (whole / HEADER).read_bytes()
    other = run(*BASE, *CARD, "--vary", "S=1,2,4", "--vary", "dram=20,40", "--out", str(whole))
    assert other.exit_code == 2
    assert "dram (20.0, 40.0, 80.0, now 20.0, 40.0)" in " ".join(other.output.split())
    turned = run(*BASE, *CARD, *GRID[2:], *GRID[:2], "--out", str(whole))
    assert "order of its axes" in " ".join(turned.output.split())
    assert (whole / HEADER).read_bytes() == before
    (tmp_path / "notes.txt").write_text("mine")
    strange = run(*BASE, *CARD, *GRID, "--out", str(tmp_path))
    assert strange.exit_code == 2
    assert "must be new" in strange.output


def test_two_sweeps_do_not_share_a_folder(tmp_path):
    sweep = sweep_of("S=1,2").to_dict()
    with (
        Journal(tmp_path / "a", sweep).open({}),
        pytest.raises(ConfigError, match="another sweep is at work"),
        Journal(tmp_path / "a", sweep).open({}),
    ):
        pass


def test_a_killed_worker_loses_no_point(tmp_path):
    sweep = sweep_of("S=1,2,4", "dram=20:400:20", "strategy=zenflow,superoffload")
    killed = []
    rows = {}
    for batch in local_batches(sweep, range(sweep.num_points), PROCESSES, lambda: False):
        for index, row in batch.rows():
            assert index not in rows
            rows[index] = row
        if len(rows) > (0, 60, math.inf)[len(killed)]:
            child = next(child for child in _children() if child not in killed)
            os.kill(child, signal.SIGKILL)
            killed.append(child)
    assert len(set(killed)) == 2
    expected = sweep_of("S=1,2,4", "dram=20:400:20", "strategy=zenflow,superoffload")
    assert rows == all_rows(expected)
    assert not _children()


def _children():
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child.pid] if any("spawn_main" in word for word in child.cmdline()) else []
    return found


def test_a_point_that_kills_its_workers_is_reported_and_tried_again_later(tmp_path, monkeypatch):
    sweep = sweep_of("S=1:64:1")
    deadly = DeadlySweep(**{name: getattr(sweep, name) for name in Sweep.__dataclass_fields__})
    assert len(pool.tasks_of(range(64), PROCESSES)[0]) > 1  # others are in its task, and behind it
    found = Batch.joined(list(local_batches(deadly, range(64), PROCESSES, lambda: False)))
    assert sorted(found.points) == list(range(64))
    rows = dict(found.rows())
    assert rows.pop(1) == {"status": "failed", "reason": pool.LOST}
    expected = all_rows(sweep)
    del expected[1]
    assert rows == expected
    monkeypatch.setattr(pool, "_MOST_LOST", 0)
    with pytest.raises(ZenFlowError, match="have died"):
        list(local_batches(deadly, range(3), PROCESSES, lambda: False))
    journal = Journal(tmp_path / "a", sweep.to_dict())
    with journal.open({}):
        journal.add(found)
    assert list(Journal(tmp_path / "a", sweep.to_dict()).done.points) == [0, *range(2, 64)]


LONG = ("--vary", "S=1,2,4", "--vary", "dram=20:520:0.5", "--gradients", "keep")

SLOW = """
import time
from experiments.cli import main
from experiments.sweeps.execution import journal
from experiments.sweeps.pictures import outputs

def add_and_rest(*given, add=journal.Journal.add):
    add(*given)
    time.sleep(0.3)

journal.Journal.add = add_and_rest
journal._SECONDS = 0.0
outputs.write_pictures = lambda *_: []
main()
"""
"""The command, which keeps each batch and rests then, and draws no picture: a sweep takes seconds
and little work."""


def _process(folder, *axes):
    """Start a sweep of two processes."""
    words = [*BASE, *CARD, *axes, "--workers", str(PROCESSES), "--out", str(folder)]
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def _started(folder, *axes):
    """Start a sweep of two processes; return it as soon as it has kept something."""
    process = _process(folder, *axes)
    deadline = time.monotonic() + 60
    while not len(points_in(folder)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def test_a_killed_sweep_leaves_no_process_behind(tmp_path):
    process = _started(tmp_path / "out", *LONG)
    children = psutil.Process(process.pid).children()
    process.kill()
    process.wait(timeout=60)
    process.stdout.close()
    assert len(children) >= PROCESSES
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(tmp_path):
    process = _started(tmp_path / "out", *LONG)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "are kept: the same command" in " ".join(output.split())
    assert "Traceback" not in output
    origin = json.loads((tmp_path / "out" / HEADER).read_text())
    kept = len(Journal(tmp_path / "out", origin["sweep"]).done)
    assert 0 < kept < 3003
    assert kept == len(points_in(tmp_path / "out"))
    assert len(pd.read_csv(tmp_path / "out" / CSV)) == kept


def test_ctrl_c_while_workers_load_ends_without_a_word_of_theirs(tmp_path):
    process = _process(tmp_path / "out", "--vary", "dram=20:520:0.5")
    deadline = time.monotonic() + 60
    while not any("spawn_main" in word for word in _words_of_children(process.pid)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)  # loading takes seconds; before that the interpreter itself says nothing
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output


def test_ctrl_c_while_pictures_are_drawn_leaves_the_table_and_says_so(tmp_path, monkeypatch):
    words = [*BASE, *CARD, *GRID, "--workers", "1", "--out", str(tmp_path / "out")]

    def interrupted(*unused):
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(outputs, "write_pictures", interrupted)
        stopped = run(*words)
    assert stopped.exit_code == 130, stopped.output
    assert "the same command" in " ".join(stopped.output.split())
    assert len(read_table(tmp_path / "out")) == 9
    assert run(*words).exit_code == 0
    assert (tmp_path / "out" / outputs.PICTURE).exists()


def test_ctrl_c_in_any_command_is_told_as_shells_expect_it(monkeypatch):
    def interrupted(*unused):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Sweep, "check", interrupted)
    assert run(*BASE, *CARD, *GRID).exit_code == 130


def test_a_table_that_has_grown_long_leaves_no_short_one(tmp_path, monkeypatch):
    short, long = table_of_all(sweep_of("S=1,2")), table_of_all(sweep_of("S=1,2,4"))
    tables.write_frame(short, tmp_path)
    monkeypatch.setattr(tables, "MOST_LINES", 2)
    tables.write_frame(long, tmp_path)
    assert len(read_table(tmp_path)) == 3


def _words_of_children(pid):
    words = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            words += child.cmdline()
    return words
