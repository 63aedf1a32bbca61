"""TRL's trainers with the mixin: the plain loop's bits, also for what PEFT leaves trainable."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason='needs TRL and PEFT: pip install -e ".[dev-all]"')
pytest.importorskip("peft", reason='needs TRL and PEFT: pip install -e ".[dev-all]"')

from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.models import weights_of
from tests.zenflow.integrations.hf import Recorded, arguments, replayed, saved
from tests.zenflow.integrations.tiny import (
    CONFIG,
    are_equal,
    both_modes,
    decoder,
    texts,
    told,
    word_tokenizer,
)
from zenflow.integrations.transformers import ZenFlowTrainerMixin

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours


SAVED = 5
"""Step after which the runs save, in the middle of a window."""
SAVES = {"save_strategy": "steps", "save_steps": SAVED}


class ZenFlowSFTTrainer(Recorded, ZenFlowTrainerMixin, SFTTrainer):
    pass


class ZenFlowDPOTrainer(Recorded, ZenFlowTrainerMixin, DPOTrainer):
    pass


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def said(row):
    return " ".join(f"w{token}" for token in row["input_ids"])


def fine_tuning(kind, folder, tokenizer, **given):
    changes = {key: given.pop(key) for key in ("gradient_accumulation_steps",) if key in given}
    torch.manual_seed(0)  # LoRA's weights
    return kind(
        model=decoder(),
        args=arguments(SFTConfig, folder, max_length=32, bf16=False, **SAVES, **changes),
        train_dataset=Dataset.from_list([{"text": said(row)} for row in texts()]),
        processing_class=tokenizer,
        **given,
    )


def preferring(kind, folder, tokenizer, **given):
    rows = zip(texts(length=4, seed=2), texts(), texts(seed=1), strict=True)
    names = ("prompt", "chosen", "rejected")
    pairs = [dict(zip(names, map(said, row), strict=True)) for row in rows]
    return kind(
        model=decoder(),
        ref_model=decoder(),
        args=arguments(DPOConfig, folder, max_length=32, bf16=False, **SAVES),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
        **given,
    )


LORA = LoraConfig(r=32, task_type="CAUSAL_LM")
"""An adapter with matrices that are large enough to be split."""
SFT = (fine_tuning, ZenFlowSFTTrainer, SFTTrainer)
CASES = {
    "trl.SFTTrainer": (*SFT, {"gradient_accumulation_steps": 3}),
    "trl.SFTTrainer with PEFT's LoRA": (*SFT, {"peft_config": LORA}),
    "trl.DPOTrainer": (preferring, ZenFlowDPOTrainer, DPOTrainer, {}),
}


class Runs:
    """A case's runs in both modes, and the plain loop's."""

    def __init__(self, case, tokenizer, folder):
        self.case, self.tokenizer, self.folder = case, tokenizer, folder
        self.build, self.kind, base, self.given = CASES[case]
        self.trainers = {release: self.trainer(release) for release in (True, False)}
        for trainer in self.trainers.values():
            trainer.train()
        judge = self.build(base, folder, tokenizer, **self.given)
        steps = self.given.get("gradient_accumulation_steps", 1)
        self.plain = replayed(self.trainers[True], judge, accumulation_steps=steps)

    def trainer(self, release):
        """Return a trainer that has not run, with a folder of its mode's."""
        given = {"zenflow": CONFIG, "release": release, **self.given}
        return self.build(self.kind, self.folder / str(release), self.tokenizer, **given)

    def told(self, record_property, release, compared):
        packages = "trl transformers peft" if "PEFT" in self.case else "trl transformers"
        told(record_property, self.case, release, compared, packages)


@pytest.fixture(scope="module", params=CASES)
def runs(request, tokenizer, tmp_path_factory):
    return Runs(request.param, tokenizer, tmp_path_factory.mktemp("runs"))


def trained(model, weights):
    """Return the weights of the parameters that this model trains."""
    pairs = zip(model.parameters(), weights, strict=True)
    return [weight for param, weight in pairs if param.requires_grad]


@pytest.mark.parametrize(**both_modes)
def test_losses_and_weights_are_the_plain_loops(runs, release, record_property):
    runs.told(record_property, release, "losses, weights")
    trainer, plain = runs.trainers[release], runs.plain
    assert trainer.losses == plain.losses
    assert are_equal(weights_of(trainer.model), plain.true[-1])
    assert not are_equal(plain.seen[-1], plain.true[-1])  # something is deferred


@pytest.mark.parametrize(**both_modes)
def test_what_is_saved_are_the_true_weights(runs, release, tmp_path, record_property):
    runs.told(record_property, release, "saved weights")
    trainer, plain = runs.trainers[release], runs.plain
    folder = Path(trainer.args.output_dir) / f"checkpoint-{SAVED}"
    true = trained(trainer.model, plain.true[SAVED - 1])
    assert are_equal(saved(folder, trainer.model), true)
    assert not are_equal(trained(trainer.model, plain.seen[SAVED - 1]), true)
    trainer.save_model(str(tmp_path))
    assert are_equal(saved(tmp_path, trainer.model), trained(trainer.model, plain.true[-1]))


@pytest.mark.parametrize(**both_modes)
def test_a_resumed_run_goes_on_bit_for_bit(runs, release, record_property):
    runs.told(record_property, release, "resume")
    trainer, again = runs.trainers[release], runs.trainer(release)
    again.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-{SAVED}")
    assert 0 < len(again.losses) < len(trainer.losses)
    assert again.losses == trainer.losses[-len(again.losses) :]
    assert are_equal(weights_of(again.model), weights_of(trainer.model))


def test_the_trainers_own_metrics_stay_in_the_row(runs):
    history = runs.trainers[True].state.log_history
    row = next(row for row in history if "loss" in row)
    assert {"zenflow/stall_share", "grad_norm"} <= set(row)
    assert {"mean_token_accuracy", "rewards/chosen"} & set(row)


def test_only_what_peft_adds_is_trained(tokenizer, tmp_path):
    given = {"peft_config": LORA, "zenflow": CONFIG}
    trainer = fine_tuning(ZenFlowSFTTrainer, tmp_path, tokenizer, **given)
    trainer.train()
    moved = {
        name: bool(param.detach().any())
        for name, param in trainer.model.named_parameters()
        if "lora_B" in name
    }
    assert moved
    assert all(moved.values())
    optimized = sum(p.numel() for g in trainer.zenflow_optimizer.param_groups for p in g["params"])
    assert optimized == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
