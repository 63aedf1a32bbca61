"""Every field of a config.json that is read is checked, and one error tells all violations."""

import json

import pytest

from sim.models.families import FAMILIES, layers_of
from sim.models.fields import _DECODER, FIELDS
from sim.models.table import find_model
from sim.models.workload import Workload
from zenflow.errors import ConfigError

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100,
    "num_attention_heads": 8, "num_hidden_layers": 2, "num_key_value_heads": 4,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 100,
        "n_positions": 64}  # fmt: skip
QWEN2_MOE = {
    **MIXTRAL, "model_type": "qwen2_moe", "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
OPT = {**LLAMA, "model_type": "opt", "ffn_dim": 96, "max_position_embeddings": 64}
BERT = {**LLAMA, "model_type": "bert", "max_position_embeddings": 64}
SOUND = {c["model_type"]: c for c in (LLAMA, MIXTRAL, GPT2, QWEN2_MOE, OPT, BERT)}
OF_FAMILIES = [(kind, FIELDS.get(kind, _DECODER)) for kind in SOUND]
COUNTS = [
    (kind, name)
    for kind, fields in OF_FAMILIES
    for name in (*(names[0] for names in fields.required), *fields.optional)
    if (kind, name) != ("gpt2", "num_attention_heads")  # there it is n_head
]
SWITCHES = [(kind, name) for kind, fields in OF_FAMILIES for name in fields.switches]
SHARES = [(kind, name) for kind, fields in OF_FAMILIES for name in fields.shares]


@pytest.mark.parametrize("kind", SOUND)
def test_configurations_of_these_tests_are_sound(kind):
    assert layers_of(SOUND[kind])


@pytest.mark.parametrize("value", ["64", 64.0, 0, -3, True, 10**9, [64]])
@pytest.mark.parametrize(("kind", "name"), COUNTS)
def test_counts_are_whole_numbers_in_range(kind, name, value):
    with pytest.raises(ConfigError, match=rf"- {name} must be a whole number from 1 to ") as told:
        layers_of({**SOUND[kind], name: value})
    assert f"got {value!r}" in str(told.value)


@pytest.mark.parametrize("value", ["false", "true", 0, 1, None])
@pytest.mark.parametrize(("kind", "name"), SWITCHES)
def test_switches_are_booleans(kind, name, value):
    with pytest.raises(ConfigError, match=rf"- {name} must be true or false, .*got {value!r}"):
        layers_of({**SOUND[kind], name: value})


@pytest.mark.parametrize("value", ["0.1", -0.1, 1.5, None, float("nan")])
@pytest.mark.parametrize(("kind", "name"), SHARES)
def test_dropouts_are_shares(kind, name, value):
    with pytest.raises(ConfigError, match=rf"- {name} must be a number from 0 to 1"):
        layers_of({**SOUND[kind], name: value})


@pytest.mark.parametrize("kind", SOUND)
def test_a_required_field_that_is_missing_or_null_is_named(kind):
    for names in FIELDS.get(kind, _DECODER).required:
        without = {key: value for key, value in SOUND[kind].items() if key not in names}
        for config in (without, {**without, names[0]: None}):
            with pytest.raises(ConfigError, match=rf"- lacks .*{names[0]}"):
                layers_of(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 12},
         "hidden_size must be a multiple of num_attention_heads where head_dim is not given, "
         "got 64 and 12"),
        ({**LLAMA, "num_key_value_heads": 3},
         "num_attention_heads must be a multiple of num_key_value_heads, got 8 and 3"),
        ({**LLAMA, "num_key_value_heads": 16}, "got 8 and 16"),
        ({**GPT2, "n_head": 7}, "n_embd must be a multiple of n_head"),
        ({**MIXTRAL, "num_experts_per_tok": 9},
         "num_experts_per_tok must be at most the 8 experts, got 9"),
        ({**LLAMA, "quantization_config": "fp8"}, "quantization_config must be an object"),
    ],
)  # fmt: skip
def test_fields_fit_each_other(config, words):
    with pytest.raises(ConfigError, match=words):
        layers_of(config)


def test_heads_of_their_own_width_need_not_divide_the_models():
    assert layers_of({**LLAMA, "num_attention_heads": 12, "head_dim": 16})


def test_optional_fields_may_be_null_and_others_may_hold_anything():
    plain = Workload.of_config("x", LLAMA)
    odd = {"head_dim": None, "n_embd": "wide", "sliding_window": "none", "num_experts": 0}
    assert Workload.of_config("x", {**LLAMA, **odd}).num_params == plain.num_params


def test_all_violations_of_a_file_stand_in_one_error(tmp_path):
    wrong = {**LLAMA, "hidden_size": "64", "num_hidden_layers": 2.0, "tie_word_embeddings": "no"}
    del wrong["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(ConfigError) as told:
        find_model(tmp_path)
    text = str(told.value)
    assert text.startswith(f"{tmp_path}/config.json: the llama config breaks 4 rules:")
    for name in ("hidden_size", "num_hidden_layers", "tie_word_embeddings", "vocab_size"):
        assert name in text


@pytest.mark.parametrize("kind", ["gpt_oss", "mimo", "t5", "qwen3_moe", "lama", None, 7])
def test_no_family_is_guessed_by_likeness(kind):
    with pytest.raises(ConfigError, match=rf"{kind!r} is unknown; known are llama") as told:
        layers_of({**LLAMA, "model_type": kind})
    assert "did you mean" not in str(told.value)
    assert all(family in str(told.value) for family in FAMILIES)


@pytest.mark.parametrize(("kind", "name"), [("Llama", "llama"), ("gemma3-text", "gemma3_text")])
def test_another_spelling_of_a_family_is_told(kind, name):
    with pytest.raises(ConfigError, match=f"did you mean '{name}'"):
        layers_of({**LLAMA, "model_type": kind})


@pytest.mark.parametrize(
    ("quantised", "method"),
    [({"quant_method": "gptq", "bits": 4}, "gptq"), ({"bits": 4}, "a method of its own"),
     ({}, None), (None, None)],
)  # fmt: skip
def test_a_workload_knows_how_its_file_has_weights_quantised(quantised, method):
    config = {**LLAMA, "quantization_config": quantised}
    assert Workload.of_config("x", config).stored_as == method
