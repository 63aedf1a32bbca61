"""Every field of a config.json that is read is checked, and one error tells all violations."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.models.families import FAMILIES, layers_of, read_model
from sim.models.shapes.reading import Reading
from sim.models.table import find_model
from sim.models.workload import Workload
from tests.sim.models.small_configs import CONFIGS
from zenflow.errors import ConfigError

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100,
    "num_attention_heads": 8, "num_hidden_layers": 2, "num_key_value_heads": 4,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 100,
        "n_positions": 64}  # fmt: skip
SOUND = {kind: {"model_type": kind, **configs[-1]} for kind, configs in CONFIGS.items()}


def fields_of(kind):
    """Return the rule of each field that a family reads of its small configuration."""
    reading = Reading(SOUND[kind])
    FAMILIES[kind](reading)
    assert not reading.violations
    return reading.fields


def named(kind, rule):
    """Return the fields of a rule; of one with many names that which the file has."""
    fields = fields_of(kind).items()
    return [
        name for name, own in fields if own == rule and (name in SOUND[kind] or rule != "count")
    ]


@pytest.mark.parametrize("kind", SOUND)
def test_counts_are_whole_numbers_in_range(kind):
    assert len(named(kind, "count")) >= 3
    for name in named(kind, "count"):
        for value in ("64", 64.5, -3, True, 10**10, [64], {}, math.nan):
            with pytest.raises(
                ConfigError, match=rf"- {name} must be a whole number from [01] to "
            ) as told:
                layers_of({**SOUND[kind], name: value})
            assert f"got {value!r}" in str(told.value)


@pytest.mark.parametrize("kind", SOUND)
def test_switches_are_booleans(kind):
    assert "tie_word_embeddings" in named(kind, "switch")
    for name in named(kind, "switch"):
        for value in ("false", "true", 0, 1, None):
            with pytest.raises(
                ConfigError, match=rf"- {name} must be true or false, .*got {value!r}"
            ):
                layers_of({**SOUND[kind], name: value})


@pytest.mark.parametrize("value", ["0.1", -0.1, 1.5, None, math.nan])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("gpt2", "resid_pdrop"), ("gpt2", "attn_pdrop"), ("opt", "dropout"),
     ("bert", "hidden_dropout_prob"), ("falcon", "hidden_dropout"), ("phi3", "resid_pdrop"),
     ("llama", "attention_dropout"), ("qwen3_next", "attention_dropout")],
)  # fmt: skip
def test_dropouts_are_shares(kind, name, value):
    with pytest.raises(ConfigError, match=rf"- {name} must be a number from 0 to 1"):
        layers_of({**SOUND[kind], name: value})


@pytest.mark.parametrize("kind", [kind for kind in SOUND if named(kind, "kinds")])
def test_lists_of_layers_have_a_known_word_for_each(kind):
    for name in named(kind, "kinds"):
        for value in ("full_attention", [], [1, 2], ["other"], ["full_attention"] * 4, {}):
            with pytest.raises(ConfigError, match=rf"- {name} must be (a list of|made of)"):
                layers_of({**SOUND[kind], name: value})


@pytest.mark.parametrize("kind", SOUND)
def test_a_required_field_that_is_missing_or_null_is_named(kind):
    required = 0
    for name in SOUND[kind]:
        without = {key: value for key, value in SOUND[kind].items() if key != name}
        try:
            layers_of(without)
        except ConfigError as error:
            if f"lacks {name}" in str(error):
                required += 1
                with pytest.raises(ConfigError, match=f"lacks {name}"):
                    layers_of({**without, name: None})
    assert required >= 3  # width, layers, words, and heads where there is attention


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_spoilt_field_is_an_error_or_a_model_that_another_number_explains(data):
    kind = data.draw(st.sampled_from(sorted(SOUND)))
    config = SOUND[kind]
    name = data.draw(st.sampled_from(sorted(fields_of(kind))))
    value = data.draw(ANYTHING)
    try:
        model = read_model({**config, name: value})
    except ConfigError:
        return
    rule = fields_of(kind)[name]
    if rule == "count":  # null stands for a default, and only where there is one
        assert value is None or (type(value) is int and value >= 0)
    elif rule == "switch":
        assert isinstance(value, bool)
    assert all(p.numel > 0 for layer in model.layers for p in layer.parameters)


OUTER = ("model_type", "text_config", "architectures", "quantization_config", "vision_config",
         "tie_word_embeddings", "is_encoder_decoder", "logit_scale")  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_spoilt_wrapper_is_an_error_or_the_model_that_it_wraps(data):
    inner = {**LLAMA, "tie_word_embeddings": False}
    config = {"model_type": "llava", "text_config": inner, "architectures": ["Llava"]}
    for _ in range(data.draw(st.integers(1, 3))):
        target = data.draw(st.sampled_from([config, inner]))
        target[data.draw(st.sampled_from(OUTER))] = data.draw(ANYTHING)
    try:
        model = read_model(config)
    except ConfigError:
        return
    if any("leaves out" in note for note in model.notes):  # an empty part is transformers' own
        return
    plain = sum(layer.numel for layer in layers_of(LLAMA))
    tied = sum(layer.numel for layer in layers_of({**LLAMA, "tie_word_embeddings": True}))
    assert sum(layer.numel for layer in model.layers) in (plain, tied)


def test_parts_inside_parts_end():
    config = LLAMA
    for _ in range(3):
        config = {"model_type": "nest", "text_config": config}
    assert layers_of(config) == layers_of(LLAMA)
    with pytest.raises(ConfigError, match="text_config must be an object"):
        layers_of({"model_type": "nest", "text_config": config})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "logit_scale": "high"}, "logit_scale must be a number, got 'high'"),
        ({**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 12},
         "hidden_size must be a multiple of num_attention_heads where head_dim is not given, "
         "got 64 and 12"),
        ({**LLAMA, "num_key_value_heads": 3},
         "num_attention_heads must be a multiple of num_key_value_heads, got 8 and 3"),
        ({**LLAMA, "num_key_value_heads": 16}, "got 8 and 16"),
        ({**GPT2, "n_head": 7}, "n_embd must be a multiple of n_head"),
        ({**GPT2, "n_embd": 48, "hidden_size": 64},
         "n_embd, hidden_size are one field under two names, got 48, 64"),
        ({**MIXTRAL, "num_experts_per_tok": 9},
         "num_experts_per_tok must be at most the 8 experts, got 9"),
        ({**LLAMA, "model_type": "qwen2", "num_attention_heads": 16, "num_key_value_heads": 32},
         "num_attention_heads must be a multiple of num_key_value_heads"),
        ({**LLAMA, "quantization_config": "fp8"}, "quantization_config must be an object"),
        ({**LLAMA, "max_position_embeddings": "4k"}, "max_position_embeddings must be a whole"),
        ({**SOUND["olmo3"], "layer_types": ["full_attention"] * 4},
         "layer_types must be a list of 5 words, one a layer, got 4"),
        ({**SOUND["nemotron_h"], "hybrid_override_pattern": "MX"}, "must be made of M, "),
        ({**SOUND["nemotron_h"], "hybrid_override_pattern": "M*"}, "a letter for each of the 6"),
    ],
)  # fmt: skip
def test_fields_fit_each_other(config, words):
    with pytest.raises(ConfigError, match=words):
        layers_of(config)


def test_a_default_that_does_not_fit_is_told_as_one():
    config = {**LLAMA, "model_type": "qwen2"}
    del config["num_key_value_heads"]
    with pytest.raises(
        ConfigError, match=r"num_key_value_heads \(32 where it is missing\), got 8"
    ):
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


@pytest.mark.parametrize("kind", ["gpt_osss", "mimo2", "t5", "qwen3_moe2", "lama", None, 7])
def test_no_family_is_guessed_by_likeness(kind):
    with pytest.raises(ConfigError, match=rf"{kind!r} is unknown; .*known are llama") as told:
        layers_of({**LLAMA, "model_type": kind})
    assert "did you mean" not in str(told.value)
    assert all(family in str(told.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "it has an encoder and a decoder"),
        ({"model_type": "clip", "text_config": {"model_type": "clip_text_model"}},
         "'clip' is unknown; it compares pictures with texts"),
        ({"model_type": "blip", "text_config": {"model_type": "blip_text_model"}},
         "'blip', text_config: model_type 'blip_text_model' is unknown"),
        ({"model_type": "zamba2"}, "its layers share blocks of attention"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_counted_says_why(config, why):
    with pytest.raises(ConfigError, match=why):
        layers_of(config)


@pytest.mark.parametrize(("kind", "name"), [("Llama", "llama"), ("gemma3-text", "gemma3_text")])
def test_another_spelling_of_a_family_is_told(kind, name):
    with pytest.raises(ConfigError, match=f"did you mean '{name}'"):
        layers_of({**LLAMA, "model_type": kind})


def test_a_class_names_a_family_where_the_type_is_nobodys():
    own = {**LLAMA, "model_type": "somebodys", "architectures": ["LlamaForCausalLM"]}
    assert layers_of(own) == layers_of(LLAMA)
    assert read_model(own).notes == ("model_type 'somebodys' has the shapes of 'llama'",)
    mixture = {**MIXTRAL, "architectures": ["LlamaForCausalLM"]}
    assert layers_of(mixture) == layers_of(MIXTRAL)  # the type comes first


@pytest.mark.parametrize(
    ("quantised", "method"),
    [({"quant_method": "gptq", "bits": 4}, "gptq"), ({"bits": 4}, "a method of its own"),
     ({}, None), (None, None)],
)  # fmt: skip
def test_a_workload_knows_how_its_file_has_weights_quantised(quantised, method):
    config = {**LLAMA, "quantization_config": quantised}
    assert Workload.of_config("x", config).stored_as == method
    outer = {"model_type": "llava", "text_config": LLAMA, "quantization_config": quantised}
    assert Workload.of_config("x", outer).stored_as == method
