"""Shapes from a config.json are those of transformers' own model, tensor for tensor."""

import pytest

from sim.models.families import layers_of, num_params
from sim.models.table import find_model, model_names

SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
LLAMA = {"model_type": "llama", **SMALL, "intermediate_size": 96}
GROUPED = {**LLAMA, "num_key_value_heads": 2}
OPT = {"model_type": "opt", **SMALL, "ffn_dim": 96, "max_position_embeddings": 64}
CONFIGS = {
    "llama": LLAMA,
    "llama, grouped, tied": {
        **GROUPED, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
    },
    "llama, wide heads": {**LLAMA, "head_dim": 32},
    "mistral": {**GROUPED, "model_type": "mistral"},
    "qwen2": {**GROUPED, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "model_type": "qwen3", "head_dim": 16},
    "gemma, tied where nothing is said": {**GROUPED, "model_type": "gemma", "head_dim": 16},
    "gemma2": {**GROUPED, "model_type": "gemma2", "head_dim": 16},
    "gemma3": {**GROUPED, "model_type": "gemma3_text", "head_dim": 16},
    "phi3": {**GROUPED, "model_type": "phi3", "pad_token_id": 0},
    "mixtral": {
        **GROUPED, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        **GROUPED, "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 100,
             "n_positions": 64},
    "opt": OPT,
    "opt, as the 350M one": {**OPT, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
    "bert": {**LLAMA, "model_type": "bert", "max_position_embeddings": 64},
}  # fmt: skip


def transformers_parameters(config):
    """Return the parameters of transformers' own model of a configuration."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = {key: config[key] for key in config if key not in ("_name_or_path", "torch_dtype")}
    kind = fields.pop("model_type")
    family = "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM"
    made = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):  # shapes alone, at once even for 72 billion parameters
        model = getattr(transformers, family).from_config(made)
    model.tie_weights()
    return list(model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_there_are_as_many_parameters_as_in_transformers_model(name):
    parameters = transformers_parameters(CONFIGS[name])
    assert num_params(CONFIGS[name]) == sum(p.numel() for p in parameters)


@pytest.mark.parametrize("name", model_names())
def test_named_models_have_the_tensors_of_transformers_model(name):
    config = find_model(name)[1]
    parameters = transformers_parameters(config)
    assert num_params(config) == sum(p.numel() for p in parameters)
    if "num_experts_per_tok" not in config:  # transformers may hold a layer's experts as one
        shapes = [p.shape for layer in layers_of(config) for p in layer.parameters]
        assert sorted(shapes) == sorted(tuple(p.shape) for p in parameters)


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_stand_between_embedding_and_head(name):
    layers = layers_of(CONFIGS[name])
    assert [layers[0].name, layers[-1].name] == ["embedding", "head"]
    middle = layers[1:-1]
    assert len(middle) == 3
    assert len({layer.numel for layer in middle}) == 1
    assert all(layer.attention_width > 0 for layer in middle)


def test_experts_compute_for_their_share_of_the_tokens():
    layer = layers_of(CONFIGS["mixtral"])[1]
    shares = {p.name.split(".")[0]: p.active for p in layer.parameters}
    assert shares["experts"] == 0.5
    assert shares["q_proj"] == shares["router"] == 1.0
