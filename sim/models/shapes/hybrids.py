"""Hybrids by `model_type`, as transformers' classes have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from sim.models.shapes.dense import LLAMA, QWEN3
from sim.models.shapes.hybrid import Block, Hybrid, by_types, hybrid
from sim.models.shapes.mixtures import QWEN2_EXPERTS
from sim.models.shapes.parts import Layer
from sim.models.shapes.reading import Reading
from sim.models.shapes.recurrent import (
    Mamba2,
    delta_rule,
    mamba,
    mamba2,
    short_convolution,
)
from sim.models.shapes.style import Experts, Style

_QWEN = replace(
    QWEN3, windows=None, usual_head=256, usual_groups=2, output_gate="in queries", usual={}
)
_WORDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of Nemotron-H's pattern."""
_NEMOTRON = {
    "mamba": Block(recurs=True), "linear_attention": Block(recurs=True),
    "attention": Block(attends=True), "full_attention": Block(attends=True),
    "mlp": Block(feeds="dense"), "moe": Block(feeds="sparse"),
}  # fmt: skip


def _qwen_blocks(reading: Reading) -> Sequence[Block]:
    """Return Qwen3-Next's blocks: experts by step, attention in every fourth layer."""
    blocks = by_types(reading, every="full_attention_interval", usual=4)
    sparse = QWEN2_EXPERTS.sparse(reading, len(blocks))
    return [
        replace(block, feeds="sparse" if has_experts else "dense")
        for block, has_experts in zip(blocks, sparse, strict=True)
    ]


def _jamba_blocks(reading: Reading) -> Sequence[Block]:
    count = reading.count("num_hidden_layers")
    period, offset = (
        reading.count("attn_layer_period", usual=8),
        reading.count("attn_layer_offset", usual=4, least=0),
    )
    every, since = (
        reading.count("expert_layer_period", usual=2),
        reading.count("expert_layer_offset", usual=1, least=0),
    )
    number = reading.count("num_experts", usual=16)
    return [
        Block(
            index % period == offset, index % period != offset,
            "sparse" if index % every == since and number > 1 else "dense",
        )
        for index in range(count)
    ]  # fmt: skip


def _bamba_blocks(reading: Reading) -> Sequence[Block]:
    count = reading.count("num_hidden_layers")
    own = reading.indices("attn_layer_indices") or ()
    return [Block(index in own, index not in own, "dense") for index in range(count)]


def _granite_blocks(reading: Reading) -> Sequence[Block]:
    number = reading.count("num_local_experts", "num_experts", usual=8, least=0)
    return by_types(reading, feeds="sparse" if number else "dense")


def _nemotron_blocks(reading: Reading) -> Sequence[Block]:
    """Return Nemotron-H's blocks, each of one part, by its pattern or its list of words."""
    pattern = reading.config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= set(_WORDS):
        words = [_WORDS[letter] for letter in pattern]
        count = reading.maybe("num_hidden_layers") or len(words)
        reading.rule(
            count == len(words),
            f"hybrid_override_pattern must have a letter for each of the {count} layers, got "
            f"{len(words)}",
            "num_hidden_layers",
        )
        return [_NEMOTRON[word] for word in words]
    reading.rule(
        pattern is None,
        f"hybrid_override_pattern must be made of {', '.join(_WORDS)}, got {pattern!r:.60}",
    )
    found = None
    for name in ("layers_block_type", "layer_types"):
        found = found or reading.kinds(name, tuple(_NEMOTRON), None)
    reading.rule(
        found is not None or pattern is not None,
        "lacks hybrid_override_pattern or layers_block_type, which decides shapes: take the "
        "config.json that belongs to the weights",
    )
    return [_NEMOTRON[word] for word in found or ["attention"]]


def _lfm2_blocks(reading: Reading) -> Sequence[Block]:
    if reading.config.get("layer_types") is not None:
        return by_types(reading)
    count = reading.count("num_hidden_layers")
    own = reading.indices("full_attn_idxs")
    attends = [own is None or index in own for index in range(count)]
    return [Block(each, not each, "dense") for each in attends]


def _alone(reading: Reading) -> Sequence[Block]:
    return [Block(recurs=True)] * reading.count("num_hidden_layers")


def _both(reading: Reading) -> Sequence[Block]:
    return [Block(True, True, "dense")] * reading.count("num_hidden_layers")


_MAMBA = Hybrid(style=Style(norms=("norm",), is_tied=True), recurrence=mamba, blocks=_alone)
_BAMBA_STYLE = replace(LLAMA, usual_groups=8, usual={})

HYBRIDS: Mapping[str, Hybrid] = {
    "qwen3_next": Hybrid(
        style=replace(_QWEN, experts=QWEN2_EXPERTS),
        recurrence=partial(delta_rule, is_split=False), blocks=_qwen_blocks,
    ),
    "qwen3_5_text": Hybrid(
        style=replace(_QWEN, usual_groups=4), recurrence=partial(delta_rule, is_split=True),
        blocks=partial(by_types, every="full_attention_interval", usual=4),
    ),
    "qwen3_5_moe_text": Hybrid(
        style=replace(_QWEN, experts=QWEN2_EXPERTS),
        recurrence=partial(delta_rule, is_split=True),
        blocks=partial(by_types, every="full_attention_interval", usual=4, feeds="sparse"),
    ),
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": Hybrid(
        style=Style(norms=("norm",)),
        recurrence=partial(
            mamba2,
            names=Mamba2(
                heads="num_heads", head="head_dim", groups="n_groups", state="state_size",
                kernel="conv_kernel", chunk="chunk_size", bias="use_bias",
                conv_bias="use_conv_bias",
            ),
        ),
        blocks=_alone,
    ),
    "jamba": Hybrid(
        style=Style(usual_groups=8, experts=Experts(inner=("intermediate_size",))),
        recurrence=partial(mamba, prefix="mamba_", has_norms=True), blocks=_jamba_blocks,
    ),
    "bamba": Hybrid(
        style=_BAMBA_STYLE, recurrence=partial(mamba2, names=Mamba2()), blocks=_bamba_blocks
    ),
    "falcon_h1": Hybrid(
        style=_BAMBA_STYLE,
        recurrence=partial(
            mamba2,
            names=Mamba2(inner="mamba_d_ssm", has_norm=("mamba_rms_norm", False)),
        ),
        blocks=_both,
    ),
    "granitemoehybrid": Hybrid(
        style=replace(
            LLAMA, usual={}, fused_gate=True,
            experts=Experts(
                number=("num_local_experts", "num_experts"), inner=("intermediate_size",),
                dense=("shared_intermediate_size",), shared="shared_intermediate_size", fused=True,
            ),
        ),
        recurrence=partial(mamba2, names=Mamba2()), blocks=_granite_blocks,
    ),
    "nemotron_h": Hybrid(
        style=Style(
            norms=("norm",), qkv_bias=LLAMA.qkv_bias, out_bias=LLAMA.out_bias,
            mlp_bias=("mlp_bias", False), is_gated=False, usual_head=128, usual_groups=8,
            experts=Experts(
                number=("n_routed_experts",), shared="moe_shared_expert_intermediate_size"
            ),
        ),
        recurrence=partial(
            mamba2,
            names=Mamba2(
                heads="mamba_num_heads", head="mamba_head_dim", groups="n_groups",
                state="ssm_state_size", kernel="conv_kernel", chunk="chunk_size", bias="use_bias",
                conv_bias="use_conv_bias",
            ),
        ),
        blocks=_nemotron_blocks,
    ),
    "lfm2": Hybrid(
        style=Style(head_norm="head", usual_groups=8, is_tied=True),
        recurrence=short_convolution, blocks=_lfm2_blocks,
    ),
}  # fmt: skip
"""Hybrid of each family, by `model_type`."""


def lfm2(reading: Reading) -> list[Layer]:
    """Return LFM2, whose file has the feed-forward's width before it is rounded."""
    inner = reading.count("block_ff_dim", "intermediate_size")
    if reading.switch(("block_auto_adjust_ff_dim", True)):
        factor, unit = (
            reading.config.get("block_ffn_dim_multiplier", 1.0),
            reading.count("block_multiple_of", usual=256),
        )
        is_number = isinstance(factor, int | float) and 0 < factor < 1024
        reading.rule(
            is_number,
            f"block_ffn_dim_multiplier must be a number above 0, got {factor!r:.60}",
        )
        inner = math.ceil(int((factor if is_number else 1.0) * int(2 * inner / 3)) / unit) * unit
    tied = {name: reading.config[name] for name in ("tie_embedding",) if name in reading.config}
    reading.config = {
        **reading.config, "intermediate_size": inner,
        **({"tie_word_embeddings": tied["tie_embedding"]} if tied else {}),
    }  # fmt: skip
    return hybrid(reading, HYBRIDS["lfm2"])
