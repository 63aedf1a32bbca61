"""Models and tokenizers that are not ours: made on the spot, so nothing is downloaded."""

import importlib.util
import json

import pytest
import torch

from experiments.training.parts.data.tokens import ByteTokenizer, PretrainedTokenizer
from experiments.training.parts.models.named import find_model
from experiments.training.parts.setup import build_setup
from experiments.training.settings.training import TrainSettings
from tests.experiments.runs import FAST, ended, summary, trained, write_text
from zenflow.errors import ConfigError

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

RUN = [flag for flag in FAST if flag not in ("--model", "own:tiny")]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Return a directory with a small GPT-2, its weights and a word tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    words = ["[UNK]", "[EOS]", "line", "says", "which", "is", "odd", ":", ",", "0", "1"]
    vocabulary = {word: index for index, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", eos_token="[EOS]"
    )
    config = transformers.GPT2Config(
        vocab_size=16,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
    )
    torch.manual_seed(7)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def setup(model, text, **changes):
    return build_setup(
        TrainSettings(model=str(model), data=str(text), sequence=32, device="cpu", **changes)
    )


def test_texts_that_all_have_a_tab_are_pairs_with_the_models_separator():
    words = {"[UNK]": 0, "[EOS]": 1, "odd": 2, "even": 3}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A [EOS]", pair="$A [EOS] $B [EOS]", special_tokens=[("[EOS]", 1)]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="[EOS]")
    found = PretrainedTokenizer(fast, vocab_size=4)
    pairs = found.encode_many(["odd\teven", "odd odd\teven"], 5)
    assert pairs == [[2, 1, 3, 1], [2, 2, 1, 3, 1]]
    assert found.encode_many(["odd\teven", "odd"], 5) == [[2, 3, 1], [2, 1]]


def test_directory_gives_its_weights_and_its_tokenizer(gpt2, text):
    found = setup(gpt2, text, seed=1)
    assert isinstance(found.tokenizer, PretrainedTokenizer)
    expected = transformers.GPT2LMHeadModel.from_pretrained(gpt2)
    embedding = found.model.get_input_embeddings().weight
    assert torch.equal(embedding, expected.get_input_embeddings().weight)
    assert found.data.train.batch(0).inputs.max() < 16


def test_config_file_gives_random_weights_that_follow_the_seed(gpt2, text, tmp_path):
    (tmp_path / "config.json").write_text((gpt2 / "config.json").read_text())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    made = [setup(tmp_path / "config.json", text, seed=seed) for seed in (1, 1, 2)]
    weights = [found.model.get_input_embeddings().weight for found in made]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert isinstance(made[0].tokenizer, ByteTokenizer)


def test_byte_tokens_need_a_vocabulary_that_holds_them(gpt2, text, tmp_path):
    (tmp_path / "config.json").write_text((gpt2 / "config.json").read_text())
    with pytest.raises(ConfigError, match="258"):
        setup(tmp_path / "config.json", text)


def test_pretrained_run_trains_and_its_result_loads_again(gpt2, text, tmp_path):
    out = trained(tmp_path / "run", *RUN, "--model", gpt2, "--data", text, "--steps", "6")
    assert summary(out)["steps"] == 6
    again = setup(out / "model", text)
    assert isinstance(again.tokenizer, PretrainedTokenizer)
    untrained = transformers.GPT2LMHeadModel.from_pretrained(gpt2)
    assert not torch.equal(
        again.model.get_input_embeddings().weight, untrained.get_input_embeddings().weight
    )


def test_pretrained_model_takes_a_head_for_classification(gpt2, tmp_path):
    rows = [f"line {n} says {n % 2}\t{'odd' if n % 2 else 'even'}\n" for n in range(200)]
    (tmp_path / "a.tsv").write_text("".join(rows))
    flags = ["--data", tmp_path / "a.tsv", "--steps", "3", "--model", gpt2]
    out = trained(tmp_path / "run", *RUN, *flags)
    assert 0 <= summary(out)["eval_accuracy"] <= 1


def test_own_model_is_exported_for_transformers_with_its_true_weights(text, tmp_path):
    out = trained(tmp_path / "run", *FAST, "--data", text, "--steps", "5")
    found = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    flags = ["--data", text, "--steps", "1", "--strategy", "on_device", "--lr", "1e-12"]
    ended(0, "--out", tmp_path / "next", *RUN, "--model", out / "model", *flags)
    # A step that changes nothing evaluates what the first run evaluated last.
    assert summary(tmp_path / "next")["eval_loss"] == pytest.approx(
        summary(out)["eval_loss"], rel=1e-5
    )
    assert found.config.hidden_size == 64


def test_an_export_loads_into_our_class_where_transformers_is_missing(text, tmp_path, monkeypatch):
    out = trained(tmp_path / "run", *FAST, "--data", text, "--steps", "5")
    theirs = setup(str(out / "model"), text)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *_: None if name == "transformers" else find(name),
    )
    ours = setup(str(out / "model"), text)
    assert ours.found.own
    assert not theirs.found.own
    named = dict(theirs.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_a_strangers_directory_is_refused_where_transformers_is_missing(gpt2, text):
    with pytest.raises(ConfigError, match=r"not 'gpt2'.*zenflow-offload\[hf\]"):
        setup(f"own:{gpt2}", text)


def test_size_gives_the_same_start_with_either_class(text):
    ours, theirs = setup("own:tiny", text, seed=4), setup("tiny", text, seed=4)
    assert ours.found.own
    assert not theirs.found.own
    named = dict(theirs.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_sequence_longer_than_the_models_positions_is_refused(gpt2, text):
    with pytest.raises(ConfigError, match="at most 64 positions"):
        build_setup(TrainSettings(model=str(gpt2), data=str(text), sequence=65))


def test_directory_without_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"must hold a config.json"):
        find_model(str(tmp_path))


def test_unreachable_hub_name_says_what_can_be_given_instead(tmp_path, text, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = ended(
        2, "--out", tmp_path / "r", *RUN, "--data", text, "--model", "nobody/nothing-here"
    )
    assert "can't be loaded" in said
    assert "save_pretrained" in said
