"""`zenflow finetune` from a file of chats to a folder that transformers loads."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason='needs the extra: pip install "zenflow-offload[finetune]"')

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from experiments.finetuning.course import Course
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
from zenflow import ZenFlowConfig
from zenflow.integrations.transformers import ZenFlowTrainerMixin

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours
STEPS = 7
"""Steps of a run: more than a window, and an epoch of five."""


class ByHand(ZenFlowTrainerMixin, SFTTrainer):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model, and twenty chats to learn."""
    folder = tmp_path_factory.mktemp("finetune")
    save_model(folder / "model")
    write_rows(folder / "chats.jsonl", map(chat, range(20)))
    return folder


@pytest.fixture(scope="module")
def flags(folder):
    return ("--model", folder / "model", "--data", folder / "chats.jsonl", "--steps", STEPS, *FAST)


@pytest.fixture(scope="module")
def run(folder, flags):
    """Return the folder of a run that nothing disturbed, and what it said."""
    return folder / "run", tuned(folder / "run", *flags, "--eval-share", "0.1",
                                 "--sample-tokens", "4").output  # fmt: skip


def by_hand(folder, kind, rows=None, **given):
    """Train the same rows as the command does with TRL, written by hand."""
    chats = load_dataset("json", data_files=str(folder / "chats.jsonl"), split="train")
    changes = given.pop("changes", {})
    trainer = kind(
        model=str(folder / "model"),
        args=SFTConfig(
            str(folder / "by-hand"),
            max_steps=STEPS,
            max_length=64,
            per_device_train_batch_size=4,
            learning_rate=0.005,
            warmup_steps=0.03,
            bf16=False,
            use_cpu=True,
            seed=0,
            assistant_only_loss=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **changes,
        ),
        train_dataset=chats if rows is None else rows(chats),
        **given,
    )
    trainer.train()
    return trainer, [row["loss"] for row in trainer.state.log_history if "loss" in row]


def are_same(trainer, folder):
    found = weights(folder)
    mine = dict(trainer.model.named_parameters())
    return all(torch.equal(mine[name].detach(), found[name]) for name in found)


def are_equal(left, right):
    mine, others = weights(left), weights(right)
    return mine.keys() == others.keys() and all(map(torch.equal, mine.values(), others.values()))


def test_chats_in_one_command_make_a_model_that_transformers_loads(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, said = run
    assert "All answers of a chat are learnt" in said
    assert said.count("held-out loss") == 2  # at the end, and in the last words
    assert "Sample: " in said
    last = said.strip().splitlines()[-3:]
    assert last[0].strip() == "from transformers import AutoModelForCausalLM, AutoTokenizer"
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "AutoTokenizer": AutoTokenizer}
    exec("\n".join(line.strip() for line in last[1:]), names)
    model, tokenizer = names["model"], names["tokenizer"]
    assert tokenizer.chat_template is not None
    assert len(losses(out)) == STEPS
    asked = tokenizer.apply_chat_template(
        chat()["messages"][:1], return_tensors="pt", add_generation_prompt=True, return_dict=True
    )
    assert model.generate(**asked, max_new_tokens=2).shape[1] > asked["input_ids"].shape[1]


def test_its_bits_are_those_of_the_mixin_written_by_hand(folder, run):
    def held_out_as_in_the_command(rows):
        return rows.train_test_split(test_size=2, seed=0)["train"]

    trainer, found = by_hand(
        folder, ByHand, held_out_as_in_the_command,
        zenflow=ZenFlowConfig(min_split_elements=1024),
    )  # fmt: skip
    assert found == losses(run[0])
    assert are_same(trainer, run[0])
    trainer.zenflow_optimizer.close()


def test_on_device_its_bits_are_those_of_trl_with_adamw(folder, flags, tmp_path):
    tuned(tmp_path / "run", *flags, "--strategy", "on_device", "--max-grad-norm", "none")
    trainer, found = by_hand(folder, SFTTrainer, changes={"max_grad_norm": 0.0})
    assert found == losses(tmp_path / "run")
    assert are_same(trainer, tmp_path / "run")


@pytest.fixture
def interrupted(monkeypatch):
    """Return a function that runs the command, and presses Ctrl-C after so many steps."""

    def run(steps, out, *flags):
        on_log = Course.on_log

        def interrupt(self, args, state, control, **given):
            on_log(self, args, state, control, **given)
            if state.global_step == steps:
                os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(Course, "on_log", interrupt)
            return finetune("--out", out, *flags)

    return run


def test_a_run_that_ctrl_c_ended_goes_on_by_the_same_bits(folder, flags, tmp_path, interrupted):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    tuned(whole, *flags)
    ran = interrupted(2, cut, *flags)
    assert ran.exit_code == 130, ran.output
    assert f"zenflow finetune --resume {cut}" in ran.output
    assert not (cut / "model.safetensors").exists()
    for name, file in (("checkpoint-1", "trainer_state.json"), ("checkpoint-9", "optimizer.pt")):
        (cut / name).mkdir()
        (cut / name / file).touch()  # an older one, and one whose save a kill has cut off
    again = finetune("--resume", cut)
    assert again.exit_code == 0, again.output
    assert "goes on from step 3" in again.output
    assert losses(cut) == losses(whole)
    assert are_equal(cut, whole)
    write_rows(folder / "others.jsonl", map(chat, range(5)))
    record = json.loads((cut / "finetune.json").read_text())
    record["data"] = [str(folder / "others.jsonl")]
    (cut / "finetune.json").write_text(json.dumps(record))
    changed = finetune("--resume", cut)
    assert changed.exit_code == 1
    assert "are not those that the run" in changed.output


def test_a_run_ends_early_with_its_best_weights_also_if_it_goes_on(flags, tmp_path, interrupted):
    more = ("--steps", 40, "--lr", "0.5", "--eval-share", "0.2", "--eval-every", 1,
            "--patience", 3)  # fmt: skip
    ran = finetune("--out", tmp_path / "whole", *flags, *more, "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    evaluations = [row["eval_loss"] for row in found["evaluations"][: found["steps"]]]
    step = evaluations.index(min(evaluations)) + 1
    assert found["steps"] == step + 3 < 40
    assert found["best_checkpoint"].endswith(f"checkpoint-{step}")
    assert found["eval_loss"] == min(evaluations)  # of the model that is saved
    assert are_equal(tmp_path / "whole", tmp_path / "whole" / f"checkpoint-{step}")
    cut = tmp_path / "cut"
    assert interrupted(step, cut, *flags, *more).exit_code == 130
    again = finetune("--resume", cut, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["evaluations"] == found["evaluations"]
    assert are_equal(cut, tmp_path / "whole")


def test_streamed_layers_end_with_the_same_bits(folder, flags, tmp_path):
    save_model(tmp_path / "wide", hidden_size=256, intermediate_size=512, num_hidden_layers=3)
    more = ("--model", tmp_path / "wide", "--topk-ratio", 0)
    tuned(tmp_path / "here", *flags, *more)
    tuned(tmp_path / "streamed", *flags, *more, "--stream", "--resident-layers", 1)
    assert losses(tmp_path / "here") == losses(tmp_path / "streamed")
    assert are_equal(tmp_path / "here", tmp_path / "streamed")


def test_a_run_with_states_on_a_drive_that_ctrl_c_ended_has_the_same_bits(
    flags, tmp_path, state_dir, interrupted
):
    flags = (*flags, "--topk-ratio", 0)
    tuned(tmp_path / "memory", *flags)
    more = ("--state-dir", state_dir, "--drive-tbw", 600)
    assert interrupted(3, tmp_path / "drive", *flags, *more).exit_code == 130
    again = finetune("--resume", tmp_path / "drive")
    assert again.exit_code == 0, again.output
    assert losses(tmp_path / "memory") == losses(tmp_path / "drive")
    assert are_equal(tmp_path / "memory", tmp_path / "drive")
    others = finetune("--out", tmp_path / "other", *flags, *more)
    assert others.exit_code == 2
    assert "has the checkpoint of step" in others.output


@pytest.fixture
def hub(monkeypatch):
    """Stand in for the hub; return the calls that it gets."""
    from huggingface_hub.utils import filter_repo_objects

    calls = []

    def upload(*, repo_id, folder_path, ignore_patterns):
        folder = Path(folder_path)
        files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        sent = set(filter_repo_objects(files, ignore_patterns=ignore_patterns))
        calls.append((repo_id, sent, json.loads((folder / "finetune.json").read_text())))

    monkeypatch.setattr("huggingface_hub.create_repo", lambda name, **_: calls.append(name))
    monkeypatch.setattr("huggingface_hub.upload_folder", upload)
    return calls


def test_what_is_pushed_is_the_model_and_nothing_of_this_machine(hub, flags, tmp_path):
    more = ("--eval-share", "0.1", "--push-to-hub", "me/mine")
    said = tuned(tmp_path / "run", *flags, *more).output
    created, (name, sent, record) = hub
    assert created == name == "me/mine"  # the first before anything is trained
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= sent
    assert not [file for file in sent if "finetune" in file or "/" in file or file == ".lock"]
    assert "training_args.bin" not in sent
    assert record["result"]["steps"] == STEPS
    assert "pushed to https://huggingface.co/me/mine" in said
    card = (tmp_path / "run" / "README.md").read_text()
    assert f"| steps | {STEPS} |" in card
    assert f"| held-out loss | {record['result']['eval_loss']:.4f} |" in card
    assert 'from_pretrained("me/mine")' in card
    assert "None" not in card
    assert str(tmp_path) not in card


def test_a_push_that_fails_leaves_the_run_whole(hub, flags, tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError("502 Bad Gateway")

    monkeypatch.setattr("huggingface_hub.upload_folder", refuse)
    out = tmp_path / "run"
    found = finetune("--out", out, *flags, "--push-to-hub", "me/mine")
    assert found.exit_code == 1
    assert f"hf upload me/mine {out}" in " ".join(found.output.split())
    assert "Load the model" in found.output
    assert json.loads((out / "finetune.json").read_text())["result"]["steps"] == STEPS
    assert (out / "model.safetensors").is_file()


def test_a_tracker_gets_losses_and_the_optimizers_rows(flags, tmp_path):
    found = "tensorboard.backend.event_processing.event_accumulator"
    events = pytest.importorskip(found, reason="needs TensorBoard: pip install tensorboard")
    out = tmp_path / "run"
    tuned(out, *flags, "--eval-share", "0.1", "--eval-every", 3, "--report-to", "tensorboard")
    (log,) = (out / "runs").iterdir()
    rows = events.EventAccumulator(str(log))
    rows.Reload()
    logged = [round(row.value, 4) for row in rows.Scalars("train/loss")]
    assert logged == [pytest.approx(loss, abs=1e-4) for loss in losses(out)]
    assert [row.step for row in rows.Scalars("eval/loss")] == [3, 6, STEPS]
    assert {row.value for row in rows.Scalars("train/zenflow/update_interval")} == {4.0}
