"""One run at a time in a folder."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from experiments.training.parts.files import runlock
from experiments.training.parts.files.runlock import LOCK, locked
from tests.experiments.runs import FAST, ended, trained, write_text
from zenflow.errors import ConfigError

HOLD = """
import sys, time
from pathlib import Path
from experiments.training.parts.files.runlock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path/run."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_a_folder_in_use_is_refused_with_the_process_that_uses_it(tmp_path, holder):
    text = write_text(tmp_path / "text.txt")
    for flags in (["--out", tmp_path / "run"], ["--out", tmp_path / "run", "--overwrite"]):
        said = ended(2, *flags, *FAST, "--data", text, "--steps", "2")
        assert f"is in use by process {holder.pid} on " in said


def test_two_runs_do_not_go_on_with_one_folder(tmp_path):
    text = write_text(tmp_path / "text.txt")
    out = trained(tmp_path / "run", *FAST, "--data", text, "--steps", "2")
    with locked(out):
        assert f"process {os.getpid()}" in ended(2, "--resume", out, "--steps", "4")
    ended(0, "--resume", out, "--steps", "4")


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / LOCK).is_file()
    with locked(tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_run_that_never_began_leaves_no_folder_and_one_that_did_no_lock(tmp_path):
    text = write_text(tmp_path / "text.txt", num_lines=1)
    ended(2, "--out", tmp_path / "none", *FAST, "--data", text)
    assert not (tmp_path / "none").exists()
    (tmp_path / "mine").mkdir()
    ended(2, "--out", tmp_path / "mine", *FAST, "--data", text)
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_before_anything_loads(tmp_path, monkeypatch):
    real = os.open

    def read_only(path, *args, **kwargs):
        if str(path).endswith(LOCK):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    said = ended(2, "--out", tmp_path / "run", *FAST, "--steps", "2")
    assert "run is not (Read-only file system): choose another" in said
    (tmp_path / "file").touch()
    assert "Not a directory" in ended(2, "--out", tmp_path / "file" / "run", *FAST, "--steps", "2")


def test_a_file_system_without_locks_is_used_as_it_is(tmp_path, monkeypatch):
    import fcntl

    def none(*_):
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", none)
    folder = tmp_path / "run"
    with locked(folder):
        assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
        (folder / "steps.jsonl").write_text("{}")
    assert [path.name for path in folder.iterdir()] == ["steps.jsonl"]


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    """Its holder removes the file as it ends: between another's open and lock, say."""
    real, removed = runlock._lock, []

    def remove_first(descriptor, folder):
        if not removed:
            removed.append((folder / LOCK).unlink())
        real(descriptor, folder)

    monkeypatch.setattr(runlock, "_lock", remove_first)
    with (
        locked(tmp_path / "run"),
        pytest.raises(ConfigError, match="in use"),
        locked(tmp_path / "run"),
    ):
        pass
