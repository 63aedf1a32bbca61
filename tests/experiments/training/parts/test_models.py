from dataclasses import replace

import pytest
import torch

from experiments.training.parts.files.step_log import read_steps
from experiments.training.parts.models.decoder import (
    Classifier,
    DecoderConfig,
    LanguageModel,
    init_weights,
)
from experiments.training.parts.setup import build_setup
from experiments.training.run.evaluation import cross_entropy, forward
from experiments.training.settings.sizes import MODEL_SIZES
from experiments.training.settings.training import TrainSettings
from tests.experiments.runs import FAST, trained, write_text

CONFIG = DecoderConfig.of_size(MODEL_SIZES["tiny"], 258)


def make(config: DecoderConfig = CONFIG, seed: int = 0) -> LanguageModel:
    model = LanguageModel(config)
    init_weights(model, seed)
    return model


def test_logits_have_a_row_per_token_and_start_near_uniform():
    logits = make()(torch.randint(0, 258, (2, 7))).logits
    assert logits.shape == (2, 7, 258)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(0, 258, (14,)))
    assert abs(loss.item() - torch.tensor(258.0).log().item()) < 0.3


def test_tied_ends_share_one_storage_and_are_counted_once():
    model = make()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = LanguageModel(DecoderConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": False}))
    counts = [sum(p.numel() for p in m.parameters()) for m in (model, untied)]
    assert counts[1] - counts[0] == 258 * CONFIG.hidden_size


def test_no_token_sees_a_later_one():
    model = make()
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 256
    before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_a_token_sees_where_earlier_ones_stand():
    model = make()
    one, other = torch.tensor([[5, 9, 7]]), torch.tensor([[9, 5, 7]])
    assert not torch.allclose(model(one).logits[0, 2], model(other).logits[0, 2], atol=1e-6)


def test_equal_seeds_give_equal_weights_and_others_don_t():
    same, again, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(same.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(same.lm_head.weight, other.lm_head.weight)


def test_classifier_looks_at_the_last_real_token_only():
    model = Classifier(CONFIG, 3)
    init_weights(model, 0)
    short = torch.randint(0, 256, (1, 5))
    padded = torch.cat([short, torch.full((1, 4), 257)], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 4])
    torch.testing.assert_close(model(short).logits, model(padded, mask).logits)
    assert model(short).logits.shape == (1, 3)


@pytest.mark.parametrize(
    "changes",
    [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"num_key_value_heads": 2}],
    ids=str,
)
def test_same_function_as_transformers_llama(changes):
    transformers = pytest.importorskip("transformers")
    config = DecoderConfig(**{**CONFIG.to_dict(), **changes})
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **config.to_dict(), pad_token_id=257, bos_token_id=None, eos_token_id=None
        )
    )
    init_weights(theirs, 3)
    ours = make(config, seed=3)
    assert {n for n, _ in ours.named_parameters()} == {n for n, _ in theirs.named_parameters()}
    tokens = torch.randint(0, 256, (2, 40))
    torch.testing.assert_close(
        ours(tokens).logits, theirs(input_ids=tokens, use_cache=False).logits, atol=1e-5, rtol=1e-4
    )


def test_bfloat16_model_runs_and_stays_close():
    model = make()
    tokens = torch.randint(0, 256, (1, 16))
    exact = model(tokens).logits
    rounded = model.to(torch.bfloat16)(tokens).logits
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ["own:tiny", "tiny"])
def test_recomputed_activations_give_the_same_gradients_and_keep_less(name):
    if name == "tiny":
        pytest.importorskip("transformers")
    settings = TrainSettings(model=name, batch_size=2, sequence=64, device="cpu", device_threads=1)
    kept, gradients = [], []
    for checkpointing in (False, True):
        setup = build_setup(replace(settings, checkpointing=checkpointing))
        batch = setup.data.train.batch(0)
        saved = []

        def pack(tensor, saved=saved):
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = cross_entropy(forward(setup.model, batch), batch)
        loss.backward()
        kept.append(sum(saved))
        gradients.append([p.grad for p in setup.model.parameters()])
    assert kept[1] < 0.5 * kept[0]
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_a_run_recomputes_where_it_is_asked_to(tmp_path):
    text = write_text(tmp_path / "text.txt")
    flags = (*FAST, "--data", text, "--steps", 6)
    plain = trained(tmp_path / "plain", *flags)
    recomputed = trained(tmp_path / "recomputed", *flags, "--checkpointing")
    losses = [
        [row["loss"] for row in read_steps(out / "steps.jsonl")] for out in (plain, recomputed)
    ]
    assert losses[0] == losses[1]
    assert '"checkpointing": true' in (recomputed / "config.json").read_text()


def test_weights_are_drawn_on_the_cpu_whatever_the_default_device():
    plain, other = LanguageModel(CONFIG), LanguageModel(CONFIG)
    init_weights(plain, 0)
    with torch.device("meta"):  # stands in for a GPU: what is drawn there has no numbers
        init_weights(other, 0)
    for mine, its in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
