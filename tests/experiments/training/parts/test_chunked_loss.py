"""A loss whose logits come in chunks is the plain one, and its logits are never whole."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evidence.studies.trained import SMALL
from experiments.training.parts.data.batches import IGNORED
from experiments.training.parts.models import chunked_loss
from experiments.training.parts.models.chunked_loss import loss_in_head, output_layer
from experiments.training.parts.models.decoder import DecoderConfig, LanguageModel, init_weights
from experiments.training.parts.setup import build_setup
from experiments.training.run.evaluation import evaluate, loss_of
from sim.models.families import FAMILIES, LOGIT_SCALES, scales_logits
from tests.sim.models.small_configs import CONFIGS
from zenflow.errors import ConfigError

TOKENS, WIDTH, WORDS = 300, 16, 333


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 64 tokens."""
    monkeypatch.setattr(chunked_loss, "CHUNK_LOGITS", 100 * WORDS)


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of a tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return found


def problem(dtype=torch.float32, *, bias=False, ignored=0):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, WORDS, bias=bias).to(dtype)
    hidden = torch.randn(3, TOKENS // 3, WIDTH).to(dtype).requires_grad_()
    targets = torch.randint(0, WORDS, (3, TOKENS // 3))
    targets.view(-1)[:ignored] = IGNORED
    return head, hidden, targets


def plain(head, hidden, targets):
    logits = head(hidden).float().flatten(0, -2)
    return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)


def chunked(head, hidden, targets):
    with loss_in_head(head, targets):
        return head(hidden)


def gradients(loss, head, hidden, targets, factor=1.0):
    """Return the loss and all gradients of it, the loss being scaled first."""
    value = loss(head, hidden, targets)
    inputs = [hidden, *head.parameters()]
    return value.detach(), torch.autograd.grad(value * factor, inputs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ignored", [0, 1, 170])
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_loss_and_gradients_are_the_plain_ones(bias, ignored, factor):
    items = problem(bias=bias, ignored=ignored)
    expected, wanted = gradients(plain, *items, factor)
    found, grads = gradients(chunked, *items, factor)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for own, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-8)


def test_in_bfloat16_it_is_as_near_to_float32_as_the_plain_one():
    items = problem(torch.bfloat16)
    head, hidden, targets = items
    wide = nn.Linear(WIDTH, WORDS, bias=False)
    wide.load_state_dict(head.state_dict())
    _, exact = gradients(plain, wide, hidden.detach().float().requires_grad_(), targets)
    _, near = gradients(plain, *items)
    found, grads = gradients(chunked, *items)
    torch.testing.assert_close(found, plain(*items).detach(), rtol=1e-6, atol=0)
    for own, other, true in zip(grads, near, exact, strict=True):
        assert float((own - true).norm()) <= 2 * float((other - true).norm())


def test_logits_are_never_whole():
    for loss, most in ((plain, None), (chunked, TOKENS * WORDS // 4)):
        with Largest() as seen:
            gradients(loss, *problem())
        assert seen.elements == TOKENS * WORDS if most is None else seen.elements <= most


def test_without_gradients_none_are_computed(monkeypatch):
    monkeypatch.setattr(chunked_loss, "_gradient", None)
    items = problem()
    with torch.no_grad():
        assert float(chunked(*items)) == pytest.approx(float(plain(*items)), rel=1e-6)


def test_a_frozen_head_gets_none():
    head, hidden, targets = problem()
    head.requires_grad_(False)
    chunked(head, hidden, targets).backward()
    assert hidden.grad is not None
    assert head.weight.grad is None


def test_the_layer_makes_logits_again_afterwards_even_behind_an_error():
    head, hidden, targets = problem()
    before = head(hidden)
    with contextlib.suppress(IndexError), loss_in_head(head, targets):
        head(hidden)
        raise IndexError
    assert torch.equal(head(hidden), before)


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_learns_as_with_the_plain_loss(tied, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("In the beginning there was a small text. " * 80)
    found = []
    for chunks in (False, True):
        settings = replace(SMALL, data=str(text), chunked_loss=chunks)
        config = DecoderConfig(
            vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, tie_word_embeddings=tied,
        )  # fmt: skip
        model = LanguageModel(config)
        init_weights(model, 0)
        setup = build_setup(settings, model=model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(setup, setup.data.train.batch(step)).backward()
            optimizer.step()
        found.append([evaluate(setup)["eval_loss"], *(p.detach() for p in model.parameters())])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_transformers_models_have_it_too():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tokens, targets = torch.randint(0, 99, (2, 2, 9))
    logits = model(input_ids=tokens).logits
    with loss_in_head(output_layer(model, "it"), targets):
        loss = model(input_ids=tokens).logits
    expected = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)
    config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match=r"it changes its logits .*final_logit_softcapping"):
        output_layer(model, "it")


@pytest.mark.parametrize("family", sorted(set(FAMILIES) & set(CONFIGS)))  # others have own code
def test_a_prediction_knows_which_families_change_their_logits(family):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family).to_dict()
    changes = any(config.get(name) not in (None, 1.0) for name in LOGIT_SCALES)
    assert scales_logits({"model_type": family}) == scales_logits(config) == changes


def test_what_has_no_such_layer_or_no_words_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="net has no linear output layer"):
        output_layer(nn.Sequential(nn.Linear(2, 2)), "net")
    with pytest.raises(ConfigError, match="float16 parameters need --no-chunked-loss"):
        replace(SMALL, dtype="float16", gradients="keep", chunked_loss=True)
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("a good one\t1\na bad one\t0\n" * 20)
    with pytest.raises(ConfigError, match="--chunked-loss is for language models"):
        build_setup(replace(SMALL, data=str(tmp_path), chunked_loss=True))
