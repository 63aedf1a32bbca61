"""What holds of every study: it goes on where it was, mixes nothing, and its record re-derives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
from matplotlib.image import imread

from experiments.lab import catalogue, check
from experiments.lab import record as records
from experiments.lab import runner as running
from experiments.lab.runner import Runner
from experiments.lab.study import Scope
from zenflow.errors import ConfigError
from zenflow.provenance import provenance

UNMADE: tuple[str, ...] = ()
"""Studies whose first record is still to be made."""
KEYS = tuple(key for key in catalogue.names() if key not in UNMADE)
ALONE = ("paper/", "validation")
"""Studies with tests of their own that make them: those of one cell, and the one with ranks."""
LONG = (
    *("changed_weights", "factored_moments", "host_state_larger", "host_state_seeds"),
    "host_state_larger_small_rate",
    *("sst2", "stability", "stall_and_loss", "tuned_goodput"),
)
"""Studies whose parts have tests of their own, and take long together."""


class Counting:
    """A study whose cells are counted, and which Ctrl-C stops in a cell of choice."""

    def __init__(self, key, stop_at=None):
        self.study = replace(catalogue.load(key), run=self.run)
        self.made, self.stop_at, self.original = [], stop_at, self.study.run
        self.original = catalogue.load(key).run

    def run(self, cell, job):
        if len(self.made) == self.stop_at:
            (job.folder / "half").touch()
            self.stop_at = None
            raise KeyboardInterrupt
        self.made.append(cell.slug)
        return self.original(cell, job)


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
    """Let all of a test be of one commit, whatever happens to the tree meanwhile."""
    here = provenance()
    monkeypatch.setattr(running, "provenance", lambda: here)


def runner_of(study, folder, **changes):
    scope = Scope(smoke=True, **changes)
    return Runner(
        study=study, scope=study.scope(scope), folder=folder / "record", kept=folder / "kept"
    )


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=[pytest.mark.slow] if key in LONG else [])
        for key in KEYS
        if not key.startswith(ALONE)
    ],
)
def test_a_study_is_stopped_goes_on_makes_no_cell_twice_and_leaves_a_record(key, tmp_path):
    counting = Counting(key)
    cells = counting.study.cells(counting.study.scope(Scope(smoke=True)))
    assert len({cell.slug for cell in cells}) == len(cells), "cells that are told apart"
    counting.stop_at = min(1, len(cells) - 1)
    runner = runner_of(counting.study, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    assert not (tmp_path / "record").exists(), "a record appears whole"
    record = runner_of(counting.study, tmp_path).run()
    assert len(set(counting.made)) == len(counting.made), "no cell is made twice"
    assert {cell.slug for cell in cells} <= set(counting.made)
    assert {path.name for path in (tmp_path / "record").iterdir()} == {
        "record.json", "rows.jsonl", "README.md", "picture.png",
    }  # fmt: skip
    assert not (tmp_path / "kept").exists()
    assert len(record.rows) == len(cells)
    for cell, row in zip(cells, record.rows, strict=True):
        plain = json.loads(json.dumps({**cell.labels, **cell.settings}))
        assert plain.items() <= row.items(), "a row repeats what it is of"
    assert check.rederived(counting.study, record) == []
    assert imread(record.folder / "picture.png").std() > 0.02, "nothing is drawn"
    before = len(counting.made)
    assert runner_of(counting.study, tmp_path).run().rows == record.rows
    assert len(counting.made) == before, "a finished study is made no more"


def test_a_study_that_may_take_so_long_is_made_in_parts(tmp_path):
    def run(cell, job):
        time.sleep(0.02)
        return {"eval_loss": 1.0}

    study = replace(catalogue.load("update_rule"), run=run)
    left, rows = [], []
    for _ in range(4):  # the model that fine-tuning starts from comes first
        runner = runner_of(study, tmp_path)
        runner.seconds = 0.01
        rows.append(len(runner.run().rows))
        left.append(runner.left)
        assert runner.made == 1
    assert (left, rows) == ([3, 2, 1, 0], [0, 1, 2, 3])
    assert not (tmp_path / "kept").exists()


def test_several_workers_begin_no_cell_either_when_the_time_is_over(tmp_path, monkeypatch):
    def carried_out(key, cell, job):
        time.sleep(0.6)
        return {"eval_loss": 1.0}, 0.6

    monkeypatch.setattr(running, "_carried_out", carried_out)
    monkeypatch.setattr(
        running,
        "ProcessPoolExecutor",
        lambda count, context, initializer: ThreadPoolExecutor(count),
    )
    study = catalogue.load("accuracy")
    cells = [cell for cell in study.cells(Scope(seeds=(0,))) if not cell.needs]
    runner = runner_of(study, tmp_path)
    runner._end = time.monotonic() + 0.3  # by then the first two have begun, and not ended
    assert len(cells) > 2
    assert len(list(runner._together(cells, 2))) == 2


def test_a_record_inside_another_s_folder_is_a_group_s_or_stands_for_none(tmp_path):
    kept = records.needed("published")
    for name, folder in (("y", "1_y"), ("y", "2_gpu/y"), ("paper/x", "3_figures/x")):
        shutil.copytree(kept.folder, tmp_path / folder)
        header = json.dumps({**kept.header, "name": name})
        (tmp_path / folder / records.RECORD).write_text(header, encoding="utf-8")
    assert records.committed("y", tmp_path).folder == tmp_path / "1_y"
    assert records.committed("paper/x", tmp_path).folder == tmp_path / "3_figures/x"


def test_a_study_that_has_a_record_is_called_unmade_no_more():
    assert [key for key in UNMADE if records.committed(key) is not None] == []


@pytest.mark.parametrize("key", KEYS)
def test_a_committed_record_is_derived_again_as_committed(key):
    kept = records.committed(key)
    assert kept is not None
    study = catalogue.load(key)
    if not kept.is_of(study):
        pytest.skip("it is of a former rule: the study is to be made anew")
    assert check.rederived(study, kept) == []
    assert not kept.config["smoke"]
    assert {"hardware", "versions", "commit"} <= kept.header.keys()
    assert study.draw(kept.data(study)).axes


@pytest.mark.parametrize("key", KEYS)
def test_a_folder_of_another_study_or_other_settings_is_refused_and_left_alone(key, tmp_path):
    study = catalogue.load(key)
    other = KEYS[KEYS.index(key) - 1]
    for place in ("record", "kept"):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "mine.txt").write_text("of a person")
        with pytest.raises(ConfigError, match=r"no record of a study|something else"):
            runner_of(study, tmp_path).run()
        assert (folder / "mine.txt").read_text() == "of a person"
        (folder / "mine.txt").unlink()
        folder.rmdir()
    kept = records.committed(other)
    folder = tmp_path / "record"
    folder.mkdir()
    for name in (records.RECORD, records.ROWS):
        (folder / name).write_bytes((kept.folder / name).read_bytes())
    with pytest.raises(ConfigError, match=f"study was '{other}', now '{key}'"):
        runner_of(study, tmp_path).run()
    kept = records.committed(key)
    for name in (records.RECORD, records.ROWS):
        (folder / name).write_bytes((kept.folder / name).read_bytes())
    with pytest.raises(ConfigError, match="smoke was False, now True"):
        runner_of(study, tmp_path).run()


@pytest.mark.parametrize(
    ("name", "value"), [("commit", "0123456789ab"), ("hardware", {"cpu": "another", "cores": 1})]
)
def test_one_record_mixes_no_two_programs_or_machines(tmp_path, monkeypatch, name, value):
    counting = Counting("accuracy", stop_at=1)
    counting.original = lambda cell, job: dict.fromkeys(
        ("eval_loss", "captured_energy", "final_train_loss"), 1.0
    )
    with pytest.raises(KeyboardInterrupt):
        runner_of(counting.study, tmp_path).run()
    here = provenance()
    other = {**here, name: value}
    monkeypatch.setattr(running, "provenance", lambda: other)
    with pytest.raises(ConfigError, match=r"(commit|machine) was"):
        runner_of(counting.study, tmp_path).run()
    monkeypatch.setattr(running, "provenance", lambda: here)
    runner_of(counting.study, tmp_path).run()
    monkeypatch.setattr(running, "provenance", lambda: other)
    before = len(counting.made), (tmp_path / "record" / records.RECORD).read_bytes()
    runner_of(counting.study, tmp_path).run()
    after = len(counting.made), (tmp_path / "record" / records.RECORD).read_bytes()
    assert after == before, "what is whole is left alone, its origin too"
    with pytest.raises(ConfigError, match=r"(commit|machine) was"):
        runner_of(counting.study, tmp_path, seeds=(0, 1)).run()
    monkeypatch.setattr(running, "provenance", lambda: here)
    both = runner_of(counting.study, tmp_path, seeds=(0, 1)).run()
    assert {row["seed"] for row in both.rows} == {0, 1}, "more seeds complete a record"


def extended(study, folder, **changes):
    runner = runner_of(study, folder, seeds=(0, 1))
    runner.extend = True
    for name, value in changes.items():
        setattr(runner, name, value)
    return runner


@pytest.fixture
def added_to(tmp_path, monkeypatch):
    """Return a study with a record of one seed, and the commit that is now another one."""
    counting = Counting("accuracy")
    counting.original = lambda cell, job: {
        **dict.fromkeys(("captured_energy", "final_train_loss"), 1.0),
        "eval_loss": 2.0 + cell.settings["seed"],
    }
    counting.before = runner_of(counting.study, tmp_path).run()
    counting.made.clear()
    other = {**provenance(), "commit": "0123456789ab"}
    monkeypatch.setattr(running, "provenance", lambda: other)
    monkeypatch.setattr(records, "provenance", lambda: other)
    return counting


def test_another_commit_adds_rows_if_it_makes_the_first_and_the_last_as_they_are(
    added_to, tmp_path
):
    before = added_to.before
    cells = added_to.study.cells(Scope(smoke=True, seeds=(0,)))
    added_to.stop_at = 4  # two made again, two new ones
    with pytest.raises(KeyboardInterrupt):
        extended(added_to.study, tmp_path).run()
    assert added_to.made[:2] == [cells[0].slug, cells[-1].slug]
    assert records.read(before.folder).rows == before.rows, "a record changes whole"
    after = extended(added_to.study, tmp_path).run()
    assert added_to.made.count(cells[0].slug) == 1, "what came out again is noted"
    new = [row for row in after.rows if row["seed"] == 1]
    assert [row for row in after.rows if row["seed"] == 0] == list(before.rows)
    assert len(after.rows) == len(added_to.study.cells(Scope(smoke=True, seeds=(0, 1))))
    assert {row[records.COMMIT] for row in new} == {"0123456789ab"}
    assert after.commit == before.commit != "0123456789ab"
    assert after.header["versions"] == before.header["versions"]
    assert after.header["seconds"] > before.header["seconds"]
    page = (after.folder / records.README).read_text()
    assert f"Commit 0123456789ab added {len(new)} rows" in page
    assert check.rederived(added_to.study, after) == []


def test_cells_kept_of_a_record_that_was_begun_anew_name_their_commit(added_to, tmp_path):
    anew = runner_of(added_to.study, tmp_path, seeds=(0, 1))
    anew.folder = tmp_path / "anew"
    added_to.stop_at = len(added_to.before.rows) + 2
    with pytest.raises(KeyboardInterrupt):
        anew.run()
    after = extended(added_to.study, tmp_path).run()
    rows = {seed: [row for row in after.rows if row["seed"] == seed] for seed in (0, 1)}
    assert rows[0] == list(added_to.before.rows)
    assert {row.get(records.COMMIT) for row in rows[1]} == {"0123456789ab"}


@pytest.mark.parametrize("place", [0, -1])
def test_a_commit_that_makes_a_row_otherwise_adds_none(added_to, tmp_path, place):
    changed = added_to.study.cells(Scope(smoke=True, seeds=(0,)))[place].slug
    original = added_to.original
    added_to.original = lambda cell, job: {
        **original(cell, job), "eval_loss": 2.0 if cell.slug != changed else 2.001
    }  # fmt: skip
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"eval_loss was 2\.0, now 2\.001"):
            extended(added_to.study, tmp_path).run()
    assert records.read(added_to.before.folder).rows == added_to.before.rows
    with pytest.raises(ConfigError, match="commit was"):
        extended(added_to.study, tmp_path, extend=False).run()


def test_time_of_a_record_made_in_parts_is_that_of_its_cells(tmp_path):
    def run(cell, job):
        time.sleep(0.05)
        return {"eval_loss": 1.0}

    study = replace(catalogue.load("accuracy"), run=run)
    told = []
    for seconds in (0.01, 0.01, None):
        runner = runner_of(study, tmp_path)
        runner.seconds = seconds
        record = runner.run()
        told.append(record.header["seconds"] / len(record.rows))
        if len(told) == 1:
            shutil.rmtree(tmp_path / "kept")  # as on another day's machine
    assert told == pytest.approx([told[0]] * 3, rel=0.3)
    assert told[0] >= 0.05


def finished(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("row.json")}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_done_and_says_how_to_go_on(number, tmp_path):
    """The whole command with two processes: a terminal stops all of them, `kill` the first."""
    command = [sys.executable, "-m", "experiments.cli", "study", "accuracy", "--smoke",
               "--seeds", "0,1", "--workers", "2", "--record", str(tmp_path)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    for _ in range(1200):
        if len(finished(tmp_path)) >= 2:
            break
        time.sleep(0.1)
    cells = psutil.Process(process.pid).children(recursive=True)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert cells
    assert not psutil.wait_procs(cells, timeout=30)[1], "processes of cells go on"
    assert "the same command goes on" in output
    before = finished(tmp_path)
    assert len(before) >= 2
    assert not (tmp_path / "accuracy").exists()
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    record = records.read(tmp_path / "accuracy")
    kept = [json.loads(line) for line in (record.folder / records.ROWS).read_text().splitlines()]
    assert kept == record.rows
    study = catalogue.load("accuracy")
    assert len(kept) == len(study.cells(Scope(smoke=True, seeds=(0, 1))))
