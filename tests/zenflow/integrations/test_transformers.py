"""transformers' Trainer with ZenFlowAdamW: the plain loop's bits, and true weights everywhere."""

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason='needs the extra: pip install "zenflow-offload[hf]"')
pytest.importorskip("accelerate", reason='needs the extra: pip install "zenflow-offload[hf]"')

import accelerate.optimizer
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.models import weights_of
from tests.zenflow.integrations.hf import Recorded, arguments, replayed, saved
from tests.zenflow.integrations.tiny import CONFIG, are_equal, both_modes, decoder, texts, told
from zenflow import ZenFlowAdamW
from zenflow.integrations.transformers import ZenFlowCallback, ZenFlowTrainer

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours

MODES = [True, False]
TRAINER = "transformers.Trainer"
ACCUMULATION = 3
"""Micro-batches in a step; an epoch has seven, so that its last step has one."""


class Recording(Recorded, ZenFlowTrainer):
    pass


class SaveAt(TrainerCallback):
    """Asks for a checkpoint behind every other callback."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_save = state.global_step == self.step


class StopAt(SaveAt):
    """Ends the run."""

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step


def make(folder, model=None, kind=Recording, callbacks=None, release=True, zenflow=CONFIG, **args):
    given = {"zenflow": zenflow, "release": release} if issubclass(kind, ZenFlowTrainer) else {}
    return kind(
        model=model or decoder(),
        args=arguments(TrainingArguments, folder, **args),
        train_dataset=texts(),
        eval_dataset=texts(4, seed=1),
        callbacks=callbacks,
        **given,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run both modes with accumulation, and a checkpoint that a callback asks for at step 5."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for release in MODES:
        trainer = make(
            folder / str(release),
            release=release,
            callbacks=[SaveAt(5)],
            gradient_accumulation_steps=ACCUMULATION,
            logging_steps=1,
        )
        trainer.train()
        found[release] = trainer
    return found


@pytest.fixture(scope="module")
def plain(runs, tmp_path_factory):
    judge = make(tmp_path_factory.mktemp("judge"), kind=Trainer)
    return replayed(runs[True], judge, accumulation_steps=ACCUMULATION)


def test_an_epochs_last_step_is_short(runs):
    assert len(runs[True].batches) == 3 * 7


@pytest.mark.parametrize(**both_modes)
def test_losses_and_weights_are_the_plain_loops(runs, plain, release, record_property):
    told(record_property, TRAINER, release, "losses, weights", "transformers")
    trainer = runs[release]
    assert trainer.losses == plain.losses
    assert are_equal(weights_of(trainer.model), plain.true[-1])  # train() leaves the true ones
    assert not are_equal(plain.seen[-1], plain.true[-1])


@pytest.mark.parametrize(**both_modes)
def test_a_checkpoint_has_the_true_weights(runs, plain, release, tmp_path, record_property):
    told(record_property, TRAINER, release, "saved weights", "transformers")
    trainer = runs[release]
    assert are_equal(
        saved(Path(trainer.args.output_dir) / "checkpoint-5", trainer.model), plain.true[4]
    )
    assert not are_equal(plain.seen[4], plain.true[4])
    trainer.save_model(str(tmp_path))
    assert are_equal(saved(tmp_path, trainer.model), plain.true[-1])


@pytest.mark.parametrize(**both_modes)
def test_a_resumed_run_goes_on_bit_for_bit(runs, release, tmp_path, record_property):
    told(record_property, TRAINER, release, "resume", "transformers")
    trainer = runs[release]
    again = make(tmp_path, release=release, gradient_accumulation_steps=ACCUMULATION)
    again.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-5"))
    assert again.losses == trainer.losses[-len(again.losses) :]
    assert are_equal(weights_of(again.model), weights_of(trainer.model))


def test_a_checkpoint_holds_each_number_of_the_optimizer_once(runs):
    trainer = runs[True]
    path = Path(trainer.args.output_dir) / "checkpoint-5" / "optimizer.pt"
    full = trainer.zenflow_optimizer.state_dict()
    kept, whole = (
        sum(tensor.nbytes for entry in state["state"].values() for tensor in entry.values())
        for state in (torch.load(path), full)
    )
    assert kept < 0.95 * whole  # what lands is one in S of the weights, not all


@pytest.mark.parametrize(**both_modes)
def test_saves_at_epochs_ends_have_the_true_weights(plain, release, tmp_path):
    given = {"gradient_accumulation_steps": ACCUMULATION, "save_strategy": "epoch"}
    trainer = make(tmp_path, release=release, **given)
    trainer.train()
    for step in (3, 6, 9):  # the last is a short one
        folder = tmp_path / f"checkpoint-{step}"
        assert are_equal(saved(folder, trainer.model), plain.true[step - 1])


class Stream(torch.utils.data.IterableDataset):
    """Texts whose number nobody knows."""

    def __iter__(self):
        return iter(texts())


def test_a_stream_that_ends_in_mid_step_trains_alike_in_both_modes(tmp_path):
    """The Trainer takes no step then: what is left comes on top of the next epoch's first."""
    ends = []
    for release in MODES:
        trainer = Recording(
            model=decoder(),
            args=arguments(TrainingArguments, tmp_path, gradient_accumulation_steps=ACCUMULATION),
            train_dataset=Stream(),
            zenflow=CONFIG,
            release=release,
        )
        trainer.train()
        ends.append([trainer.losses, *weights_of(trainer.model)])
    assert len(ends[0][0]) > 9 * ACCUMULATION
    assert ends[0][0] == ends[1][0]
    assert are_equal(ends[0][1:], ends[1][1:])


class Accumulating(TrainerCallback):
    """Changes the number of micro-batches in a step from epoch to epoch."""

    def __init__(self, counts):
        self.counts = counts

    def on_epoch_begin(self, args, state, *_, **__):
        args.gradient_accumulation_steps = self.counts[round(state.epoch or 0)]


def test_micro_batches_may_change_in_number_while_a_run_goes_on(tmp_path):
    ends = []
    for release in (True, False):
        given = {"gradient_accumulation_steps": 2, "num_train_epochs": 3, "max_steps": -1}
        callbacks = [Accumulating([2, 4, 1])]
        trainer = make(tmp_path, release=release, callbacks=callbacks, **given)
        trainer.train()
        ends.append([trainer.losses, *weights_of(trainer.model)])
    assert ends[0][0] == ends[1][0]
    assert are_equal(ends[0][1:], ends[1][1:])


class BreakOff(TrainerCallback):
    """Raises after a micro-batch, whose gradients have left the device in release mode."""

    def __init__(self, count):
        self.left = count

    def on_substep_end(self, *_, **__):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize(**both_modes)
def test_a_run_broken_off_in_mid_step_goes_on_from_its_checkpoint(runs, plain, release, tmp_path):
    """In the same process and trainer: the half step's gradients are dropped."""
    given = {"gradient_accumulation_steps": ACCUMULATION, "save_strategy": "steps"}
    trainer = make(tmp_path, release=release, callbacks=[BreakOff(8)], save_steps=4, **given)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(trainer.losses) == 4 * ACCUMULATION  # a micro-batch of step 5 too: see the epochs
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert are_equal(weights_of(trainer.model), plain.true[-1])


@pytest.mark.parametrize(**both_modes)
def test_the_logs_norm_is_the_engines(runs, release):
    trainer = runs[release]
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert rows[-1]["grad_norm"] == trainer.zenflow_optimizer.report.grad_norm
    assert rows[-1]["zenflow/update_interval"] == CONFIG.update_interval
    assert rows[-1]["zenflow/topk_ratio"] == CONFIG.topk_ratio
    assert all(row["zenflow/d2h_bytes_per_step"] > 0 for row in rows)
    assert all(0 < row["zenflow/captured_energy"] < 1 for row in rows)


def test_the_optimizer_is_what_the_arguments_say(runs):
    optimizer = runs[True].zenflow_optimizer
    args = runs[True].args
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [args.weight_decay, 0.0]
    assert {p.ndim for p in optimizer.param_groups[1]["params"]} == {1}
    group = optimizer.param_groups[0]
    assert group["betas"] == (args.adam_beta1, args.adam_beta2)
    assert group["eps"] == args.adam_epsilon
    assert optimizer.accumulation_steps == ACCUMULATION
    assert optimizer.max_grad_norm == args.max_grad_norm


def test_preparation_moves_no_byte(tmp_path, monkeypatch):
    """In a second `train()` neither, in which the optimizer has a state."""
    moved = []
    real = accelerate.optimizer.move_to_device

    def counted(state, device):
        if isinstance(state, torch.Tensor):
            moved.append(state.nbytes)
        return real(state, device)

    monkeypatch.setattr(accelerate.optimizer, "move_to_device", counted)
    trainer = make(tmp_path, max_steps=2)
    trainer.train()
    trainer.train()
    assert moved == []
    accelerate.optimizer.AcceleratedOptimizer(trainer.zenflow_optimizer)
    assert sum(moved) > 0  # they would be seen


@pytest.mark.parametrize("kind", ["ZenFlowTrainer", "Trainer with the callback"])
def test_the_best_model_stays_although_a_callback_stops_behind_it(kind, tmp_path):
    """Its weights are the optimizer's from then on: evaluation does not bring others back."""
    given = {
        "callbacks": [StopAt(6)],
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "worst",
        "greater_is_better": True,
        "logging_steps": 100,
    }
    if kind == "ZenFlowTrainer":
        trainer = make(tmp_path, **given)
    else:
        trainer = make(tmp_path, kind=Trainer, **given)
        trainer.optimizer_cls_and_kwargs = (ZenFlowAdamW, {"lr": 5e-3, "config": CONFIG})
        trainer.add_callback(ZenFlowCallback(trainer))
    losses = {}

    def first_is_best(_):
        return {"worst": -float(trainer.state.global_step)}

    trainer.compute_metrics = first_is_best
    trainer.add_callback(Kept(losses))
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best = saved(tmp_path / "checkpoint-2", trainer.model)
    assert are_equal(weights_of(trainer.model), best)
    assert trainer.evaluate()["eval_loss"] == losses[2] != losses[6]
    trainer.save_model(str(tmp_path / "last"))
    assert are_equal(saved(tmp_path / "last", trainer.model), best)


class Kept(TrainerCallback):
    """Keeps the evaluations' losses by step."""

    def __init__(self, losses):
        self.losses = losses

    def on_evaluate(self, args, state, control, metrics, **_):
        self.losses.setdefault(state.global_step, metrics["eval_loss"])


@pytest.mark.parametrize(**both_modes)
def test_evaluation_in_mid_run_changes_no_bit_and_is_of_true_weights(
    plain, release, tmp_path, record_property
):
    told(record_property, TRAINER, release, "validation", "transformers")
    losses = {}
    trainer = make(
        tmp_path,
        release=release,
        gradient_accumulation_steps=ACCUMULATION,
        eval_strategy="steps",
        eval_steps=5,
        callbacks=[Kept(losses)],
    )
    trainer.train()
    assert trainer.losses == plain.losses
    judge = make(tmp_path, kind=Trainer)
    with torch.no_grad():
        for param, value in zip(judge.model.parameters(), plain.true[4], strict=True):
            param.copy_(value)
    assert judge.evaluate()["eval_loss"] == losses[5]


def test_bf16_weights_and_autocast_run(tmp_path):
    """In both modes by the same bits."""
    ends = []
    for release in MODES:
        trainer = make(tmp_path, decoder(torch.bfloat16), release=release, bf16=True, max_steps=6)
        trainer.train()
        ends.append([trainer.losses, *weights_of(trainer.model)])
    assert ends[0][0] == ends[1][0]
    assert are_equal(ends[0][1:], ends[1][1:])
    assert all(math.isfinite(loss) for loss in ends[0][0])


def test_without_a_norm_nothing_is_clipped(tmp_path):
    trainer = make(tmp_path, max_grad_norm=0.0, max_steps=3)
    trainer.train()
    assert trainer.zenflow_optimizer.report.clip_factor == 1.0
    assert trainer.zenflow_optimizer.report.grad_norm > 0.5


def test_a_new_model_for_each_run_closes_the_optimizer_before(tmp_path):
    trainer = ZenFlowTrainer(
        model_init=decoder,
        args=arguments(TrainingArguments, tmp_path, max_steps=2),
        train_dataset=texts(),
        zenflow=CONFIG,
    )
    trainer.train()
    first, weights = trainer.zenflow_optimizer, weights_of(trainer.model)
    trainer.train()
    assert trainer.zenflow_optimizer is not first
    with pytest.raises(RuntimeError, match="closed"):
        first.step()
    assert are_equal(weights_of(trainer.model), weights)


REFUSED = {
    "another optimizer": ({"optim": "adafactor"}, "is not AdamW"),
    "fp16": ({"fp16": True}, "use bf16=True"),
}
if hasattr(TrainingArguments, "enable_jit_checkpoint"):  # which not every version has
    REFUSED["a save in mid-step"] = ({"enable_jit_checkpoint": True}, "set release=False")


@pytest.mark.parametrize("case", REFUSED)
def test_what_release_mode_can_not_do_is_refused_at_once(case, tmp_path):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **changes)


def test_an_optimizer_of_ones_own_is_refused(tmp_path):
    model = decoder()
    with pytest.raises(ValueError, match="must be left out"):
        ZenFlowTrainer(
            model=model,
            args=arguments(TrainingArguments, tmp_path),
            optimizers=(torch.optim.AdamW(model.parameters()), None),
        )


def test_the_callback_refuses_another_optimizer(tmp_path):
    trainer = make(tmp_path, kind=Trainer)
    trainer.add_callback(ZenFlowCallback(trainer))
    with pytest.raises(ValueError, match="use ZenFlowTrainer"):
        trainer.train()


def test_values_come_before_the_callbacks_that_report_them(tmp_path):
    """Such a one is in the list before any that a user adds."""
    rows = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            rows.append(dict(logs))

    trainer = make(tmp_path, kind=Trainer, callbacks=[Reporter()])
    trainer.optimizer_cls_and_kwargs = (ZenFlowAdamW, {"config": CONFIG})
    trainer.add_callback(ZenFlowCallback(trainer))
    trainer.train()
    told = [row for row in rows if "loss" in row]
    assert len(told) == 3
    assert all("zenflow/stall_seconds" in row for row in told)


def test_a_plain_trainers_checkpoint_has_the_true_weights_by_the_callback(tmp_path):
    """Both runs clip nothing: a plain Trainer clips by torch, and so by other bits."""
    given = {"max_grad_norm": 0.0, "weight_decay": 0.0, "save_strategy": "steps", "save_steps": 5}
    ours = make(tmp_path / "ours", release=False, **given)
    ours.train()
    theirs = make(tmp_path / "theirs", kind=Trainer, **given)
    options = {"lr": theirs.args.learning_rate, "weight_decay": 0.0, "config": CONFIG}
    theirs.optimizer_cls_and_kwargs = (ZenFlowAdamW, options)
    theirs.add_callback(ZenFlowCallback(theirs))
    theirs.train()
    for trainer in (ours, theirs):
        assert are_equal(weights_of(trainer.model), weights_of(ours.model))
    checkpoints = [
        saved(tmp_path / name / "checkpoint-5", decoder()) for name in ("ours", "theirs")
    ]
    assert are_equal(*checkpoints)
