"""Files are replaced whole, on file systems of all kinds, and errors name them."""

import errno
import os
import shutil
import stat
from types import SimpleNamespace

import pytest

from experiments.output.files import free_space, fsync_folder, write_text
from experiments.sweeps.execution import journal
from experiments.training.parts.files import checkpoint
from experiments.training.parts.files.checkpoint import load_checkpoint, save_checkpoint
from experiments.training.parts.files.runlock import locked
from zenflow.errors import CheckpointError


def answering(monkeypatch, name, number, *, only_folders=True):
    """Let one of the system's calls answer an error, for directories alone."""
    real = getattr(os, name)

    def call(target, *arguments, **settings):
        is_folder = (
            os.path.isdir(target) if name == "open" else stat.S_ISDIR(os.fstat(target).st_mode)
        )
        if is_folder or not only_folders:
            raise OSError(number, os.strerror(number))
        return real(target, *arguments, **settings)

    monkeypatch.setattr(os, name, call)


NO_FLUSH = [errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF]


@pytest.mark.parametrize("number", NO_FLUSH)
def test_a_folder_that_cannot_be_flushed_is_written_all_the_same(tmp_path, monkeypatch, number):
    answering(monkeypatch, "fsync", number)
    write_text(tmp_path / "a.txt", "text")
    assert (tmp_path / "a.txt").read_text() == "text"
    save_checkpoint(tmp_path / "checkpoint", 1, {"step": 1})
    assert load_checkpoint(tmp_path / "checkpoint").step == 1


@pytest.mark.parametrize("number", [*NO_FLUSH, errno.EACCES, errno.EPERM])
def test_a_folder_that_cannot_be_opened_is_written_all_the_same(tmp_path, monkeypatch, number):
    answering(monkeypatch, "open", number)
    write_text(tmp_path / "a.txt", "text")
    assert (tmp_path / "a.txt").read_text() == "text"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fails_or_is_full_stays_an_error(tmp_path, monkeypatch, number):
    answering(monkeypatch, "fsync", number)
    with pytest.raises(OSError, match=str(tmp_path)) as caught:
        fsync_folder(tmp_path)
    assert caught.value.errno == number
    with pytest.raises(CheckpointError, match=os.strerror(number)):
        save_checkpoint(tmp_path / "checkpoint", 1, {"step": 1})


def test_a_folder_that_is_not_there_stays_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        fsync_folder(tmp_path / "none")


def test_an_error_names_the_file_and_not_its_draft(tmp_path, monkeypatch):
    answering(monkeypatch, "fsync", errno.ENOSPC, only_folders=False)
    with pytest.raises(OSError, match="No space left") as caught:
        write_text(tmp_path / "a.txt", "text")
    assert caught.value.filename == str(tmp_path / "a.txt")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError) as caught:
        write_text(tmp_path / "none" / "a.txt", "text")
    assert caught.value.filename == str(tmp_path / "none" / "a.txt")


@pytest.fixture(params=["no blocks", "no answer"])
def no_sizes(request, monkeypatch):
    """A file system that does not say how large it is."""

    def usage(_):
        if request.param == "no answer":
            raise OSError(errno.ENOSYS, "none")
        return SimpleNamespace(total=0, used=0, free=0)

    monkeypatch.setattr(shutil, "disk_usage", usage)


@pytest.mark.usefixtures("no_sizes")
def test_where_no_sizes_are_told_a_save_is_tried(tmp_path, monkeypatch):
    import torch

    assert free_space(tmp_path) is None
    save_checkpoint(tmp_path / "checkpoint", 1, {"weight": torch.ones(4)})
    assert load_checkpoint(tmp_path / "checkpoint").step == 1
    monkeypatch.setattr(
        checkpoint, "write_tensors", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "x"))
    )
    with pytest.raises(CheckpointError, match="step-00000001 is whole"):
        save_checkpoint(tmp_path / "checkpoint", 2, {"weight": torch.ones(4)})


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL])
def test_where_there_are_no_locks_folders_are_used_without(tmp_path, monkeypatch, number):
    import fcntl

    def none(*_):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", none)
    with locked(tmp_path / "run"), journal._locked(tmp_path):
        pass
