"""A Trainer whose knobs are chosen while it trains: its decisions, replays and resumes."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason='needs the extra: pip install "zenflow-offload[hf]"')
pytest.importorskip("accelerate", reason='needs the extra: pip install "zenflow-offload[hf]"')

from transformers import TrainerCallback, TrainingArguments

from autotune.decisions.file import read_decisions
from tests.experiments.tuned import ByTheClock, Rehearsed, decide_by
from tests.models import weights_of
from tests.zenflow.integrations.hf import Recorded, arguments
from tests.zenflow.integrations.tiny import CONFIG, are_equal, decoder, texts
from zenflow import CheckpointError, ConfigError
from zenflow.integrations.transformers import ZenFlowTrainer

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours
FILE = "decisions.jsonl"


class Recording(Recorded, ZenFlowTrainer):
    pass


def make(folder, *, auto=True, callbacks=None, given=None, **args):
    return Recording(
        model=decoder(),
        args=arguments(TrainingArguments, folder, **args),
        train_dataset=texts(),
        callbacks=callbacks,
        **{"zenflow": CONFIG, "auto": auto, **(given or {})},
    )


def trained(folder, *, resume=None, **how):
    trainer = make(folder, **how)
    trainer.train(resume_from_checkpoint=resume)
    trainer.zenflow_optimizer.close()
    return trainer


def are_alike(left, right):
    last = min(len(left.losses), len(right.losses))
    return left.losses[-last:] == right.losses[-last:] and are_equal(
        weights_of(left.model), weights_of(right.model)
    )


class StopAt(TrainerCallback):
    """Ends the run, as a kill would, behind a save."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_save = control.should_training_stop = state.global_step == self.step


def test_what_was_decided_is_written_logged_and_repeated_bit_for_bit(tmp_path, monkeypatch):
    made = decide_by(monkeypatch, ByTheClock)
    run = trained(tmp_path / "run", logging_steps=1)
    found = read_decisions(tmp_path / "run" / FILE)
    assert len(found.decisions) >= 3
    assert found.end.step == 9
    assert found.end.run_seconds > 0
    assert tuple(run.tuning.decisions) == found.decisions
    rows = [row for row in run.state.log_history if "zenflow/decision_step" in row]
    assert [(row["step"], row["zenflow/topk_ratio"]) for row in rows] == [
        (decision.step, decision.new.topk_ratio) for decision in found.decisions
    ]
    assert all(isinstance(value, int | float) for row in rows for value in row.values())
    losses = [row["step"] for row in run.state.log_history if "loss" in row]
    assert losses == list(range(1, 10))  # a decision's row takes the place of no other
    again = trained(tmp_path / "again", auto={"replay": tmp_path / "run" / FILE})
    assert are_alike(run, again)
    assert len(made) == 1  # and nobody was asked
    other = trained(tmp_path / "other")
    assert not are_alike(run, other)  # the clock decided otherwise


def test_a_run_that_was_cut_off_goes_on_with_its_decisions(tmp_path, monkeypatch):
    made = decide_by(monkeypatch, Rehearsed)
    bounded = {"auto": {"largest_staleness": 3}}  # which another S than the given one meets
    whole = trained(tmp_path / "whole", **bounded)
    trained(tmp_path / "cut", callbacks=[StopAt(4)], **bounded)
    with pytest.raises(ConfigError, match="without its end record"):
        trained(tmp_path / "no", auto={"replay": tmp_path / "cut" / FILE})
    (tmp_path / "cut" / FILE).write_text("{")  # as a kill leaves it
    resumed = trained(tmp_path / "cut", resume=True)  # from there, whatever bounds are now
    assert made[-1].turns == made[0].turns  # the controller went on where it was
    assert are_alike(whole, resumed)
    files = [read_decisions(tmp_path / name / FILE) for name in ("whole", "cut")]
    assert files[0].changes == files[1].changes
    again = trained(tmp_path / "again", auto={"replay": tmp_path / "cut" / FILE})
    assert are_alike(whole, again)


def test_a_replay_that_was_cut_off_goes_on(tmp_path, monkeypatch):
    decide_by(monkeypatch, ByTheClock)
    whole = trained(tmp_path / "whole")
    auto = {"replay": tmp_path / "whole" / FILE}
    trained(tmp_path / "cut", auto=auto, callbacks=[StopAt(5)])
    assert are_alike(whole, trained(tmp_path / "cut", auto=auto, resume=True))


def test_files_of_other_runs_are_refused(tmp_path, monkeypatch):
    decide_by(monkeypatch, Rehearsed)
    trained(tmp_path / "run", callbacks=[StopAt(4)])
    with pytest.raises(ConfigError, match=r"another run: learning_rate was 0\.005, now 0\.1"):
        trained(tmp_path / "run", resume=True, learning_rate=0.1)
    with pytest.raises(ConfigError, match="steps was 9, now 12"):
        trained(tmp_path / "run", resume=True, max_steps=12)
    trained(tmp_path / "plain", auto=False, callbacks=[StopAt(4)])
    with pytest.raises(CheckpointError, match="was not tuned"):
        trained(tmp_path / "plain", resume=True)
    assert not (tmp_path / "plain" / FILE).exists()


def test_a_trainer_is_tuned_once(tmp_path, monkeypatch):
    decide_by(monkeypatch, Rehearsed)
    trainer = trained(tmp_path, max_steps=2)
    with pytest.raises(RuntimeError, match="trains once"):
        trainer.train()


def test_the_twin_measures_a_run_that_goes_on_and_what_it_did_is_repeated(tmp_path):
    """The searching process is a real one, and so are the times."""
    given = {"gradient_accumulation_steps": 2, "max_steps": 60}
    given["auto"] = {"largest_staleness": 8}
    trained(tmp_path / "run", callbacks=[StopAt(30)], **given)
    run = trained(tmp_path / "run", resume=True, **given)
    found = read_decisions(tmp_path / "run" / FILE)
    assert found.header.settings["steps"] == found.end.step == 60
    assert found.header.largest_interval >= 4
    spans = run.zenflow_optimizer.timeline.steps(58, 58).spans
    names = [span.name for span in spans if span.lane == "device"]
    assert names.count("forward") == names.count("backward") == 2
    again = trained(tmp_path / "again", **given | {"auto": {"replay": tmp_path / "run" / FILE}})
    assert are_alike(run, again)


@pytest.mark.parametrize(
    ("given", "args", "words"),
    [
        ({"stream": True}, {}, "stream has no tuner yet"),
        ({"state_dir": "states"}, {}, "state_dir has no tuner yet"),
        ({"optimizer_options": {"controller": Rehearsed()}}, {}, "both choose knobs"),
        ({}, {"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"auto": {"oracle": 1}}, {}, "auto has no option 'oracle'"),
        ({"auto": {"replay": "x", "profile": "y"}}, {}, "profile would be of no effect"),
    ],
)
def test_what_can_not_be_tuned_is_refused_before_any_work(tmp_path, given, args, words):
    with pytest.raises(ValueError, match=words):
        make(tmp_path, given=given, **args)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topk_ratio": 1.0}, "all columns are on the device for good"),
        ({"topk_ratio": 0.0}, "all columns are on the host for good"),
        ({"update_rule": "published"}, "under the exact rule alone"),
    ],
)
def test_a_rule_with_nothing_to_choose_is_refused_before_training(tmp_path, changes, words):
    trainer = make(tmp_path, given={"zenflow": replace(CONFIG, **changes)})
    with pytest.raises(ConfigError, match=words):
        trainer.train()
    assert not Path(tmp_path / FILE).exists()


def test_frozen_weights_and_rows_of_unknown_length_are_told(tmp_path):
    trainer = make(tmp_path)
    trainer.model.lm_head.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="are frozen here"):
        trainer.train()
    rows = [{"inputs_embeds": [[0.0]], "labels": [0]}]
    trainer = make(tmp_path)
    trainer.train_dataset = rows
    with pytest.raises(ConfigError, match="can't tell how many tokens"):
        trainer.train()
