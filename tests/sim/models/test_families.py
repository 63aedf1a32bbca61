"""Shapes from a config.json are those of transformers' own model, tensor for tensor."""

import pytest

from sim.models.families import FAMILIES, layers_of, num_params, read_model
from sim.models.table import find_model, model_names
from tests.sim.models.small_configs import CONFIGS
from zenflow.errors import ConfigError

CASES = [
    pytest.param({"model_type": kind, **config}, id=f"{kind}-{index}")
    for kind, configs in CONFIGS.items()
    for index, config in enumerate(configs)
]
OWN_CODE = {"baichuan", "chatglm", "deepseek", "exaone", "internlm2", "mimo", "qwen"}
LLAMA = {"model_type": "llama", **CONFIGS["llama"][0]}
MIXTRAL = {"model_type": "mixtral", **CONFIGS["mixtral"][0]}


def transformers_model(config, auto="AutoModelForCausalLM"):
    """Return transformers' own model of a configuration, without memory behind it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = {key: config[key] for key in config if key not in ("_name_or_path", "torch_dtype")}
    kind = fields.pop("model_type")
    family = "AutoModelForMaskedLM" if kind == "bert" else auto
    with torch.device("meta"):  # shapes alone, at once even for 72 billion parameters
        if kind == "mllama_text_model":  # which no automatic class has
            made = transformers.models.mllama.configuration_mllama.MllamaTextConfig(**fields)
            model = transformers.MllamaForCausalLM(made)
        else:
            made = transformers.AutoConfig.for_model(kind, **fields)
            model = getattr(transformers, family).from_config(made)
    model.tie_weights()
    return model


def shapes_of(parameters):
    return sorted(tuple(size for size in p.shape if size != 1) for p in parameters)


def test_every_family_has_a_small_configuration():
    # Those whose code is not in transformers have rows of `test_published_shapes`.
    assert set(FAMILIES) - set(CONFIGS) == OWN_CODE


@pytest.mark.parametrize("config", CASES)
def test_there_are_as_many_parameters_as_in_transformers_model(config):
    parameters = list(transformers_model(config).parameters())
    assert num_params(config) == sum(p.numel() for p in parameters)
    own = [p for layer in layers_of(config) for p in layer.parameters]
    # Transformers holds a layer's experts as one, and Cohere's norms of all heads as a matrix.
    if all(p.active == 1 for p in own) and "use_qk_norm" not in config:
        assert shapes_of(own) == shapes_of(parameters)


@pytest.mark.parametrize("name", model_names())
def test_named_models_have_the_tensors_of_transformers_model(name):
    config = find_model(name)[1]
    parameters = list(transformers_model(config).parameters())
    assert num_params(config) == sum(p.numel() for p in parameters)
    if "num_experts_per_tok" not in config:
        own = [p for layer in layers_of(config) for p in layer.parameters]
        assert shapes_of(own) == shapes_of(parameters)


@pytest.mark.parametrize("config", CASES)
def test_layers_stand_between_embedding_and_head(config):
    layers = layers_of(config)
    assert [layers[0].name, layers[-1].name] == ["embedding", "head"]
    assert all(layer.is_inner and layer.normed_width > 0 for layer in layers[1:-1])
    assert not layers[0].is_inner
    assert not layers[-1].is_inner


def test_experts_compute_for_their_share_of_the_tokens():
    layer = layers_of(MIXTRAL)[1]
    shares = {p.name.split(".")[0]: p.active for p in layer.parameters}
    assert shares["experts"] == 0.5
    assert shares["q_proj"] == shares["router"] == 1.0
    assert layer.routed == 2
    assert layer.inner_width == 2 * 92


def test_mimo_is_qwen2_and_a_layer_that_no_step_computes_with():
    own = {**CONFIGS["qwen2"][0], "model_type": "mimo"}
    more = layers_of({**own, "num_nextn_predict_layers": 2})
    unused = [p for p in more[-1].parameters if p.active == 0]
    width, layer = 48, more[1].numel
    assert num_params(own) == num_params({**own, "model_type": "qwen2"})
    assert sum(p.numel for p in unused) == 2 * (layer + 3 * width + 2 * width * width)


# ---- windows --------------------------------------------------------------------------------


def windows(kind, **fields):
    config = {"model_type": kind, **CONFIGS[kind][0], **fields}
    return [layer.mixer.window for layer in layers_of(config)[1:-1]]


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("llama", {"sliding_window": 8}, [None] * 5),
        ("mistral", {}, [4096] * 5),
        ("mistral", {"sliding_window": None}, [None] * 5),
        ("mixtral", {}, [None] * 5),
        ("qwen2", {"sliding_window": 8}, [None] * 5),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
         [None, None, None, 8, 8]),
        ("gemma2", {"sliding_window": 8}, [8, None, 8, None, 8]),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3},
         [8, 8, None, 8, 8]),
        ("gpt_oss", {}, [128, None, 128, None, 128]),
        ("olmo3", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2
                   + ["sliding_attention"]}, [8, None, 8, None, 8]),
        ("llama4_text", {}, [8192, 8192, 8192, None, 8192]),
    ],
)  # fmt: skip
def test_windows_are_those_of_the_file_or_its_family(kind, fields, expected):
    assert windows(kind, **fields) == expected


# ---- models that read pictures or sound too ----------------------------------------------------

TEXT = {**LLAMA, "vocab_size": 101}
SIGHT = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1,
         "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
WRAPPERS = {
    "gemma3": {"text_config": {"model_type": "gemma3_text", "hidden_size": 32, "head_dim": 8,
                               "num_hidden_layers": 2, "intermediate_size": 40},
               "vision_config": {"model_type": "siglip_vision_model", **SIGHT}},
    "llava": {"text_config": TEXT, "vision_config": {"model_type": "clip_vision_model", **SIGHT}},
    "qwen2_vl": {"text_config": {"model_type": "qwen2_vl_text", **CONFIGS["qwen2"][0]},
                 "tie_word_embeddings": True},
    "qwen3_vl": {"text_config": {"model_type": "qwen3_vl_text", **CONFIGS["qwen3"][0],
                                 "head_dim": 8, "tie_word_embeddings": True},
                 "tie_word_embeddings": False},
    "mistral3": {"text_config": {"model_type": "mistral", **CONFIGS["mistral"][0]},
                 "tie_word_embeddings": False,
                 "vision_config": {"model_type": "pixtral", **SIGHT}},
    "llama4": {"text_config": {"model_type": "llama4_text", **CONFIGS["llama4_text"][0]}},
}  # fmt: skip


@pytest.mark.parametrize("kind", WRAPPERS)
def test_of_a_model_with_more_parts_the_text_part_is_counted(kind):
    config = {"model_type": kind, **WRAPPERS[kind]}
    named = transformers_model(config, "AutoModelForImageTextToText").named_parameters()
    text = [p.numel() for name, p in named if "language_model." in name or "lm_head" in name]
    model = read_model(config)
    assert sum(layer.numel for layer in model.layers) == sum(text) > 0
    assert f"of {kind} the text part is counted" in model.notes[0]
    assert ("vision_config left out" in model.notes[0]) == ("vision_config" in config)


def test_what_a_nested_part_leaves_out_is_said():
    model = read_model({"model_type": "gemma3", **WRAPPERS["gemma3"]})
    assert "leaves out vocab_size, num_attention_heads: taken as transformers" in model.notes[1]
    with pytest.raises(ConfigError, match="lacks vocab_size"):  # at the top it must be there
        read_model({"model_type": "gemma3_text", **WRAPPERS["gemma3"]["text_config"]})


@pytest.mark.parametrize("name", ["llm_config", "language_config", "text_config"])
def test_a_part_is_known_by_its_own_model_type_or_its_class(name):
    for own in (TEXT, {**TEXT, "model_type": None, "architectures": ["LlamaForCausalLM"]}):
        config = {"model_type": "somebodys_chat", name: own, "vision_config": {}}
        assert num_params(config) == num_params(TEXT)
    with pytest.raises(ConfigError, match=rf"'somebodys_chat', {name}: model_type 'other'"):
        read_model({"model_type": "somebodys_chat", name: {**TEXT, "model_type": "other"}})
    with pytest.raises(ConfigError, match=rf"{name} must be an object"):
        read_model({"model_type": "somebodys_chat", name: "llama.json"})


def test_fields_beside_a_vision_part_are_the_text_parts():
    flat = {**CONFIGS["qwen2"][0], "model_type": "qwen2_vl", "vision_config": {"depth": 2}}
    assert num_params(flat) == num_params({**flat, "model_type": "qwen2"})
    assert read_model(flat).notes[0] == (
        "of qwen2_vl the text part is counted; vision_config left out"
    )


def test_deepseeks_attention_is_latent_unless_the_file_says_otherwise():
    config = {"model_type": "deepseek_v2", **CONFIGS["deepseek_v2"][0]}
    plain = layers_of({**config, "use_mla": False, "num_key_value_heads": 3})[1].mixer
    assert (plain.queries, plain.keys, plain.between) == (48, 24, 0)
    assert layers_of(config)[1].mixer == layers_of({**config, "use_mla": True})[1].mixer
    assert layers_of(config)[1].mixer.between > 0


def test_layers_that_predict_further_tokens_are_left_out_and_named():
    config = {"model_type": "deepseek_v3", **CONFIGS["deepseek_v3"][0]}
    (note,) = read_model({**config, "num_nextn_predict_layers": 1}).notes
    assert "(num_nextn_predict_layers) are left out" in note
    assert num_params({**config, "num_nextn_predict_layers": 1}) == num_params(config)
