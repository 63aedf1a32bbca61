import json
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from experiments import checkpoint
from experiments.checkpoint import (
    flatten,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    unflatten,
)
from zenflow.errors import CheckpointError


class KilledError(BaseException):
    """Stands for a kill: nothing catches it, so nothing is cleaned up."""


def state(value: float) -> dict:
    return {"weights": torch.full((1000, 100), value), "note": "x"}


def value_of(folder: Path) -> float:
    return load_checkpoint(folder).state["weights"][0, 0].item()


def test_nested_state_comes_back_with_its_types():
    slab = torch.arange(12.0)
    tied = torch.ones(3)
    given = {
        "state": {0: {"exp_avg": slab[:4], "step": 7}, 1: {"exp_avg": slab[4:], "step": 8}},
        "groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "none": None, "on": True}],
        "tied": (tied, tied),
        "half": torch.ones(2, 2, dtype=torch.bfloat16).t(),
        "empty": torch.empty(0),
    }
    tensors: dict[str, torch.Tensor] = {}
    structure = json.loads(json.dumps(flatten(given, "", tensors)))
    found = unflatten(structure, tensors)
    assert found["state"][1]["step"] == 8
    assert torch.equal(found["state"][1]["exp_avg"], slab[4:])
    assert found["groups"] == given["groups"]
    assert isinstance(found["groups"][0]["betas"], tuple)
    assert found["half"].dtype is torch.bfloat16
    storages = [t.untyped_storage().data_ptr() for t in tensors.values() if t.numel()]
    assert len(set(storages)) == len(storages)


def test_things_that_json_and_safetensors_cannot_hold_are_refused():
    with pytest.raises(TypeError, match="tensors and plain values, but a/b is"):
        flatten({"a": {"b": object()}}, "", {})


def test_newer_checkpoint_replaces_the_older(tmp_path):
    save_checkpoint(tmp_path, 1, state(1.0))
    path = save_checkpoint(tmp_path, 2, state(2.0))
    assert load_checkpoint(tmp_path).step == 2
    assert value_of(tmp_path) == 2.0
    assert sorted(found.name for found in tmp_path.iterdir()) == ["latest", path.name]


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
    with file_size_limit(50_000), pytest.raises(CheckpointError, match="free space") as caught:
        save_checkpoint(tmp_path, 2, state(2.0))
    assert "step-00000001 is whole" in str(caught.value)
    assert value_of(tmp_path) == 1.0
    assert sorted(found.name for found in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, state(1.0))
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(checkpoint, "save_file", lambda *_, **__: pytest.fail("wrote"))
    with pytest.raises(CheckpointError, match="free space"):
        save_checkpoint(tmp_path, 2, state(2.0))
    assert value_of(tmp_path) == 1.0


def kill_in_tensors(monkeypatch):
    def torn(tensors, path, **_):
        Path(path).write_bytes(b"\x00" * 100)
        raise KilledError

    monkeypatch.setattr(checkpoint, "save_file", torn)


def kill_before_rename(monkeypatch):
    def killed(self, target):
        raise KilledError

    monkeypatch.setattr(Path, "rename", killed)


def kill_before_pointer(monkeypatch):
    real = checkpoint.write_text

    def killed(path, text):
        if path.name == "latest":
            raise KilledError
        real(path, text)

    monkeypatch.setattr(checkpoint, "write_text", killed)


@pytest.mark.parametrize("kill", [kill_in_tensors, kill_before_rename, kill_before_pointer])
def test_killed_save_leaves_the_former_checkpoint(tmp_path, monkeypatch, kill):
    save_checkpoint(tmp_path, 1, state(1.0))
    with monkeypatch.context() as patch:
        kill(patch)
        with pytest.raises(KilledError):
            save_checkpoint(tmp_path, 2, state(2.0))
    assert value_of(tmp_path) == 1.0
    save_checkpoint(tmp_path, 3, state(3.0))
    assert value_of(tmp_path) == 3.0
    assert sorted(found.name for found in tmp_path.iterdir()) == ["latest", "step-00000003"]


def test_first_save_killed_before_its_pointer_still_loads(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        kill_before_pointer(patch)
        with pytest.raises(KilledError):
            save_checkpoint(tmp_path, 1, state(1.0))
    assert value_of(tmp_path) == 1.0


def test_directory_without_a_checkpoint_is_named(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_file_that_was_cut_afterwards_is_an_error_not_a_wrong_run(tmp_path, name):
    path = save_checkpoint(tmp_path, 1, state(1.0)) / name
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="can't be read"):
        load_checkpoint(tmp_path)
