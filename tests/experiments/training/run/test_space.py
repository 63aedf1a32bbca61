"""What checkpoints take on the disk: said before a run, stored once, or not at all."""

import json
import os
import shutil
import signal
from contextlib import nullcontext

import pytest
import torch
from rich.console import Console

from experiments.output.progress import Reporter
from experiments.training.parts.files import checkpoint, run_state
from experiments.training.parts.files.checkpoint import latest_checkpoint
from experiments.training.parts.setup import build_setup
from experiments.training.run import loop, stepper
from experiments.training.run.saved.space import bytes_of_checkpoint
from experiments.training.run.single import goes_on, run
from experiments.training.run.stop import StopRequest
from experiments.training.settings.training import TrainSettings
from tests.experiments.deadly_runs import differences
from tests.experiments.runs import FAST, ended, saved_tensors, steps, summary, trained, write_text
from zenflow import CheckpointError, ZenFlowAdamW
from zenflow.trace.timeline import Timeline


@pytest.fixture
def flags(tmp_path, blank_pictures):
    text = write_text(tmp_path / "text.txt")
    return [*FAST, "--data", text, "--warmup", "0"]


# ---- the size -----------------------------------------------------------------------------------

SETTINGS = [
    ("on_device", {}),
    ("zero_offload", {}),
    ("delayed", {}),
    ("zenflow", {"topk_ratio": 0.0}),
    ("zenflow", {"topk_ratio": 0.1}),
    ("zenflow", {"topk_ratio": 1.0}),
    ("zenflow", {"update_interval": 1}),
    ("zenflow", {"overlap_step": False}),
    ("zenflow", {"host_state": "compact"}),
    ("zenflow", {"second_moment": "factored"}),
    ("zenflow", {"second_moment": "factored", "host_state": "compact"}),
    ("zenflow_paper", {}),
    ("zenflow_paper", {"overlap_step": False}),
]
HALF = [
    ("zenflow", {"topk_ratio": 0.1}),
    ("zenflow_paper", {}),
]
"""Those with a state of their own each: their weights are also tried in half precision."""


@pytest.mark.parametrize(
    ("strategy", "knobs", "dtype"),
    [
        *((*setting, "float32") for setting in SETTINGS),
        *((*setting, "bfloat16") for setting in HALF),
    ],
    ids=str,
)
def test_the_size_that_is_said_is_that_of_the_checkpoint(
    tmp_path, blank_pictures, strategy, knobs, dtype
):
    settings = TrainSettings(
        strategy=strategy, knobs=knobs, dtype=dtype, model="own:mini", steps=10, batch_size=1,
        data=str(write_text(tmp_path / "text.txt")), sequence=16, device="cpu", device_threads=1,
        eval_batches=1, timeline_steps=0,
    )  # fmt: skip
    said = bytes_of_checkpoint(build_setup(settings))
    with StopRequest() as stop:
        run(settings, tmp_path / "run", reporter=Reporter(Console(quiet=True)), stop=stop)
    path = latest_checkpoint(tmp_path / "run" / "checkpoint")
    assert said == pytest.approx(sum(item.stat().st_size for item in path.iterdir()), rel=0.02)


def test_frozen_tensors_count(tmp_path):
    settings = TrainSettings(
        model="own:tiny", data=str(write_text(tmp_path / "text.txt")), device="cpu"
    )
    setup = build_setup(settings)
    before = bytes_of_checkpoint(setup)
    setup.model.register_buffer("table", torch.zeros(1000))
    assert bytes_of_checkpoint(setup) == before + 4000


# ---- room for it --------------------------------------------------------------------------------


def on_a_disk(monkeypatch, **usage):
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(**usage))


def test_size_and_room_are_in_the_first_lines(tmp_path, flags, monkeypatch):
    on_a_disk(monkeypatch, free=65_000_000_000)
    said = ended(0, "--out", tmp_path / "run", *flags, "--steps", "1")
    assert f"checkpoint 1.97 MB each, two while saving; 65 GB free in {tmp_path / 'run'}" in said


def test_a_start_where_two_do_not_fit_is_refused_before_anything_is_written(
    tmp_path, flags, monkeypatch
):
    on_a_disk(monkeypatch, free=3_000_000)
    said = ended(3, "--out", tmp_path / "run", *flags, "--steps", "1")
    assert "a checkpoint of this run takes 1.97 MB" in said
    assert "has 3 MB free in place of 3.94 MB: give another --out, leave checkpoints out" in said
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_resumed_run_needs_room_for_the_next_one_alone(tmp_path, flags, monkeypatch):
    out = trained(tmp_path / "run", *flags, "--steps", "2")
    on_a_disk(monkeypatch, free=3_000_000)
    ended(0, "--resume", out, "--steps", "3")
    on_a_disk(monkeypatch, free=1_000_000)
    said = ended(3, "--resume", out, "--steps", "4")
    assert "takes 1.97 MB" in said
    assert "has 1 MB free for the next one: free some" in said


def test_a_file_system_that_reports_no_sizes_is_trusted(tmp_path, flags, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(total=0, used=0, free=0)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        patch.setattr(loop, "save_run", lambda *_, **__: None)
        said = ended(0, "--out", tmp_path / "run", *flags, "--steps", "1")
    assert "does not say how much is free" in said


# ---- none ---------------------------------------------------------------------------------------


def test_without_checkpoints_a_run_is_the_same_and_saves_none(tmp_path, flags, monkeypatch):
    flags = [*flags, "--steps", "4", "--save-every", "1"]
    whole = trained(tmp_path / "whole", *flags)
    on_a_disk(monkeypatch, free=0)
    said = ended(0, "--out", tmp_path / "run", *flags, "--no-checkpoint")
    assert "checkpoint: none (--no-checkpoint)" in said
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert summary(tmp_path / "run")["eval_loss"] == summary(whole)["eval_loss"]


def test_resuming_a_run_without_checkpoints_says_that_it_was_to_have_none(tmp_path, flags):
    out = trained(tmp_path / "run", *flags, "--steps", "2", "--no-checkpoint")
    for more in ([], ["--checkpoint"]):
        said = ended(1, "--resume", out, "--steps", "4", *more)
        assert "--no-checkpoint" in said
        assert "start it again" in said
    assert f"--model {out / 'model'}" in ended(1, "--resume", out)


def signal_at(monkeypatch, step):
    """Let Ctrl-C come in a step."""
    real, calls = stepper.loss_of, []

    def loss(*of):
        calls.append(0)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*of)

    monkeypatch.setattr(stepper, "loss_of", loss)


def test_a_signal_ends_a_run_without_checkpoints_and_says_what_that_means(
    tmp_path, flags, monkeypatch, capfd
):
    signal_at(monkeypatch, 3)
    out = tmp_path / "run"
    said = ended(130, "--out", out, *flags, "--steps", "9", "--no-checkpoint")
    assert "Stopped by SIGINT after step 3; nothing of it can be resumed" in said
    assert "--resume" not in said
    assert "nothing is saved for resuming" in capfd.readouterr().err
    assert len(steps(out)) == summary(out)["steps"] == 3
    assert not (out / "checkpoint").exists()


def test_a_resumed_run_that_saves_no_more_goes_on_from_what_there_is(tmp_path, flags, monkeypatch):
    out = trained(tmp_path / "run", *flags, "--steps", "2")
    with monkeypatch.context() as patch:
        signal_at(patch, 2)
        said = ended(130, "--resume", out, "--steps", "9", "--no-checkpoint")
    assert "checkpoint: the one that is there, and no other" in said
    assert "after step 4; nothing was saved since it was resumed" in said
    assert "Go on from step-00000002 with: zenflow train --resume" in said
    ended(0, "--resume", out, "--checkpoint")
    assert differences(out, trained(tmp_path / "whole", *flags, "--steps", "9")) == []


def test_an_error_without_checkpoints_offers_none(tmp_path, flags, monkeypatch):
    monkeypatch.setattr(stepper, "loss_of", lambda *_: 1 / 0)
    said = ended(1, "--out", tmp_path / "run", *flags, "--steps", "2", "--no-checkpoint")
    assert "Nothing of it can be resumed, as --no-checkpoint asked" in said
    assert not (tmp_path / "run" / "checkpoint").exists()


# ---- what is in it ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_in_a_checkpoint_once(tmp_path, flags, dtype):
    out = trained(tmp_path / "run", *flags, "--steps", "5", "--dtype", dtype)
    names = saved_tensors(out)
    weights = [name for name in names if name.startswith("model/")]
    assert all(names[name].ndim == 1 for name in weights)  # norms that the device updates whole
    assert bool(weights) == (dtype == "float32")


def test_a_checkpoint_of_the_format_before_goes_on_with_the_same_bits(
    tmp_path, flags, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 3)
        patch.setattr(ZenFlowAdamW, "compact_states", lambda _: nullcontext())
        patch.setattr(run_state, "model_part", lambda model, *_: {"model": model.state_dict()})
        out = trained(tmp_path / "run", *flags, "--steps", "5")
    (state,) = out.glob("checkpoint/*/state.json")
    assert json.loads(state.read_text())["format"] == 3
    ended(0, "--resume", out, "--steps", "9")
    assert differences(out, trained(tmp_path / "whole", *flags, "--steps", "9")) == []


# ---- where it goes on, and how long saves take --------------------------------------------------


def test_where_a_run_goes_on_is_said_in_words():
    rows = [{"step": step} for step in range(1, 15)]
    told = "goes on from step 10 of 40; 4 steps of the log after it are taken again"
    assert goes_on(10, 40, rows) == told
    assert goes_on(13, 40, rows).endswith("; 1 step of the log after it is taken again")
    assert goes_on(14, 40, rows) == "goes on from step 14 of 40"


def test_a_resumed_run_says_what_it_takes_again(tmp_path, flags, monkeypatch):
    real, out = loop.save_run, tmp_path / "run"

    def save(folder, step, *args, **kwargs):
        if step > 4:
            raise CheckpointError("no space.")
        return real(folder, step, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_run", save)
        ended(1, "--out", out, *flags, "--steps", "8", "--save-every", "4")
    said = ended(0, "--resume", out)
    assert "goes on from step 4 of 8; 4 steps of the log after it are taken again" in said
    assert [row["step"] for row in steps(out)] == list(range(1, 9))


def test_a_save_has_a_span_and_its_time_in_the_log(tmp_path, flags):
    out = trained(tmp_path / "run", *flags, "--steps", "6", "--save-every", "3")
    took = [row.get("save_seconds") for row in steps(out)]
    (span,) = [span for span in Timeline.read(out / "trace.json").spans if span.name == "save"]
    assert [took.index(seconds) for seconds in took if seconds] == [3]
    assert span.end - span.start == pytest.approx(took[3], rel=0.2, abs=5e-3)
