"""Attention of a decoder's layer: its projections, their norms and biases, and its widths."""

from __future__ import annotations

from sim.models.shapes.parts import Mixer, Parameter, matrices, matrix, norm, vector
from sim.models.shapes.reading import Reading
from sim.models.shapes.style import Style

Mixing = tuple[list[Parameter], Mixer, float]
"""Tensors of attention or a recurrence, its widths, and the width that its own norms have."""


def attention(reading: Reading, style: Style, width: int) -> Mixing:
    """Return attention over heads in groups, or from low ranks."""
    heads = reading.count("num_attention_heads")
    if style.latent and reading.switch(("use_mla", True)):  # false in DeepSeek-VL2's small ones
        return _latent(reading, style, width, heads)
    own = reading.maybe(*style.called("head_dim"), absent=style.usual_head)
    if own is None:
        why = " where head_dim is not given"
        reading.divides(heads, "num_attention_heads", width, "hidden_size", why)
    head = own or max(1, width // heads)
    names = style.called("num_key_value_heads")
    groups = reading.maybe(*names, absent=style.usual_groups) or heads
    reading.divides(
        groups, names[0], heads, "num_attention_heads",
        "" if names[0] in reading.config else f" ({groups} where it is missing)",
    )  # fmt: skip
    queries, keys = heads * head, groups * head
    bias, out_bias = reading.switch(style.qkv_bias), reading.switch(style.out_bias)
    gate = queries if style.output_gate else 0
    if style.fused_qkv:
        found = matrix("qkv_proj", queries + 2 * keys, width, bias=bias)
    else:
        found = matrix("q_proj", queries + gate, width, bias=bias)
        found += matrices(("k_proj", "v_proj"), keys, width, bias=bias)
    found += matrix("o_proj", width, queries, bias=out_bias)
    norms, normed = _head_norms(reading, style, heads, groups, head)
    found += norms
    found += [vector("sinks", heads)] if style.sinks else []
    if style.inner_norms:
        found.append(vector("attn_sub_norm.weight", queries))
        normed += queries
    mixer = Mixer(
        heads=heads, queries=queries, keys=keys, values=keys, outputs=queries, between=gate
    )
    return found, mixer, normed


def _head_norms(
    reading: Reading, style: Style, heads: int, groups: int, head: int
) -> tuple[list[Parameter], float]:
    """Return the norms of queries and keys, and their width."""
    if style.head_norm is None or not reading.switch(style.head_norm_switch):
        return [], 0.0
    found = []
    for name, count in (("q_norm", heads), ("k_norm", groups)):
        if style.head_norm == "whole":
            found += norm(name, count * head, bias=style.head_norm_bias)
        elif style.head_norm == "head":
            found += norm(name, head, bias=style.head_norm_bias)
        else:
            for index in range(count):
                found += norm(f"{name}.{index}", head, bias=style.head_norm_bias)
    return found, float((heads + groups) * head)


def _latent(reading: Reading, style: Style, width: int, heads: int) -> Mixing:
    """Return attention whose keys and values come from one vector of low rank for each token.

    DeepSeek-V2 (arXiv 2405.04434, section 2.1). A part of each head's queries and keys is rotated;
    that of the keys is common to all heads.
    """
    bias = reading.switch(style.qkv_bias)
    rank = reading.maybe("q_lora_rank", absent=style.usual.get("q_lora_rank"))
    low = reading.count("kv_lora_rank")
    plain, rotated = reading.count("qk_nope_head_dim"), reading.count("qk_rope_head_dim")
    value = reading.count("v_head_dim")
    queries = heads * (plain + rotated)
    if rank is None:
        found = matrix("q_proj", queries, width)
    else:
        found = [
            *matrix("q_a_proj", rank, width, bias=bias), vector("q_a_layernorm.weight", rank),
            *matrix("q_b_proj", queries, rank),
        ]  # fmt: skip
    found += [
        *matrix("kv_a_proj_with_mqa", low + rotated, width, bias=bias),
        vector("kv_a_layernorm.weight", low),
        *matrix("kv_b_proj", heads * (plain + value), low),
        *matrix("o_proj", width, heads * value, bias=bias),
    ]
    scored = 0
    if style.indexer:
        network, scored = _indexer(reading, width, rank)
        found += network
    between = (rank or 0) + low + rotated
    mixer = Mixer(
        heads=heads, queries=queries, keys=queries, values=heads * value, outputs=heads * value,
        between=between, scored=scored,
    )  # fmt: skip
    return found, mixer, float((rank or 0) + low)


def _indexer(reading: Reading, width: int, rank: int | None) -> tuple[list[Parameter], int]:
    """Return the network that scores the tokens to attend to (DeepSeek-V3.2), and its width."""
    heads, head = reading.count("index_n_heads"), reading.count("index_head_dim")
    reading.rule(rank is not None, "q_lora_rank must be given: the indexer reads its queries")
    found = [
        *matrix("indexer.wq_b", heads * head, rank or 1), *matrix("indexer.wk", head, width),
        *norm("indexer.k_norm", head), *matrix("indexer.weights_proj", heads, width),
    ]  # fmt: skip
    return found, heads * head
