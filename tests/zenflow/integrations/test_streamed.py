"""Streamed weights in people's trainers: the bits of weights that stay on the device."""

import pytest
import torch

pytest.importorskip("transformers", reason='needs the extra: pip install "zenflow-offload[hf]"')
pytest.importorskip("accelerate", reason='needs the extra: pip install "zenflow-offload[hf]"')

from accelerate import Accelerator
from accelerate.state import GradientState
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from tests.models import weights_of
from tests.zenflow.integrations.hf import Recorded, arguments
from tests.zenflow.integrations.tiny import CONFIG, are_equal, decoder, make_optimizer, texts
from zenflow import stream_weights
from zenflow.integrations.accelerate import prepare
from zenflow.integrations.transformers import ZenFlowTrainer, ZenFlowTrainerMixin

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours

STREAM = {"slots": 2, "least_elements": 1000}


@pytest.fixture(autouse=True)
def _gradients_of_no_other_test():
    GradientState._reset_state()


class Recording(Recorded, ZenFlowTrainer):
    pass


def end(trainer):
    trainer.zenflow_optimizer.close()
    if trainer.weight_stream is not None:
        trainer.weight_stream.close()


def trainer_in(folder, stream, **changes):
    given = {
        "gradient_accumulation_steps": 2, "gradient_checkpointing": True, "save_strategy": "steps",
        "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "max_steps": 6,
        "load_best_model_at_end": True, **changes,
    }  # fmt: skip
    return Recording(
        model=decoder(torch.bfloat16),
        args=arguments(TrainingArguments, folder, **given),
        train_dataset=texts(),
        eval_dataset=texts(4, seed=1),
        zenflow=CONFIG,
        stream=stream,
    )


def test_transformers_trainer(tmp_path):
    found = {}
    for stream in (False, STREAM, {**STREAM, "slots": 3, "offload_activations": True}):
        folder = tmp_path / str(stream)
        trainer = trainer_in(folder, stream)
        assert (trainer.weight_stream is not None) == bool(stream)
        trainer.train()
        evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        file = load_file(folder / "checkpoint-3" / "model.safetensors")
        kept = [file[name] for name in sorted(file)]
        found[str(stream)] = trainer.losses, evaluated, weights_of(trainer.model), kept
        end(trainer)
    plain, *others = found.values()
    for losses, evaluated, weights, kept in others:
        assert (losses, evaluated) == plain[:2]
        assert are_equal(weights, plain[2])
        assert are_equal(kept, plain[3])


def test_a_trainer_resumes_with_streams_what_began_without(tmp_path):
    whole = trainer_in(tmp_path / "whole", False, max_steps=9)
    whole.train()
    begun = trainer_in(tmp_path / "parts", False, max_steps=9)
    begun.args.max_steps = 3
    begun.train()
    end(begun)
    ended = trainer_in(tmp_path / "parts", STREAM, max_steps=9)
    ended.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert ended.losses == whole.losses[6:]
    assert are_equal(weights_of(ended.model), weights_of(whole.model))
    end(whole)
    end(ended)


def test_a_new_model_for_each_run(tmp_path):
    trainer = Recording(
        model_init=decoder,
        args=arguments(TrainingArguments, tmp_path, max_steps=2),
        train_dataset=texts(),
        zenflow=CONFIG,
        stream=STREAM,
    )
    trainer.train()
    first, losses = trainer.weight_stream, list(trainer.losses)
    trainer.train()
    assert trainer.weight_stream is not first
    assert trainer.losses == 2 * losses
    end(trainer)


def test_generation_reads_the_visiting_weights(tmp_path):
    tokens = torch.tensor([[1, 5, 9]])
    model = decoder().eval()
    expected = model.generate(tokens, max_new_tokens=5, do_sample=False)
    stream = stream_weights(model, "cpu", **STREAM)
    assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), expected)
    assert stream.num_fetches == 5 * 2
    stream.close()


@pytest.mark.parametrize(("given", "message"), [({"release": False}, "leave release=False out")])
def test_what_does_not_go_together_is_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        ZenFlowTrainer(
            model=decoder(), args=arguments(TrainingArguments, tmp_path), train_dataset=texts(),
            stream=True, **given,
        )  # fmt: skip


@pytest.mark.parametrize("lora", [False, True])
def test_trls_trainer(tmp_path, lora):
    trl = pytest.importorskip("trl", reason='needs TRL: pip install -e ".[dev-all]"')
    peft = pytest.importorskip("peft", reason='needs PEFT: pip install -e ".[dev-all]"')
    from datasets import Dataset

    from tests.zenflow.integrations.tiny import word_tokenizer

    class Tuner(Recorded, ZenFlowTrainerMixin, trl.SFTTrainer):
        pass

    rows = [{"text": " ".join(f"w{token}" for token in row["input_ids"])} for row in texts()]
    found = []
    for stream in (False, STREAM):
        torch.manual_seed(0)
        trainer = Tuner(
            model=decoder(),
            args=arguments(trl.SFTConfig, tmp_path / str(stream), max_length=32, bf16=False,
                           gradient_accumulation_steps=2, gradient_checkpointing=True),
            train_dataset=Dataset.from_list(rows),
            processing_class=word_tokenizer(),
            peft_config=peft.LoraConfig(r=32, task_type="CAUSAL_LM") if lora else None,
            zenflow=CONFIG,
            stream=stream,
        )  # fmt: skip
        trainer.train()
        found.append((trainer.losses, weights_of(trainer.model)))
        end(trainer)
    assert found[0][0] == found[1][0]
    assert are_equal(found[0][1], found[1][1])


def test_accelerate():
    rows = [torch.tensor(row["input_ids"]) for row in texts()]
    found = []
    for streams in (False, True):
        accelerator, model = Accelerator(cpu=True), decoder()
        stream = stream_weights(model, "cpu", **STREAM) if streams else None
        model, optimizer, batches = prepare(
            accelerator, model, make_optimizer(model), DataLoader(rows, batch_size=2)
        )
        losses = []
        for tokens in batches:
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with optimizer.true_weights():
            found.append((losses, weights_of(model)))
        optimizer.close()
        if stream is not None:
            stream.close()
    assert found[0][0] == found[1][0]
    assert are_equal(found[0][1], found[1][1])


def test_lightning(tmp_path):
    pytest.importorskip("lightning", reason='needs "zenflow-offload[lightning]"')
    from tests.zenflow.integrations import test_lightning as lightning

    found = []
    for streams in (False, True):
        module = lightning.Module()
        stream = stream_weights(module.model, "cpu", **STREAM) if streams else None
        trainer = lightning.trainer_in(tmp_path / str(streams))
        trainer.fit(module, lightning.batches(), lightning.batches(seed=1))
        found.append((module.losses, module.validated[-1], weights_of(module.model)))
        if stream is not None:
            stream.close()
    assert found[0][0] == found[1][0]
    assert are_equal(found[0][1], found[1][1])
    assert are_equal(found[0][2], found[1][2])
