"""Parameter shapes of a model, from its config.json alone: which tensors, layer by layer.

Covers the Llama family (with Mistral, Qwen2 and its biases, Qwen3, text-only Gemma, Phi-3 and
Phi-4, Mixtral and Qwen2-MoE experts), GPT-2, OPT and BERT, as Hugging Face's language models hold
them. Matrices are (O, I), as the gradient of a linear layer is: I is the input channel, the
engine's column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from sim.models.fields import Config, check, first_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One weight or bias tensor."""

    name: str
    shape: tuple[int, ...]
    active: float = 1.0
    """Share of tokens that compute with it: below 1 for the experts of a mixture."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Tensors that are used together, in the order of the forward pass."""

    name: str
    parameters: tuple[Parameter, ...]
    attention_width: int = 0
    """Width of queries over all heads; 0 for a layer without attention."""

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def gates(self) -> list[tuple[Parameter, float]]:
        """Matrices that make gates, and how wide these are."""
        named = [p for p in self.parameters if p.name.endswith("gate_proj.weight")]
        both = [p for p in self.parameters if p.name.endswith("gate_up_proj.weight")]
        return [*((p, float(p.shape[0])) for p in named), *((p, p.shape[0] / 2) for p in both)]

    def without(self, prefixes: tuple[str, ...]) -> Layer:
        """Return the layer without the tensors whose names begin so."""
        return replace(
            self, parameters=tuple(p for p in self.parameters if not p.name.startswith(prefixes))
        )

    @property
    def is_gated(self) -> bool:
        """Whether its feed-forward has a gate."""
        return bool(self.gates)


def layers_of(config: Config) -> list[Layer]:
    """Return a model's layers, first to last; a tied output layer has no tensor of its own.

    Raises:
        ConfigError: The family is not known, or a field that is read is missing or can't be.

    Examples:
        >>> from sim.models.table import find_model
        >>> [layer.name for layer in layers_of(find_model("gpt2")[1])][:2]
        ['embedding', 'h.0']
    """
    check(config, FAMILIES)
    return FAMILIES[config["model_type"]](config)


def num_params(config: Config) -> int:
    """Return the number of parameters of the model, tied ones counted once."""
    return sum(layer.numel for layer in layers_of(config))


def _layers(
    first: Iterable[Parameter],
    name: str,
    count: int,
    own: Iterable[Parameter],
    attention_width: int,
    last: Iterable[Parameter],
) -> list[Layer]:
    """Return an embedding, so many layers with the same tensors of their own, and a head."""
    same = tuple(own)  # the same object, which lets others count it once
    return [
        Layer(name="embedding", parameters=tuple(first)),
        *(
            Layer(name=f"{name}.{index}", parameters=same, attention_width=attention_width)
            for index in range(count)
        ),
        Layer(name="head", parameters=tuple(last)),
    ]


def _matrix(name: str, out: int, into: int, *, bias: bool = False) -> list[Parameter]:
    found = [Parameter(name=f"{name}.weight", shape=(out, into))]
    return [*found, _vector(f"{name}.bias", out)] if bias else found


def _matrices(names: Iterable[str], out: int, into: int, *, bias: bool = False) -> list[Parameter]:
    return [parameter for name in names for parameter in _matrix(name, out, into, bias=bias)]


def _conv1d(name: str, into: int, out: int) -> list[Parameter]:
    """Return GPT-2's own linear layer: it holds (I, O), so its rows are the input channels."""
    return [*_matrix(name, into, out), _vector(f"{name}.bias", out)]


def _vector(name: str, width: int) -> Parameter:
    return Parameter(name=name, shape=(width,))


def _norm(name: str, width: int) -> list[Parameter]:
    return [_vector(f"{name}.weight", width), _vector(f"{name}.bias", width)]


def _llama(config: Config) -> list[Layer]:
    kind = config["model_type"]
    width, heads = config["hidden_size"], config["num_attention_heads"]
    vocabulary = config["vocab_size"]
    head = config.get("head_dim") or width // heads
    groups = config.get("num_key_value_heads") or heads
    own = [
        _vector("input_layernorm.weight", width),
        *_attention(config, width, heads * head, groups * head, head),
        *(_vector(f"{name}_layernorm.weight", width) for name in _more_norms(kind)),
        *_feed_forward(config, width),
    ]
    last = [_vector("norm.weight", width)]
    if not config.get("tie_word_embeddings", kind.startswith("gemma")):
        last += _matrix("lm_head", vocabulary, width)
    first, count = _matrix("embed_tokens", vocabulary, width), config["num_hidden_layers"]
    return _layers(first, "layers", count, own, heads * head, last)


def _more_norms(kind: str) -> tuple[str, ...]:
    """Return the norms of a layer behind its first one."""
    if kind in ("gemma2", "gemma3_text"):
        return ("post_attention", "pre_feedforward", "post_feedforward")
    return ("post_attention",)


def _attention(config: Config, width: int, queries: int, keys: int, head: int) -> list[Parameter]:
    """Return attention's projections, in one matrix for Phi, and the norms of queries and keys."""
    kind = config["model_type"]
    is_qwen2 = kind.startswith("qwen2")
    bias = is_qwen2 or bool(config.get("attention_bias"))
    if kind == "phi3":
        return [
            *_matrix("qkv_proj", queries + 2 * keys, width),
            *_matrix("o_proj", width, queries),
        ]
    norms = ("q_norm", "k_norm") if kind in ("qwen3", "gemma3_text") else ()
    return [
        *_matrix("q_proj", queries, width, bias=bias),
        *_matrices(("k_proj", "v_proj"), keys, width, bias=bias),
        *_matrix("o_proj", width, queries, bias=bias and not is_qwen2),
        *(_vector(f"{name}.weight", head) for name in norms),
    ]


def _feed_forward(config: Config, width: int) -> list[Parameter]:
    """Return a gated feed-forward layer, or a mixture of them with its router."""
    kind = config["model_type"]
    bias = bool(config.get("mlp_bias"))
    if kind == "phi3":  # both factors in one matrix
        inner = config["intermediate_size"]
        return [
            *_matrix("mlp.gate_up_proj", 2 * inner, width),
            *_matrix("mlp.down_proj", width, inner),
        ]
    if kind not in ("mixtral", "qwen2_moe"):
        return _gated("mlp", width, config["intermediate_size"], bias=bias)
    experts = first_of(config, "num_local_experts", "num_experts")
    share = config["num_experts_per_tok"] / experts
    own = ("moe_intermediate_size",) if kind == "qwen2_moe" else ()
    inner = first_of(config, *own, "intermediate_size")
    found = _matrix("router", experts, width)
    for index in range(experts):
        found += _gated(f"experts.{index}", width, inner, active=share)
    if kind == "qwen2_moe":
        found += _gated("shared_expert", width, config["shared_expert_intermediate_size"])
        found += _matrix("shared_expert_gate", 1, width)
    return found


def _gated(
    name: str, width: int, inner: int, *, bias: bool = False, active: float = 1.0
) -> list[Parameter]:
    made = [
        *_matrix(f"{name}.gate_proj", inner, width, bias=bias),
        *_matrix(f"{name}.up_proj", inner, width, bias=bias),
        *_matrix(f"{name}.down_proj", width, inner, bias=bias),
    ]
    return [Parameter(name=p.name, shape=p.shape, active=active) for p in made]


def _gpt2(config: Config) -> list[Layer]:
    width, vocabulary = config["n_embd"], config["vocab_size"]
    inner = config.get("n_inner") or 4 * width
    first = [
        *_matrix("wte", vocabulary, width),
        *_matrix("wpe", config["n_positions"], width),
    ]
    own = [
        *_norm("ln_1", width),
        *_conv1d("c_attn", width, 3 * width),
        *_conv1d("c_proj", width, width),
        *_norm("ln_2", width),
        *_conv1d("c_fc", width, inner),
        *_conv1d("mlp.c_proj", inner, width),
    ]
    last = _norm("ln_f", width)
    if config.get("tie_word_embeddings") is False:
        last += _matrix("lm_head", vocabulary, width)
    return _layers(first, "h", config["n_layer"], own, width, last)


def _opt(config: Config) -> list[Layer]:
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    inner = config["ffn_dim"]
    outer = config.get("word_embed_proj_dim") or width
    bias = config.get("enable_bias", True)
    is_affine = config.get("layer_norm_elementwise_affine", True)
    norm = _norm if is_affine else lambda name, width: []
    first = [
        *_matrix("embed_tokens", vocabulary, outer),
        # Positions are counted from 2, a habit of fairseq's padding.
        *_matrix("embed_positions", config["max_position_embeddings"] + 2, width),
    ]
    last: list[Parameter] = []
    if config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm"):
        last += norm("final_layer_norm", width)
    if outer != width:
        first += _matrix("project_in", width, outer)
        last += _matrix("project_out", outer, width)
    if config.get("tie_word_embeddings") is False:
        last += _matrix("lm_head", vocabulary, outer)
    own = [
        *norm("self_attn_layer_norm", width),
        *_matrices(("q_proj", "k_proj", "v_proj", "out_proj"), width, width, bias=bias),
        *norm("final_layer_norm", width),
        *_matrix("fc1", inner, width, bias=bias),
        *_matrix("fc2", width, inner, bias=bias),
    ]
    return _layers(first, "layers", config["num_hidden_layers"], own, width, last)


def _bert(config: Config) -> list[Layer]:
    """Return BERT as a masked language model, without a pooler."""
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    inner = config["intermediate_size"]
    first = [
        *_matrix("word_embeddings", vocabulary, width),
        *_matrix("position_embeddings", config["max_position_embeddings"], width),
        *_matrix("token_type_embeddings", config.get("type_vocab_size") or 2, width),
        *_norm("LayerNorm", width),
    ]
    own = [
        *_matrices(("query", "key", "value", "attention.output"), width, width, bias=True),
        *_norm("attention.output.LayerNorm", width),
        *_matrix("intermediate", inner, width, bias=True),
        *_matrix("output", width, inner, bias=True),
        *_norm("output.LayerNorm", width),
    ]
    last = [
        *_matrix("transform", width, width, bias=True),
        *_norm("transform.LayerNorm", width),
        _vector("decoder.bias", vocabulary),
    ]
    if config.get("tie_word_embeddings") is False:
        last += _matrix("decoder", vocabulary, width)
    return _layers(first, "layer", config["num_hidden_layers"], own, width, last)


FAMILIES: Mapping[str, Callable[[Config], list[Layer]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gemma": _llama,
    "gemma2": _llama,
    "gemma3_text": _llama,
    "phi3": _llama,
    "mixtral": _llama,
    "qwen2_moe": _llama,
    "gpt2": _gpt2,
    "opt": _opt,
    "bert": _bert,
}
"""Layers of each `model_type` of a config.json, as a function of the file."""
