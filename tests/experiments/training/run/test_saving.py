"""Whatever ends a run, or keeps it from writing, its work is there to go on with."""

import errno
import json
import math
import os

import pytest
import torch

from experiments.training.parts.files.checkpoint import latest_checkpoint
from experiments.training.parts.files.step_log import StepLog, read_steps
from experiments.training.run import loop, stepper
from experiments.training.run.saved import pace as paces
from experiments.training.run.saved.pace import MOST_SHARE, RETRY_SECONDS, SavePace
from experiments.training.settings.rates import schedule_factor
from experiments.training.settings.training import TrainSettings
from tests.experiments.deadly_runs import differences
from tests.experiments.runs import FAST, ended, steps, summary, trained, write_text
from tests.experiments.training.parts.test_checkpoint import file_size_limit
from zenflow.device.cpu import CpuDevice
from zenflow.errors import CheckpointError


@pytest.fixture
def flags(tmp_path, blank_pictures):
    text = write_text(tmp_path / "text.txt")
    return [*FAST, "--data", text, "--gradients", "keep", "--warmup", "0"]


def last_step(out):
    path = latest_checkpoint(out / "checkpoint")
    return None if path is None else int(path.name[5:])


# ---- when ---------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_by_default_a_save_is_due_every_ten_minutes():
    clock = Clock()
    pace = SavePace(TrainSettings().save_every, TrainSettings().save_minutes, clock)
    due = []
    for minute in range(1, 40):
        clock.now = 60.0 * minute
        if pace.is_due(minute):
            due.append(minute)
            pace.saved(1.0)
    assert due == [10, 20, 30]


def test_compact_state_is_saved_by_steps_whatever_the_clock_says():
    compact = {"host_state": "compact"}
    pace = SavePace.of(TrainSettings(knobs=compact, save_minutes=1e-9))
    assert [step for step in range(1, 1001) if pace.is_due(step)] == [500, 1000]
    pace = SavePace.of(TrainSettings(knobs=compact, save_every=3))
    assert [step for step in range(1, 8) if pace.is_due(step)] == [3, 6]
    assert SavePace.of(TrainSettings(save_minutes=1e-9)).is_due(1)
    assert not SavePace.of(TrainSettings(knobs=compact, checkpoint=False)).is_due(500)


def test_saves_that_take_long_are_made_less_often():
    clock = Clock()
    pace, spent = SavePace(0, 10, clock), 0.0
    while clock.now < 20 * 3600:
        clock.now += 1.0
        if pace.is_due(1):
            clock.now += 90.0
            spent += 90.0
            pace.saved(90.0)
    assert 0.03 < spent / clock.now <= MOST_SHARE + 0.005


def test_a_save_is_due_by_steps_and_soon_after_one_that_failed():
    clock = Clock()
    pace = SavePace(4, 0, clock)
    assert [step for step in range(1, 10) if pace.is_due(step)] == [4, 8]
    pace.failed()
    clock.now = RETRY_SECONDS - 1
    assert not pace.is_due(9)
    clock.now = RETRY_SECONDS
    assert pace.is_due(9)
    pace.saved(1.0)
    clock.now = 1e9
    assert not pace.is_due(9)


@pytest.fixture
def saves(monkeypatch):
    """Steps of which a checkpoint is written."""
    real, done = loop.save_run, []

    def save(folder, step, *args, **kwargs):
        done.append(step)
        return real(folder, step, *args, **kwargs)

    monkeypatch.setattr(loop, "save_run", save)
    return done


def test_a_saved_step_is_not_saved_again(tmp_path, flags, saves):
    out = trained(tmp_path / "run", *flags, "--steps", "4", "--save-every", "2")
    ended(0, "--resume", out)
    assert saves == [2, 4]


def test_minutes_save_without_steps_and_nothing_else_does(monkeypatch, tmp_path, flags, saves):
    monkeypatch.setattr(paces, "MOST_SHARE", 1.0)  # else these tiny steps are too short to save
    trained(tmp_path / "often", *flags, "--steps", "3", "--save-minutes", "1e-9")
    trained(tmp_path / "never", *flags, "--steps", "3", "--save-minutes", "0")
    assert saves == [1, 2, 3, 3]


# ---- errors that end a run ----------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch):
    """Let the loss of a step go wrong until it is mended."""
    real = stepper.loss_of

    def break_step(number, make=lambda loss: loss * math.nan):
        calls = [0]

        def loss_of(*of):
            calls[0] += torch.is_grad_enabled()
            loss = real(*of)
            return make(loss) if calls[0] == number and torch.is_grad_enabled() else loss

        monkeypatch.setattr(stepper, "loss_of", loss_of)

    yield break_step
    monkeypatch.setattr(stepper, "loss_of", real)


def test_a_norm_that_is_not_finite_ends_a_run_that_is_saved(tmp_path, flags, broken):
    out = tmp_path / "run"
    broken(6)
    said = ended(1, "--out", out, *flags, "--steps", "8", "--save-every", "4")
    assert "the gradient norm of step 6 is nan" in said
    assert "everything up to step 5 is saved" in said
    assert f"zenflow train --resume {out} --lr 4e-05" in said
    assert "go on from step-00000004: remove" in said
    assert "zero_grad" not in said
    broken(0)
    ended(0, "--resume", out)
    assert differences(out, trained(tmp_path / "whole", *flags, "--steps", "8")) == []


@pytest.mark.parametrize("bad", [6, 8])
def test_where_it_is_noticed_late_only_the_checkpoint_from_before_is_good(
    tmp_path, flags, broken, monkeypatch, bad
):
    """A CPU whose reports come a step late stands for a GPU; step 8 is bad as it is saved."""
    monkeypatch.setattr(CpuDevice, "is_synchronous", False)
    whole = trained(tmp_path / "whole", *flags, "--steps", "8")
    out = tmp_path / "run"
    broken(bad)
    said = ended(1, "--out", out, *flags, "--steps", "8", "--save-every", "4")
    assert f"the gradient norm of step {bad} is nan" in said
    assert f"The newest checkpoint without it is {out}/checkpoint/step-00000004" in said
    assert last_step(out) == 4
    broken(0)
    ended(0, "--resume", out)
    assert differences(out, whole) == []


def test_a_rate_that_is_too_high_is_lowered_by_a_resume(tmp_path, flags):
    out = tmp_path / "run"
    assert "--resume" in ended(1, "--out", out, *flags, "--steps", "8", "--lr", "1e6")
    trained(tmp_path / "good", *flags, "--steps", "4")
    said = ended(0, "--resume", tmp_path / "good", "--steps", "8", "--lr", "1e-4")
    assert "lr was 0.0004, and is 0.0001 from here on" in said
    rates = [row["learning_rates"][0] for row in steps(tmp_path / "good")]
    assert rates == pytest.approx([4e-4] * 4 + [1e-4] * 4)
    noted = json.loads((tmp_path / "good" / "config.json").read_text())["changes"]
    assert noted == [{"after_step": 4, "name": "lr", "old": 4e-4, "new": 1e-4}]


def test_an_error_of_any_other_kind_is_saved_before_too(tmp_path, flags, broken):
    def no_memory(loss):
        torch.rand(3)  # as dropout does: the resumed run must not draw on from here
        raise torch.OutOfMemoryError("no memory")

    out = tmp_path / "run"
    broken(6, no_memory)
    said = ended(3, "--out", out, *flags, "--steps", "8")
    assert "memory is too small for this run (no memory)" in said
    assert "Everything up to step 5 is saved" in said
    broken(0)
    ended(0, "--resume", out)
    assert differences(out, trained(tmp_path / "whole", *flags, "--steps", "8")) == []


# ---- disks that are full ------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_run_going(tmp_path, flags, monkeypatch):
    real, failed = loop.save_run, []

    def full(folder, step, *args, **kwargs):
        if step == 4:
            failed.append(step)
            raise CheckpointError("no space.")
        return real(folder, step, *args, **kwargs)

    monkeypatch.setattr(loop, "save_run", full)
    said = ended(0, "--out", tmp_path / "run", *flags, "--steps", "8", "--save-every", "2")
    assert failed == [4]
    assert "Warning: no space. The run goes on" in said
    assert last_step(tmp_path / "run") == 8


def test_a_full_disk_ends_a_run_in_an_error_with_its_earlier_checkpoint_whole(tmp_path, flags):
    out = trained(tmp_path / "run", *flags, "--steps", "4")
    with file_size_limit(1_000_000):  # weights fit, a checkpoint does not
        said = ended(1, "--resume", out, "--steps", "8", "--save-every", "2")
    assert "Its newest checkpoint is of step 4, and is whole" in said
    assert f"zenflow train --resume {out}" in said
    assert summary(out)["steps"] == 8  # what could be written was
    ended(0, "--resume", out)
    assert differences(out, trained(tmp_path / "whole", *flags, "--steps", "8")) == []


def test_an_export_that_fails_loses_nothing(tmp_path, flags):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left")

    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.training.parts.models.pretrained.save_model", full)
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        said = ended(1, "--out", out, *flags, "--steps", "4")
    assert "No space left" in said
    assert "Everything up to step 4 is saved" in said
    assert not (out / "model").exists()
    ended(0, "--resume", out)
    assert (out / "model" / "model.safetensors").is_file()


def row(step):
    return {"step": step, "loss": 1.0, "seconds": 1.0, "stall_seconds": 0.0, "tokens": 8}


def test_rows_that_a_full_disk_does_not_take_are_written_when_there_is_room(tmp_path, monkeypatch):
    path = tmp_path / "steps.jsonl"
    log, real = StepLog(path), os.write
    log.append(row(1))

    def full(descriptor, data):
        monkeypatch.setattr(os, "write", fuller)
        return real(descriptor, data[:7])  # the last bytes there are

    def fuller(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    log.append(row(2))
    log.append(row(3))
    assert read_steps(path) == [row(1)]
    with pytest.raises(OSError, match="No space"):
        log.sync()
    monkeypatch.setattr(os, "write", real)
    log.append(row(4))
    log.close()
    assert read_steps(path) == [row(1), row(2), row(3), row(4)]


# ---- steps.jsonl --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [(b"garbage", "can't be read"), (b"\xff\x00", "can't be read"), (b"[]", "is no object"),
     (b'{"step": 3}', "lacks loss, seconds"), (b"", "can't be read"),
     (json.dumps(row("x")).encode(), "has a step of 'x', which is no number")],
)  # fmt: skip
def test_a_damaged_row_is_an_error_with_its_line_and_nothing_is_dropped(
    tmp_path, flags, line, words
):
    out = trained(tmp_path / "run", *flags, "--steps", "4")
    lines = (out / "steps.jsonl").read_bytes().splitlines()
    lines[2] = line
    (out / "steps.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    before = (out / "steps.jsonl").read_bytes()
    said = ended(2, "--resume", out, "--steps", "6")
    assert f"steps.jsonl, line 3: each line must be a step's JSON, but this one {words}" in said
    assert (out / "steps.jsonl").read_bytes() == before


def test_rows_that_are_missing_are_told(tmp_path, flags):
    out = trained(tmp_path / "run", *flags, "--steps", "4")
    lines = (out / "steps.jsonl").read_text().splitlines(keepends=True)
    (out / "steps.jsonl").write_text("".join(lines[:2]))
    assert "lacks the rows of 2 of the 4 steps taken" in ended(0, "--resume", out, "--steps", "6")


# ---- more steps than planned --------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_more_steps_go_on_as_the_longer_run_with_the_first_ones_rise(tmp_path, flags, schedule):
    flags = [*flags, "--schedule", schedule, "--warmup", "0.25"]
    out = trained(tmp_path / "run", *flags, "--steps", "8")
    assert "steps was 8, and is 16 from here on" in ended(0, "--resume", out, "--steps", "16")
    settings = TrainSettings(schedule=schedule, warmup=0.25)
    planned = [4e-4 * schedule_factor(settings, 8, done) for done in range(8)]
    planned += [4e-4 * schedule_factor(settings, 16, done, rising=2) for done in range(8, 16)]
    assert [row["learning_rates"][0] for row in steps(out)] == pytest.approx(planned, rel=1e-12)
    assert planned[8] > planned[7] > 0


def test_a_schedule_of_deepspeed_goes_on_and_keeps_its_length(tmp_path, blank_pictures):
    config = tmp_path / "run.json"
    params = {"warmup_num_steps": 3, "total_num_steps": 10}
    settings = {"schedule": "WarmupDecayLR", "schedule_params": params}
    config.write_text(json.dumps(settings))
    text = write_text(tmp_path / "text.txt")
    flags = [*FAST[: FAST.index("--schedule")], "--data", text, "--config", config]
    out = trained(tmp_path / "run", *flags, "--steps", "5")
    assert "steps was" not in ended(0, "--resume", out, "--steps", "8")
    made = TrainSettings(**settings)
    planned = [4e-4 * schedule_factor(made, 5, done) for done in range(8)]
    assert [row["learning_rates"][0] for row in steps(out)] == pytest.approx(planned, rel=1e-12)
    assert planned[1] == 0 < planned[2]
    del params["total_num_steps"]
    config.write_text(json.dumps(settings))
    other = trained(tmp_path / "other", *flags, "--steps", "5")
    assert "falls (WarmupDecayLR) until step 8" in ended(0, "--resume", other, "--steps", "8")


def test_a_longer_run_that_is_cut_off_goes_on_with_the_same_bits(tmp_path, flags, broken):
    flags = [*flags, "--schedule", "cosine", "--steps", "6"]
    one = trained(tmp_path / "one", *flags)
    ended(0, "--resume", one, "--steps", "12")
    two = trained(tmp_path / "two", *flags)
    broken(4, lambda loss: 1 / 0)
    ended(1, "--resume", two, "--steps", "12")
    broken(0)
    assert "steps was" not in ended(0, "--resume", two)
    assert last_step(two) == 12
    assert differences(one, two) == []


def test_a_tuned_run_keeps_the_schedule_that_its_decisions_were_taken_under(tmp_path, flags):
    flags = [*flags, "--schedule", "cosine", "--controller", "zen-auto"]
    out = trained(tmp_path / "run", *flags, "--strategy", "zenflow_paper", "--steps", "4")
    said = ended(1, "--resume", out, "--steps", "8")
    assert "a tuned run keeps its steps" in said
    assert "leave out --steps" in said


# ---- data that changed --------------------------------------------------------------------------


def test_data_that_changed_is_refused_and_a_copy_of_it_in_another_place_is_not(tmp_path, flags):
    text = tmp_path / "text.txt"
    out, before = trained(tmp_path / "run", *flags, "--steps", "2"), text.read_text()
    text.write_text(before.replace("line 7 says", "line 7 said"))
    said = ended(1, "--resume", out, "--steps", "4")
    assert "text.txt has changed since" in said
    assert "give a copy of what it was with --data" in said
    (tmp_path / "copy.txt").write_text(before)
    ended(0, "--resume", out, "--steps", "4", "--data", tmp_path / "copy.txt")


# ---- config.json --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "can't be read as JSON"), (b'{"settings": {"lr"', "as JSON (Expecting"),
     (b"\xff", "can't be read as JSON"), (b"[" * 50_000, "can't be read as JSON"),
     (b"[]", "must hold an object with the run's settings"),
     (b'{"settings": 5}', "must hold an object with the run's settings"),
     (b'{"settings": {"knobs": 5}}', "must hold an object with the run's settings"),
     (b'{"settings": {"lr": "fast"}}', "lr must be a number, but is 'fast'")],
)  # fmt: skip
def test_a_damaged_config_is_named_with_what_is_wrong(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    said = ended(2, "--resume", tmp_path)
    assert f"{tmp_path / 'config.json'}" in said
    assert words in said


@pytest.mark.parametrize("content", ["[]", '{"format": 3}', '{"step": "ten"}', ""])
def test_a_damaged_state_is_named_and_nothing_of_the_run_is_touched(tmp_path, flags, content):
    out = trained(tmp_path / "run", *flags, "--steps", "2")
    (out / "checkpoint" / "step-00000002" / "state.json").write_text(content)
    before = (out / "steps.jsonl").read_bytes()
    said = ended(1, "--resume", out, "--steps", "4")
    assert "step-00000002 can't be read" in said
    assert "restore it from a copy or start again" in said
    assert (out / "steps.jsonl").read_bytes() == before
