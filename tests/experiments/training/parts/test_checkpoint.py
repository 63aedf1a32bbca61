import contextlib
import itertools
import json
import os
import random
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.training.parts.files import checkpoint
from experiments.training.parts.files.checkpoint import (
    checkpoints,
    flatten,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from experiments.training.run.saved.random_state import generators, random_state, set_random_state
from zenflow.errors import CheckpointError


class KilledError(BaseException):
    """Stands for a kill: nothing catches it, so nothing is cleaned up."""


def state(value: float) -> dict:
    return {"weights": torch.full((1000, 100), value), "note": "x"}


def value_of(folder: Path) -> float:
    return load_checkpoint(folder).state["weights"][0, 0].item()


def test_nested_state_comes_back_with_its_types(tmp_path):
    slab = torch.arange(12.0)
    tied = torch.ones(3)
    given = {
        "state": {0: {"exp_avg": slab[:4], "step": 7}, 1: {"exp_avg": slab[4:], "step": 8}},
        "groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "none": None, "on": True}],
        "tied": (tied, tied),
        "half": torch.ones(2, 2, dtype=torch.bfloat16).t(),
        "empty": torch.empty(0),
        "scalar": torch.tensor(True),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }
    save_checkpoint(tmp_path, 7, given)
    found = load_checkpoint(tmp_path).state
    assert found["state"][1]["step"] == 8
    assert torch.equal(found["state"][1]["exp_avg"], slab[4:])
    assert found["groups"] == given["groups"]
    assert isinstance(found["groups"][0]["betas"], tuple)
    assert found["half"].dtype is torch.bfloat16
    for name in ("half", "empty", "scalar", "bytes", "transposed"):
        assert torch.equal(found[name], given[name])
        assert found[name].dtype is given[name].dtype
    assert torch.equal(found["tied"][1], tied)


def test_generators_go_on_from_a_checkpoint_as_they_were(tmp_path):
    """A data set or a model may draw from any of them."""

    def drawn():
        ours = random.random(), random.gauss(0.0, 1.0)
        return *ours, torch.rand(()).item(), np.random.rand(), np.random.normal()

    drawn()  # a normal number's twin waits to be drawn
    save_checkpoint(tmp_path, 1, random_state(generators()))
    expected = drawn(), drawn()
    set_random_state(load_checkpoint(tmp_path).state)
    assert (drawn(), drawn()) == expected


def test_things_that_json_and_safetensors_cannot_hold_are_refused():
    with pytest.raises(TypeError, match="tensors and plain values, but a/b is"):
        flatten({"a": {"b": object()}}, "", {})


def test_newer_checkpoint_replaces_the_older(tmp_path):
    save_checkpoint(tmp_path, 1, state(1.0))
    path = save_checkpoint(tmp_path, 2, state(2.0))
    assert load_checkpoint(tmp_path).step == 2
    assert value_of(tmp_path) == 2.0
    assert sorted(found.name for found in tmp_path.iterdir()) == [path.name]


@contextmanager
def file_size_limit(num_bytes: int):
    """Make the operating system refuse larger files, as a full disk would."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_refused_write_leaves_the_former_checkpoint_and_says_what_to_do(tmp_path):
    save_checkpoint(tmp_path, 1, state(1.0))
    with (
        file_size_limit(50_000),
        pytest.raises(CheckpointError, match=r"large.*MB free") as caught,
    ):
        save_checkpoint(tmp_path, 2, state(2.0))
    assert "step-00000001 is whole" in str(caught.value)
    assert value_of(tmp_path) == 1.0
    assert sorted(found.name for found in tmp_path.iterdir()) == ["step-00000001"]


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, state(1.0))
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(checkpoint, "write_tensors", lambda *_: pytest.fail("wrote"))
    with pytest.raises(CheckpointError, match=r"0\.40 MB free"):
        save_checkpoint(tmp_path, 2, state(2.0))
    assert value_of(tmp_path) == 1.0


CHANGES = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")
"""Calls by which a process changes a disk, and after any of which it may be killed."""


class Killer:
    """Lets a process make so many changes to the disk, and no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lives: int) -> None:
        self.lives = lives
        for name in CHANGES:
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, real):
        def call(*args, **kwargs):
            self.lives -= 1
            if self.lives < 0:
                raise KilledError
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize("step", [2, 1], ids=["of the next step", "of the same step"])
def test_killed_anywhere_a_save_leaves_a_whole_checkpoint(tmp_path, step):
    outcomes = set()
    for lives in itertools.count():
        folder = tmp_path / str(lives)
        save_checkpoint(folder, 1, state(1.0))
        with pytest.MonkeyPatch.context() as patch:
            Killer(patch, lives)
            try:
                save_checkpoint(folder, step, state(2.0))
                is_over = True
            except KilledError:
                is_over = False
        outcomes.add(value_of(folder))
        save_checkpoint(folder, 3, state(3.0))  # whatever was left does not stand in the way
        assert value_of(folder) == 3.0
        assert [found.name for found in folder.iterdir()] == ["step-00000003"]
        if is_over:
            break
    assert lives > 8
    assert outcomes == {1.0, 2.0}


def test_first_save_killed_anywhere_leaves_none_or_a_whole_one(tmp_path):
    found = set()
    for lives in range(12):
        folder = tmp_path / str(lives)
        with pytest.MonkeyPatch.context() as patch:
            Killer(patch, lives)
            with contextlib.suppress(KilledError):
                save_checkpoint(folder, 1, state(1.0))
        found.add(latest_checkpoint(folder) and value_of(folder))
    assert found == {None, 1.0}


@pytest.mark.parametrize("content", [b"step-00000009\n", b"\xff\xfe", b"../../elsewhere\n"])
def test_pointer_of_an_earlier_version_leads_nowhere(tmp_path, content):
    save_checkpoint(tmp_path / "elsewhere", 9, state(9.0))
    folder = tmp_path / "run" / "checkpoint"
    save_checkpoint(folder, 1, state(1.0))
    (folder / "latest").write_bytes(content)
    assert value_of(folder) == 1.0


def test_saves_that_keep_the_others_leave_the_newest_to_load(tmp_path):
    for step in (9, 10, 100_000_000):
        save_checkpoint(tmp_path, step, state(step), keep_others=True)
    assert load_checkpoint(tmp_path).step == 100_000_000
    assert len(checkpoints(tmp_path)) == 3


def test_directory_without_a_checkpoint_is_named(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load_checkpoint(tmp_path)


FILES = ("tensors.safetensors", "state.json")


@pytest.mark.parametrize("name", FILES)
def test_file_that_was_cut_afterwards_is_an_error_not_a_wrong_run(tmp_path, name):
    path = save_checkpoint(tmp_path, 1, state(1.0)) / name
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="can't be read"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_two_flipped_bytes_anywhere_are_found(tmp_path, name):
    path = save_checkpoint(tmp_path, 1, {"weights": torch.ones(50), "rate": 0.5}) / name
    good = path.read_bytes()
    for place in range(0, len(good) - 1, 3):
        path.write_bytes(
            good[:place] + bytes(byte ^ 1 for byte in good[place : place + 2]) + good[place + 2 :]
        )
        with pytest.raises(CheckpointError, match=r"changed since it was written|is of format"):
            load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b"", b"5", b'{"format": 3}', b"\xff", b"[" * 50_000,
                b'{"format": 3, "content": 5, "checksum": ""}'],
)  # fmt: skip
def test_state_that_is_anything_else_is_explained(tmp_path, content):
    path = save_checkpoint(tmp_path, 1, state(1.0))
    (path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="changed since it was written"):
        load_checkpoint(tmp_path)


def test_damage_is_answered_with_the_newest_older_checkpoint_that_is_whole(tmp_path):
    paths = [save_checkpoint(tmp_path, n, state(n), keep_others=True) for n in (1, 2, 3)]
    for path in paths[1:]:
        (path / "tensors.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="step-00000003 to go on from step-00000001"):
        load_checkpoint(tmp_path)
    for path in paths[1:]:
        shutil.rmtree(path)
    assert load_checkpoint(tmp_path).step == 1


def test_checkpoint_of_another_version_is_not_called_damaged(tmp_path):
    path = save_checkpoint(tmp_path, 1, state(1.0)) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    with pytest.raises(CheckpointError, match="resume with the version that wrote it"):
        load_checkpoint(tmp_path)


def most_memory() -> int:
    """Return the most bytes that this process has held since it was asked last."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(peak) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_save_copies_one_tensor_at_a_time_at_most(tmp_path):
    """The optimizer's state are views of slabs: as much again would not fit beside them."""
    slab = torch.zeros(64, 1 << 18)  # 64 MiB
    views = {str(row): slab[row] for row in range(64)}
    save_checkpoint(tmp_path, 1, views)  # what Python needs once
    most_memory()
    before = most_memory()
    save_checkpoint(tmp_path, 2, {**views, "other order": slab.t()[:, :8]})
    assert most_memory() - before < 24 << 20
