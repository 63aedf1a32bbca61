"""A sweep answers every point once, whatever interrupts it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest

from experiments.sweeps.execution import pool
from experiments.sweeps.execution.journal import NAME, Journal
from experiments.sweeps.execution.pool import local_rows
from experiments.sweeps.execution.run import Engine, run_sweep
from experiments.sweeps.grid import Sweep
from experiments.sweeps.table import CSV, PARQUET, read_table, table_of
from tests.experiments.deadly_sweep import DeadlySweep
from tests.experiments.swept import BASE, CARD, GRID, PROCESSES, all_rows, run, sweep_of
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


@pytest.mark.parametrize("cut", [0, 40, -1, -30, -700])
def test_a_torn_sweep_goes_on_to_the_same_table(whole, tmp_path, cut):
    journal = (whole / NAME).read_bytes()
    folder = tmp_path / "torn"
    folder.mkdir()
    (folder / NAME).write_bytes(journal[: cut or None] if cut else b"")
    for _ in range(2):  # and once more, with nothing left to do
        outcome = run_sweep(sweep_of("S=1,2,4", "dram=20:80:x2"), folder, Engine(workers=1))
        assert outcome.exit_code == 0
        assert (folder / CSV).read_bytes() == (whole / CSV).read_bytes()
    points = [json.loads(line).get("point") for line in (folder / NAME).read_bytes().splitlines()]
    found = [point for point in points if point is not None]
    assert sorted(found) == list(range(9))


def test_another_sweep_or_another_file_in_the_folder_is_refused(whole, tmp_path):
    before = (whole / NAME).read_bytes()
    other = run(*BASE, *CARD, "--vary", "S=1,2,4", "--vary", "dram=20,40", "--out", str(whole))
    assert other.exit_code == 2
    assert "dram (20.0, 40.0, 80.0, now 20.0, 40.0)" in " ".join(other.output.split())
    turned = run(*BASE, *CARD, *GRID[2:], *GRID[:2], "--out", str(whole))
    assert "order of its axes" in " ".join(turned.output.split())
    assert (whole / NAME).read_bytes() == before
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
    for index, row in local_rows(sweep, range(sweep.num_points), PROCESSES, lambda: False):
        assert index not in rows
        rows[index] = row
        if len(rows) in (5, 40):
            children = _children()
            os.kill(children[0], signal.SIGKILL)
            killed.append(children[0])
    assert len(set(killed)) == 2
    expected = sweep_of("S=1,2,4", "dram=20:400:20", "strategy=zenflow,superoffload")
    assert rows == all_rows(expected)
    assert not _children()


def _children():
    import psutil

    found = psutil.Process().children()
    return [
        child.pid for child in found
        if any("spawn_main" in word for word in child.cmdline())
    ]  # fmt: skip


def test_a_point_that_kills_its_workers_is_reported_and_tried_again_later(tmp_path, monkeypatch):
    sweep = sweep_of("S=1,2,4")
    deadly = DeadlySweep(**{name: getattr(sweep, name) for name in Sweep.__dataclass_fields__})
    monkeypatch.setattr(pool, "MOST_TRIES", 2)
    rows = dict(local_rows(deadly, range(3), PROCESSES, lambda: False))
    assert [rows[index]["status"] for index in range(3)] == ["ok", "failed", "ok"]
    monkeypatch.setattr(pool, "_MOST_LOST", 0)
    with pytest.raises(ZenFlowError, match="have died"):
        list(local_rows(deadly, range(3), PROCESSES, lambda: False))
    journal = Journal(tmp_path / "a", sweep.to_dict())
    with journal.open({}):
        for index, row in rows.items():
            journal.add(index, row)
    assert sorted(Journal(tmp_path / "a", sweep.to_dict()).rows) == [0, 2]


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(tmp_path):
    words = [*BASE, *CARD, "--vary", "S=1,2,4", "--vary", "dram=20:520:0.5", "--method",
             "simulate", "--workers", str(PROCESSES), "--out", str(tmp_path / "out")]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    journal = tmp_path / "out" / NAME
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 20):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "are kept: the same command" in " ".join(output.split())
    assert "Traceback" not in output
    kept = len(Journal(tmp_path / "out", _sweep_in(journal)).rows)
    assert 20 <= kept < 3003
    assert len(pd.read_csv(tmp_path / "out" / CSV)) == kept


def test_ctrl_c_while_workers_load_ends_without_a_word_of_theirs(tmp_path):
    words = [*BASE, *CARD, "--vary", "dram=20:520:0.5", "--method", "simulate", "--workers",
             str(PROCESSES), "--out", str(tmp_path / "out")]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
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


def _words_of_children(pid):
    words = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            words += child.cmdline()
    return words


def _sweep_in(journal):
    return json.loads(journal.read_bytes().splitlines()[0])["sweep"]


def test_dask_answers_as_processes_do(tmp_path):
    pytest.importorskip("distributed")
    sweep = sweep_of("S=1,2,4", "dram=20,40,80", "gpu=rtx4090,h100")
    expected = table_of(sweep, all_rows(sweep))
    with _Quietly():
        outcome = run_sweep(sweep, tmp_path / "a", Engine(name="dask", workers=1))
    assert outcome.exit_code == 0
    pd.testing.assert_frame_equal(table_of(sweep, outcome.rows), expected)


@pytest.fixture
def no_dask(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)


@pytest.mark.usefixtures("no_dask")
def test_without_dask_it_is_said_what_to_install(tmp_path):
    done = run(*BASE, *CARD, *GRID, "--engine", "dask", "--out", str(tmp_path / "a"))
    assert done.exit_code == 2
    assert "zenflow-offload[cluster]" in " ".join(done.output.split())
    assert not (tmp_path / "a").exists()


class _Quietly:
    """Dask's own loops warn about sockets and tasks that end with them; that is not ours."""

    def __enter__(self):
        import warnings

        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *error):
        self._caught.__exit__(*error)
