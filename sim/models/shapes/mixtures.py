"""Mixtures of experts: styles by `model_type`, as transformers' classes have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sim.models.shapes.dense import LLAMA, MISTRAL, QWEN3, QWEN_WINDOWS
from sim.models.shapes.reading import Reading
from sim.models.shapes.style import Experts, Sparse, Style, Windows

_BIAS = ("attention_bias", False)
_LOCAL = ("num_local_experts", "num_experts")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def _by_step(reading: Reading, count: int) -> Sequence[bool]:
    """Return Qwen's sparse layers: every so many, but for those that are named dense."""
    step = reading.count("decoder_sparse_step", usual=1)
    dense = reading.indices("mlp_only_layers") or ()
    return [(index + 1) % step == 0 and index not in dense for index in range(count)]


def _behind(usual: int, step: str | None = None) -> Sparse:
    """Return DeepSeek's sparse layers: all behind the first dense ones."""

    def sparse(reading: Reading, count: int) -> Sequence[bool]:
        first = reading.count("first_k_dense_replace", usual=usual, least=0)
        every = 1 if step is None else reading.count(step, usual=1)
        return [index >= first and index % every == 0 for index in range(count)]

    return sparse


def _interleaved(reading: Reading, count: int) -> Sequence[bool]:
    """Return Llama 4's sparse layers."""
    listed = reading.indices("moe_layers")
    step = reading.count("interleave_moe_layer_step", usual=1, least=0)
    if listed is None:
        return [bool(step) and (index + 1) % step == 0 for index in range(count)]
    return [index in listed for index in range(count)]


def _between(reading: Reading, count: int) -> Sequence[bool]:
    """Return Ernie's sparse layers."""
    first = reading.count("moe_layer_start_index", usual=1, least=0)
    given = reading.config.get("moe_layer_end_index")
    last = count - 1 if given in (-1, None) else reading.count("moe_layer_end_index", least=0)
    step = reading.count("moe_layer_interval", usual=1)
    return [first <= index <= last and (index + 1) % step == 0 for index in range(count)]


QWEN2_EXPERTS = Experts(
    sparse=_by_step,
    shared="shared_expert_intermediate_size", shared_gate=True,
)  # fmt: skip
_DEEPSEEK = Experts(
    number=("n_routed_experts", "num_local_experts", "num_experts"),
    num_shared=("n_shared_experts",), usual_shared=2, sparse=_behind(0, "moe_layer_freq"),
)  # fmt: skip
_DEEPSEEK3 = replace(_DEEPSEEK, usual_shared=1, sparse=_behind(3, "moe_layer_freq"))
_DEEPSEEK_V3 = Style(latent=True, qkv_bias=_BIAS, experts=_DEEPSEEK3, usual={"q_lora_rank": 1536})
_GLM_MOE = Style(
    qkv_bias=_BIAS, head_norm="head", head_norm_switch=("use_qk_norm", False),
    experts=replace(_DEEPSEEK, usual_shared=1, sparse=_behind(1)),
)  # fmt: skip
_GRANITE = Experts(number=_LOCAL, inner=("intermediate_size",))

MIXTURES: Mapping[str, Style] = {
    "mixtral": replace(
        MISTRAL, windows=Windows(), experts=Experts(number=_LOCAL, inner=("intermediate_size",))
    ),
    "qwen2_moe": Style(
        qkv_bias=("qkv_bias", True), usual_groups=16, windows=QWEN_WINDOWS, experts=QWEN2_EXPERTS
    ),
    "qwen3_moe": replace(
        QWEN3, usual_head=None, usual_groups=4, experts=Experts(sparse=_by_step)
    ),
    "olmoe": Style(
        qkv_bias=_BIAS, out_bias=_BIAS, head_norm="whole",
        experts=Experts(inner=("intermediate_size",)),
    ),
    "flex_olmo": Style(
        norms=_POST_NORMS, qkv_bias=_BIAS, out_bias=_BIAS, head_norm="whole",
        experts=Experts(inner=("intermediate_size",)),
    ),
    "granitemoe": replace(LLAMA, experts=_GRANITE),
    "granitemoeshared": replace(
        LLAMA, experts=replace(_GRANITE, shared="shared_intermediate_size", fused=True)
    ),
    "gpt_oss": Style(
        qkv_bias=("attention_bias", True), out_bias=("attention_bias", True), sinks=True,
        usual_head=64, usual_groups=8, windows=Windows(usual=128, every=2),
        experts=Experts(
            number=_LOCAL, chosen=("num_experts_per_tok", "experts_per_token"),
            inner=("intermediate_size",), bias=True,
        ),
    ),
    "llama4_text": Style(
        qkv_bias=_BIAS, out_bias=_BIAS, usual_head=128, usual_groups=8,
        windows=Windows(field="attention_chunk_size", usual=8192, every=4),
        experts=Experts(
            number=_LOCAL, inner=("intermediate_size",), dense=("intermediate_size_mlp",),
            sparse=_interleaved, shares_inner=True,
        ),
        usual={
            "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48, "num_attention_heads": 40, "vocab_size": 202048,
            "num_local_experts": 16, "num_experts_per_tok": 1,
        },
    ),
    "phimoe": Style(
        norm="layer", qkv_bias=_BIAS, out_bias=_BIAS, head_bias=("lm_head_bias", False),
        usual_groups=8, windows=Windows(),
        experts=Experts(number=_LOCAL, inner=("intermediate_size",)),
    ),
    "deepseek_v2": Style(
        latent=True, qkv_bias=_BIAS, mlp_bias=("mlp_bias", False), experts=_DEEPSEEK,
        usual={"q_lora_rank": 1536},
    ),
    "deepseek": Style(qkv_bias=_BIAS, out_bias=_BIAS, experts=_DEEPSEEK),  # its own code
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": replace(_DEEPSEEK_V3, indexer=True),
    "glm_moe_dsa": replace(_DEEPSEEK_V3, indexer=True),
    "glm4_moe": _GLM_MOE,
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3, usual={"q_lora_rank": 768},
        experts=replace(_DEEPSEEK, usual_shared=1, sparse=_behind(1)),
    ),
    "dots1": Style(
        qkv_bias=_BIAS, out_bias=_BIAS, head_norm="head",
        windows=Windows(since="max_window_layers"),
        experts=replace(_DEEPSEEK, usual_shared=0),
    ),
    "ernie4_5_moe": Style(
        qkv_bias=("use_bias", False), out_bias=("use_bias", False), mlp_bias=("use_bias", False),
        head_bias=("use_bias", False), usual_groups=4, is_tied=True,
        experts=Experts(
            number=("moe_num_experts", "num_experts"), chosen=("moe_k", "num_experts_per_tok"),
            num_shared=("moe_num_shared_experts",), usual_shared=2, expert_bias=True,
            sparse=_between,
        ),
    ),
    "exaone_moe": Style(
        head_norm="head", usual_groups=32, windows=Windows(usual=4096, every=4),
        experts=Experts(num_shared=("num_shared_experts",), usual_shared=1, sparse=_behind(1)),
    ),
    "minimax_m2": Style(
        head_norm="whole", usual_groups=8,
        experts=Experts(number=_LOCAL, inner=("intermediate_size",)),
    ),
    "solar_open": replace(
        _GLM_MOE, head_norm=None, usual_head=128, usual_groups=8,
        experts=replace(_DEEPSEEK, usual_shared=1, sparse=_behind(0)),
    ),
}  # fmt: skip
"""Style of each mixture's family, by `model_type`."""
