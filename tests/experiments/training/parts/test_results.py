"""--overwrite replaces what a run has left, however it ended, and nothing else."""

import os
import subprocess
import sys

import pytest

from experiments.training.parts.files.results import others_in, remove_results
from tests.experiments.runs import FAST, ended, trained, write_text
from tests.starts import environment


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    text = write_text(tmp_path_factory.mktemp("text") / "text.txt")
    return [*FAST, "--data", text, "--steps", "2"]


KILLED = """
import os, signal, sys
import experiments.cli, experiments.training.run.single
from zenflow.console import main
def killed_at(number):
    left, real = [number], os.fsync
    def fsync(descriptor):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)
    os.fsync = fsync
    main()
folder, *words = sys.argv[1:]
for number in (1, 3):
    child = os.fork()
    if not child:
        sys.argv[1:] = [*words, "--out", f"{folder}/{number}"]
        killed_at(number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""
"""Runs that are killed as they write the first file to disk, or the third. They share a start."""


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory, flags):
    """Return the folder of the runs that were killed."""
    folder = tmp_path_factory.mktemp("killed")
    subprocess.run(
        [sys.executable, "-c", KILLED, folder, "train", *map(str, flags)],
        env=environment(),
        check=True,
    )
    return folder


@pytest.mark.parametrize("at", [1, 3])
def test_a_run_that_was_killed_as_it_began_is_replaced(killed_runs, flags, at):
    out = killed_runs / str(at)
    assert not (out / "config.json").exists()
    assert "new or empty" in ended(2, "--out", out, *flags)
    trained(out, "--overwrite", *flags)
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_drafts_of_a_run_are_its_own_and_others_are_not(tmp_path):
    for name in (".steps.jsonl.12", ".trace.json.7.draft", "steps.jsonl", ".lock"):
        (tmp_path / name).touch()
    (tmp_path / "decisions.jsonl").write_text("{}\n")
    (tmp_path / ".model.writing").mkdir()
    assert others_in(tmp_path) == []
    others = {".thesis.txt.12", ".steps.jsonl.twelve", "notes.txt"}
    for name in others:
        (tmp_path / name).touch()
    assert {path.name for path in others_in(tmp_path)} == others
    remove_results(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*others, ".lock"}


@pytest.mark.parametrize("name", ["model", "checkpoint", "start", "summary.json"])
def test_without_a_runs_config_nothing_of_a_runs_name_is_taken_for_it(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "steps.jsonl").write_text("{}\n")
    assert {path.name for path in others_in(tmp_path)} == {name, "steps.jsonl"}


def test_a_removal_that_ends_early_can_go_on(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    for name in ("steps.jsonl", "summary.json"):
        (tmp_path / name).write_text("{}\n")
    real, left = os.unlink, [1]

    def unlink(*arguments, **settings):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(*arguments, **settings)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt):
        remove_results(tmp_path)
    monkeypatch.setattr(os, "unlink", real)
    assert others_in(tmp_path) == []


def test_a_run_that_goes_on_is_not_overwritten(tmp_path, flags):
    out = trained(tmp_path / "run", *flags)
    said = ended(0, "--resume", out, "--overwrite", "--steps", "3")
    assert "3/3" in said
    assert len((out / "steps.jsonl").read_text().splitlines()) == 3


def test_nothing_is_removed_for_a_run_that_is_refused(tmp_path, flags):
    out = trained(tmp_path / "run", *flags)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    for wrong in (["--sequence", "100000"], ["--lr", "-1"], ["--model", "no/such"]):
        ended(2, "--out", out, "--overwrite", *flags, *wrong)
    ended(2, "--out", out, "--overwrite", "--replay", out / "decisions.jsonl")
    (out / "notes.txt").touch()
    said = ended(2, "--out", out, "--overwrite", *flags)
    assert "notes.txt is no part of one" in said
    (out / "notes.txt").unlink()
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
