"""Families of GPT's kind by `model_type`, as transformers' classes have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from sim.models.shapes.parts import Layer
from sim.models.shapes.plain import Plain, bert, falcon, opt, plain
from sim.models.shapes.reading import Reading

_GPT2 = Plain(
    width=("n_embd", "hidden_size"), layers=("n_layer", "num_hidden_layers"),
    heads=("n_head", "num_attention_heads"), inner=("n_inner",), positions="n_positions",
    is_transposed=True,
    dropouts=("resid_pdrop", "attn_pdrop", 0.1),
)  # fmt: skip
_GPTJ = Plain(
    width=("n_embd", "hidden_size"), layers=("n_layer", "num_hidden_layers"),
    heads=("n_head", "num_attention_heads"), inner=("n_inner",), qkv_bias=False, out_bias=False,
    head_bias=True, is_fused=False, num_norms=1, is_tied=False,
)  # fmt: skip

STYLES: Mapping[str, Plain] = {
    "gpt2": _GPT2,
    "gpt_bigcode": Plain(
        width=_GPT2.width, layers=_GPT2.layers, heads=_GPT2.heads, inner=("n_inner",),
        positions="n_positions", multi_query=("multi_query", True),
        dropouts=("resid_pdrop", "attn_pdrop", 0.1),
    ),
    "gpt_neo": Plain(
        layers=("num_layers", "num_hidden_layers"), heads=("num_heads", "num_attention_heads"),
        inner=("intermediate_size",), positions="max_position_embeddings", is_fused=False,
        qkv_bias=False, local="window_size", dropouts=("resid_dropout", "attention_dropout", 0.0),
    ),
    "gpt_neox": Plain(
        width=("hidden_size",), layers=("num_hidden_layers",), heads=("num_attention_heads",),
        inner=("intermediate_size",), inner_default=None, qkv_bias=("attention_bias", True),
        out_bias=("attention_bias", True), is_tied=False,
        dropouts=("hidden_dropout", "attention_dropout", 0.0),
    ),
    "gptj": _GPTJ,
    "codegen": Plain(
        width=_GPTJ.width, layers=_GPTJ.layers, heads=_GPTJ.heads, inner=("n_inner",),
        qkv_bias=False, out_bias=False, head_bias=True, num_norms=1, is_tied=False,
    ),
    "bloom": Plain(
        width=("hidden_size", "n_embed"), layers=("n_layer", "num_hidden_layers"),
        heads=("n_head", "num_attention_heads"), inner=(), embedding_norm=True,
        dropouts=("hidden_dropout", "attention_dropout", 0.0),
    ),
    "mpt": Plain(
        width=("d_model", "hidden_size"), layers=("n_layers", "num_hidden_layers"),
        heads=("n_heads", "num_attention_heads"), inner=(), qkv_bias=False, out_bias=False,
        mlp_bias=False, norm_bias=False, dropouts=("resid_pdrop", "attn_pdrop", 0.0),
    ),
    "xglm": Plain(
        width=("d_model", "hidden_size"), layers=("num_layers", "num_hidden_layers"),
        heads=("attention_heads", "num_attention_heads"), inner=("ffn_dim",), inner_default=None,
        is_fused=False, dropouts=("dropout", "attention_dropout", 0.1),
    ),
    "biogpt": Plain(
        width=("hidden_size",), layers=("num_hidden_layers",), heads=("num_attention_heads",),
        inner=("intermediate_size",), inner_default=None, positions="max_position_embeddings",
        offset=2, is_fused=False,
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob", 0.1),
    ),
}  # fmt: skip
"""Style of each family of GPT's kind, by `model_type`."""

OTHERS: Mapping[str, Callable[[Reading], list[Layer]]] = {
    **{kind: partial(plain, style=style) for kind, style in STYLES.items()},
    "falcon": falcon, "opt": opt, "bert": bert,
}  # fmt: skip
