"""`zenflow finetune --auto`: its decisions, a run that they repeat, and one that goes on."""

import json

import pytest

pytest.importorskip("trl", reason='needs the extra: pip install "zenflow-offload[finetune]"')

from autotune.decisions.file import DecisionLog, Header, read_decisions
from experiments.commands.answer import Exit
from tests.experiments.finetuning.small import (
    FAST,
    chat,
    finetune,
    losses,
    save_model,
    tuned,
    weights,
    write_rows,
)
from tests.experiments.finetuning.test_finetune import are_equal
from tests.experiments.tuned import Rehearsed, decide_by
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours
FILE = "decisions.jsonl"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    save_model(folder / "model")
    write_rows(folder / "chats.jsonl", map(chat, range(20)))
    return ("--model", folder / "model", "--data", folder / "chats.jsonl", "--steps", 9, *FAST,
            "--auto")  # fmt: skip


def test_a_file_of_decisions_repeats_the_run_bit_for_bit(flags, tmp_path, clock):
    ran = tuned(tmp_path / "run", *flags, "--json")
    found = read_decisions(tmp_path / "run" / FILE)
    assert len(found.decisions) >= 3
    for decision in found.decisions:
        assert (
            f"after step {decision.step}: {decision.new} (twin: the clock said so)" in ran.output
        )
    figures = json.loads(ran.stdout)["tuning"]
    assert figures["num_decisions"] == len(found.decisions)
    assert figures["knobs"] == found.changes[-1][1].to_dict()
    again = tuned(tmp_path / "again", "--replay", tmp_path / "run" / FILE)
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    assert are_equal(tmp_path / "again", tmp_path / "run")
    assert len(clock.controllers) == 1
    assert "the clock" not in again.output
    resumed = finetune("--resume", tmp_path / "again")  # which has nothing left to do
    assert resumed.exit_code == 0, resumed.output
    assert are_equal(tmp_path / "again", tmp_path / "run")
    tuned(tmp_path / "other", *flags)
    assert weights(tmp_path / "other").keys() == weights(tmp_path / "run").keys()
    assert not are_equal(tmp_path / "other", tmp_path / "run")  # the clock decided otherwise


def test_a_tuned_run_that_ctrl_c_ended_goes_on_by_the_same_bits(flags, tmp_path, monkeypatch):
    made = decide_by(monkeypatch, Rehearsed)
    tuned(tmp_path / "whole", *flags)
    decide_by(monkeypatch, lambda: Rehearsed(stop_after=4))
    assert finetune("--out", tmp_path / "cut", *flags).exit_code == 130
    said = finetune("--out", tmp_path / "no", "--replay", tmp_path / "cut" / FILE)
    assert said.exit_code == 2
    assert "without its end record" in said.output
    (tmp_path / "cut" / FILE).unlink()  # the checkpoint has its own
    decide_by(monkeypatch, Rehearsed)
    again = finetune("--resume", tmp_path / "cut")
    assert again.exit_code == 0, again.output
    assert are_equal(tmp_path / "whole", tmp_path / "cut")
    files = [read_decisions(tmp_path / name / FILE) for name in ("whole", "cut")]
    assert files[0].changes == files[1].changes
    assert len(made) == 1


def test_a_tuned_run_starts_within_its_bounds(flags, tmp_path, clock):
    ran = finetune("--out", tmp_path / "none", *flags, "--host-memory", "0.0001")
    assert ran.exit_code == Exit.NO_ROOM
    assert "can't be met by any setting" in ran.output
    tuned(tmp_path / "run", *flags, "--largest-staleness", 3)
    assert read_decisions(tmp_path / "run" / FILE).header.knobs.update_interval == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--topk-ratio", "0.2"], "topk_ratio is what controller 'both' chooses"),
        (["--strategy", "on_device"], "which has nothing to choose"),
        (["--stream", "--topk-ratio", "0"], "--stream has no tuner yet"),
        (["--state-dir", "states", "--topk-ratio", "0"], "--state-dir has no tuner yet"),
        (["--controller", "zen-auto"], "--auto is --controller both"),
    ],
)
def test_what_can_not_be_tuned_is_refused_as_zenflow_train_refuses_it(
    flags, tmp_path, given, words
):
    ran = finetune("--out", tmp_path / "run", *flags, *given)
    assert ran.exit_code == 2
    assert words in " ".join(ran.output.split())
    assert not (tmp_path / "run").exists()


def test_a_replay_takes_no_flag_that_makes_another_run(tmp_path):
    absent = tmp_path / FILE
    absent.touch()
    for given in (["--lr", "0.1"], ["--model", "m"], ["--topk-ratio", "0.2"], ["--auto"]):
        ran = finetune("--out", tmp_path / "run", "--replay", absent, *given)
        assert ran.exit_code == 2
        assert "would make another one" in ran.output
    assert "--out must be given" in finetune("--replay", absent).output


def test_a_file_of_another_loop_is_no_fine_tuning(tmp_path):
    log = DecisionLog(tmp_path / FILE)
    log.start(Header(settings={"steps": 9}, knobs=Knobs.of(ZenFlowConfig()), hardware={},
                     largest_interval=None, versions={}, commit=None))  # fmt: skip
    log.end(step=9, search_seconds=0.0, run_seconds=1.0)
    log.close()
    ran = finetune("--out", tmp_path / "run", "--replay", tmp_path / FILE)
    assert ran.exit_code == 2
    assert "is of no run of zenflow finetune" in " ".join(ran.output.split())
    assert not (tmp_path / "run").exists()
