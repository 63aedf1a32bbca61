"""TRL's trainers with the mixin: the plain loop's bits, also for what PEFT leaves trainable."""

import pytest
import torch

pytest.importorskip("trl", reason='needs TRL and PEFT: pip install -e ".[hf,dev]"')
pytest.importorskip("peft", reason='needs TRL and PEFT: pip install -e ".[hf,dev]"')

from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.models import weights_of
from tests.zenflow.integrations.hf import Recorded, arguments, replayed
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
        args=arguments(SFTConfig, folder, max_length=32, bf16=False, **changes),
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
        args=arguments(DPOConfig, folder, max_length=32, bf16=False, max_steps=6),
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


@pytest.fixture(scope="module", params=CASES)
def runs(request, tokenizer, tmp_path_factory):
    """Return a case's runs in both modes, and the plain loop's."""
    build, kind, base, given = CASES[request.param]
    folder = tmp_path_factory.mktemp("runs")
    trainers = {}
    for release in (True, False):
        trainers[release] = build(
            kind, folder, tokenizer, zenflow=CONFIG, release=release, **given
        )
        trainers[release].train()
    judge = build(base, folder, tokenizer, **given)
    steps = given.get("gradient_accumulation_steps", 1)
    return request.param, trainers, replayed(trainers[True], judge, accumulation_steps=steps)


@pytest.mark.parametrize(**both_modes)
def test_losses_and_weights_are_the_plain_loops(runs, release, record_property):
    case, trainers, plain = runs
    packages = "trl transformers peft" if "PEFT" in case else "trl transformers"
    told(record_property, case, release, "losses, weights", packages)
    trainer = trainers[release]
    assert trainer.losses == plain.losses
    assert are_equal(weights_of(trainer.model), plain.true[-1])
    assert not are_equal(plain.seen[-1], plain.true[-1])  # something is deferred


def test_the_trainers_own_metrics_stay_in_the_row(runs):
    _, trainers, _ = runs
    row = next(row for row in trainers[True].state.log_history if "loss" in row)
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
