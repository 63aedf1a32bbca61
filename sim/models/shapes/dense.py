"""Dense decoders: styles of Llama's kind by `model_type`, as transformers' classes have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sim.models.shapes.style import Style, Windows

_BIAS = ("attention_bias", False)
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_FOUR_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)  # fmt: skip

LLAMA = Style(
    qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias=("mlp_bias", False),
    usual={
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32000,
    },
)  # fmt: skip
MISTRAL = Style(
    usual_groups=8, windows=Windows(usual=4096), usual={**LLAMA.usual, "intermediate_size": 14336}
)
QWEN_WINDOWS = Windows(switch=("use_sliding_window", False), since="max_window_layers")
QWEN2 = Style(
    qkv_bias=True, usual_groups=32, windows=QWEN_WINDOWS,
    usual={**LLAMA.usual, "intermediate_size": 22016, "vocab_size": 151936},
)  # fmt: skip
QWEN3 = Style(
    qkv_bias=_BIAS, out_bias=_BIAS, head_norm="head", usual_head=128, usual_groups=32,
    windows=QWEN_WINDOWS, usual=QWEN2.usual,
)  # fmt: skip
_GEMMA = Style(
    qkv_bias=_BIAS, out_bias=_BIAS, usual_head=256, usual_groups=16, is_tied=True,
    usual={
        "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "vocab_size": 256000,
    },
)  # fmt: skip
_GEMMA_2_SIZES = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "vocab_size": 256000,
}  # fmt: skip
_GEMMA2 = Style(
    norms=_FOUR_NORMS, qkv_bias=_BIAS, out_bias=_BIAS, usual_head=256, usual_groups=4,
    is_tied=True, windows=Windows(usual=4096, every=2), usual=_GEMMA_2_SIZES,
)  # fmt: skip
_GEMMA3 = Style(
    norms=_FOUR_NORMS, qkv_bias=_BIAS, out_bias=_BIAS, head_norm="head", usual_head=256,
    usual_groups=4, is_tied=True, windows=Windows(usual=4096, every=6),
    usual={**_GEMMA_2_SIZES, "vocab_size": 262208},
)  # fmt: skip
_COHERE = Style(
    norms=("input_layernorm",), qkv_bias=_BIAS, out_bias=_BIAS, is_tied=True,
    head_norm="whole", head_norm_switch=("use_qk_norm", False),
)  # fmt: skip
_OLMO2 = Style(norms=_POST_NORMS, qkv_bias=_BIAS, out_bias=_BIAS, head_norm="whole")

DENSE: Mapping[str, Style] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "ministral": Style(usual_groups=8, windows=Windows()),
    "ministral3": Style(usual_head=128, usual_groups=8, windows=Windows()),
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "vaultgemma": Style(
        norms=("input_layernorm", "pre_feedforward_layernorm"), qkv_bias=_BIAS, out_bias=_BIAS,
        usual_head=256, usual_groups=4, is_tied=True, windows=Windows(usual=4096, every=2),
    ),
    "phi3": Style(
        fused_qkv=True, fused_gate=True, windows=Windows(),
        dropouts=("resid_pdrop", "attention_dropout"),
    ),
    "phi": Style(
        norms=("input_layernorm",), norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True,
        head_bias=True, is_gated=False, head_norm="head", head_norm_bias=True,
        head_norm_switch=("qk_layernorm", False), dropouts=("resid_pdrop", "attention_dropout"),
    ),
    "olmo": Style(norm="none", qkv_bias=_BIAS, out_bias=_BIAS),
    "olmo2": _OLMO2,
    "olmo3": Style(
        norms=_POST_NORMS, qkv_bias=_BIAS, out_bias=_BIAS, head_norm="whole",
        windows=Windows(usual=4096, every=4),
    ),
    "cohere": _COHERE,
    "cohere2": Style(
        norms=("input_layernorm",), qkv_bias=_BIAS, out_bias=_BIAS, is_tied=True,
        windows=Windows(usual=4096, every=4),
    ),
    "granite": LLAMA,
    "glm": Style(
        qkv_bias=("attention_bias", True), fused_gate=True, usual_head=128, usual_groups=2
    ),
    "glm4": Style(
        norms=_FOUR_NORMS, qkv_bias=("attention_bias", True), fused_gate=True,
        usual_head=128, usual_groups=2,
    ),
    "smollm3": Style(
        qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias=("mlp_bias", False), usual_groups=4,
        is_tied=True, windows=QWEN_WINDOWS,
    ),
    "exaone4": Style(
        norms=_POST_NORMS, head_norm="head", usual_groups=32,
        windows=Windows(usual=4096, every=4),
    ),
    "starcoder2": Style(
        norm="layer", qkv_bias=("use_bias", True), out_bias=("use_bias", True),
        mlp_bias=("use_bias", True), is_gated=False, usual_groups=2, is_tied=True,
        windows=Windows(), dropouts=("residual_dropout", "attention_dropout"),
    ),
    "stablelm": Style(
        norm="layer", norm_switch=("use_parallel_residual", False),
        qkv_bias=("use_qkv_bias", False), head_norm="heads",
        head_norm_switch=("qk_layernorm", False), usual_groups=32,
        dropouts=("hidden_dropout", "attention_dropout"),
    ),
    "nemotron": Style(
        norm="layer", qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias=("mlp_bias", False),
        is_gated=False,
    ),
    "seed_oss": Style(
        qkv_bias=("attention_bias", True), out_bias=("attention_out_bias", False),
        mlp_bias=("mlp_bias", False), usual_head=128, usual_groups=8,
        dropouts=("residual_dropout", "attention_dropout"),
    ),
    "ernie4_5": Style(
        qkv_bias=("use_bias", False), out_bias=("use_bias", False), mlp_bias=("use_bias", False),
        usual_head=128, usual_groups=2, is_tied=True,
    ),
    "hunyuan_v1_dense": Style(qkv_bias=_BIAS, out_bias=_BIAS, head_norm="head"),
    "helium": Style(qkv_bias=_BIAS, mlp_bias=("mlp_bias", False), usual_head=128, usual_groups=20),
    "arcee": Style(
        qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias=("mlp_bias", False), is_gated=False
    ),
    "apertus": Style(
        qkv_bias=_BIAS, out_bias=_BIAS, is_gated=False, head_norm="head",
        scalars=("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n"),
    ),
    "bitnet": Style(qkv_bias=_BIAS, out_bias=_BIAS, inner_norms=True),
    "cwm": Style(windows=Windows(usual=8192), usual_head=128, usual_groups=8),
    "iquestcoder": replace(LLAMA, usual_head=128, usual_groups=8),
    "jais2": Style(
        norm="layer", qkv_bias=("attention_bias", True), out_bias=("attention_bias", True),
        mlp_bias=("mlp_bias", True), is_gated=False, usual_head=128,
    ),
    "internlm3": replace(LLAMA, usual_head=128, usual_groups=2),
    # Families with code of their own beside their files, by that code.
    "baichuan": Style(fused_qkv=True),  # modeling_baichuan.py of the 7B
    "chatglm": Style(
        qkv_bias=("add_qkv_bias", False), out_bias=("add_bias_linear", False),
        mlp_bias=("add_bias_linear", False), fused_qkv=True, fused_gate=True,
        names={
            "num_hidden_layers": ("num_layers",), "vocab_size": ("padded_vocab_size",),
            "intermediate_size": ("ffn_hidden_size",), "head_dim": ("kv_channels",),
            "num_key_value_heads": ("multi_query_group_num",),
        },
    ),
    "exaone": Style(names={"num_hidden_layers": ("num_layers", "num_hidden_layers")}),
    "internlm2": Style(qkv_bias=("bias", False), out_bias=("bias", False), fused_qkv=True),
    "qwen": Style(
        qkv_bias=True, fused_qkv=True, halves_inner=True, names={"head_dim": ("kv_channels",)}
    ),
    "nanochat": Style(norm="none", qkv_bias=_BIAS, out_bias=_BIAS, is_gated=False),
    "persimmon": Style(
        norm="layer", fused_qkv=True, qkv_bias=True, out_bias=True, mlp_bias=True,
        is_gated=False, head_norm="head", head_norm_bias=True,
        head_norm_switch=("qk_layernorm", True), dropouts=("hidden_dropout", "attention_dropout"),
    ),
    "youtu": Style(
        latent=True, qkv_bias=_BIAS, is_tied=True, usual={"q_lora_rank": 1536},
    ),
    "minicpm3": Style(latent=True, qkv_bias=_BIAS, is_tied=True, usual={"q_lora_rank": 768}),
}  # fmt: skip
"""Style of each dense family of Llama's kind, by `model_type`."""
