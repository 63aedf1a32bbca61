"""Runs whose states are on a drive are those whose states are in memory."""

import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from experiments.training.parts.files import run_state
from tests.experiments.deadly_runs import kill_and_resume
from tests.experiments.runs import FAST, ended, steps, trained, write_text
from zenflow import CheckpointError, stream_weights

K0 = ("--topk-ratio", 0)


@pytest.fixture
def flags(tmp_path, blank_pictures):
    return [*FAST, *K0, "--data", write_text(tmp_path / "text.txt"), "--warmup", "0"]


def are_equal(run, other):
    ours, theirs = (load_file(out / "model" / "model.safetensors") for out in (run, other))
    losses, its = ([row["loss"] for row in steps(out)] for out in (run, other))
    return losses == its and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_with_a_drive_leaves_equal_weights_and_goes_on(tmp_path, flags, state_dir):
    flags = [*flags, "--grad-accum", 2, "--eval-every", 3]
    plain = trained(tmp_path / "plain", *flags, "--steps", 6)
    out = trained(
        tmp_path / "run", *flags, "--steps", 4, "--state-dir", state_dir, "--drive-tbw", 600
    )
    moved = shutil.copytree(state_dir, state_dir.with_name("moved"))
    ended(0, "--resume", out, "--steps", 6, "--state-dir", moved)
    assert are_equal(out, plain)
    assert sum(row["drive_read_bytes"] for row in steps(out)) > 0
    assert steps(out)[-1]["drive_worn"] > 0


@pytest.mark.parametrize(
    ("strategy", "own"),
    [
        ("zenflow", ["--strategy", "zenflow", "--stream"]),
        ("zero_offload", ["--strategy", "zero_infinity"]),
    ],
)
def test_a_run_with_streamed_weights_and_a_drive(
    tmp_path, flags, state_dir, monkeypatch, strategy, own
):
    visiting = partial(stream_weights, least_elements=1000)
    monkeypatch.setattr("experiments.training.parts.setup.stream_weights", visiting)
    plain = trained(tmp_path / "plain", *flags, "--steps", 4, "--strategy", strategy)
    out = trained(tmp_path / "run", *flags, "--steps", 4, "--state-dir", state_dir, *own)
    assert are_equal(out, plain)
    assert sum(row["weights_h2d_bytes"] for row in steps(out)) > 0
    assert sum(row["drive_read_bytes"] for row in steps(out)) > 0


def test_zero_infinity_needs_a_drive(tmp_path, flags):
    text = ended(2, *flags, "--out", tmp_path / "run", "--strategy", "zero_infinity")
    assert "zero_infinity has its states on a drive: give --state-dir FOLDER" in text


def test_a_save_that_fails_leaves_the_one_before(tmp_path, flags, state_dir, monkeypatch):
    """The run goes on behind it, and writes to no place of the checkpoint that is on the disk."""
    save, count = run_state.save_checkpoint, [0]

    def fails_later(*args, **kwargs):
        count[0] += 1
        if count[0] > 1:
            raise CheckpointError("the disk is full")
        return save(*args, **kwargs)

    plain = trained(tmp_path / "plain", *flags, "--steps", 9)
    monkeypatch.setattr(run_state, "save_checkpoint", fails_later)
    out = tmp_path / "run"
    more = ["--state-dir", state_dir, "--save-every", 2]
    assert "could not write" in ended(1, *flags, "--out", out, "--steps", 9, *more)
    monkeypatch.undo()
    ended(0, "--resume", out)
    assert are_equal(out, plain)


def test_a_folder_that_another_run_has(tmp_path, flags, state_dir):
    more = ["--steps", 2, "--state-dir", state_dir]
    trained(tmp_path / "one", *flags, *more)
    text = ended(2, *flags, "--out", tmp_path / "two", *more)
    assert "has the checkpoint of step 2" in text
    assert "--resume" in text
    assert not (tmp_path / "two" / "config.json").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--drive-tbw", 600], "give both, or neither"),
        (["--state-dir", ".", "--topk-ratio", 0.1], "give --topk-ratio 0"),
        (["--state-dir", ".", "--strategy", "delayed"], "give --topk-ratio 0"),
        (["--state-dir", ".", "--auto"], "no tuner yet"),
        (["--state-dir", ".", "--parallel", "ddp"], "for one process"),
        (["--state-dir", ".", "--compare"], "four strategies"),
        (["--state-dir", "/nowhere/at/all"], "is no folder"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, flags, more, message):
    assert message in ended(2, *flags, "--out", tmp_path / "run", "--steps", 2, *more)


@pytest.mark.slow
def test_a_run_that_is_killed_ends_with_the_bits_of_one_in_memory(tmp_path, state_dir):
    flags = [*FAST, *K0, "--data", write_text(tmp_path / "text.txt"), "--steps", 90]
    flags += ["--model", "own:small", "--save-minutes", 0]
    plain = trained(tmp_path / "plain", *flags)
    killed = [*flags, "--save-every", 5, "--state-dir", state_dir]
    deaths = kill_and_resume(tmp_path / "killed", killed, kills=4, inside=2, seed=4)
    assert deaths.total >= 4
    assert are_equal(tmp_path / "killed", plain)
