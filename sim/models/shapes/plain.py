"""Plain decoders and BERT: GPT's kind, with layer norms and a feed-forward without a gate."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.models.shapes.parts import Layer, Mixer, Parameter, matrices, matrix, norm
from sim.models.shapes.reading import Reading, Switch

_LAYERS, _HEADS = ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A family of GPT's kind, by the names of its fields and its tensors."""

    width: tuple[str, ...] = ("hidden_size", "n_embd")
    layers: tuple[str, ...] = _LAYERS
    heads: tuple[str, ...] = _HEADS
    inner: tuple[str, ...] = ("intermediate_size", "n_inner")
    """Names of the width inside the feed-forward."""
    inner_default: int | None = 4
    """Multiple of the model's width that stands where none of them is given; None makes one
    required."""
    positions: str | None = None
    """Field with the number of learned positions; None where positions are not learned."""
    offset: int = 0
    """Rows of the table of positions that come before the first one."""
    qkv_bias: Switch = True
    out_bias: Switch = True
    mlp_bias: Switch = True
    head_bias: bool = False
    """Whether the output layer over the vocabulary has a bias."""
    is_fused: bool = True
    """Whether queries, keys and values have one matrix."""
    is_transposed: bool = False
    """Whether matrices are (I, O), as in GPT-2's own linear layer."""
    multi_query: Switch = False
    """Whether all heads share one key and one value."""
    num_norms: int = 2
    """Number of a layer's norms: one where attention and feed-forward run side by side."""
    norm_bias: bool = True
    embedding_norm: bool = False
    local: str | None = None
    """Field with the window of every second layer."""
    is_tied: bool = True
    """Whether the output layer shares the embedding's table where nothing is said."""
    dropouts: tuple[str, str, float] = ("resid_pdrop", "attn_pdrop", 0.0)
    """Fields with the dropout of a layer's outputs, and of attention's scores, and the default of
    both."""


def plain(reading: Reading, style: Plain) -> list[Layer]:
    """Return the layers of a family of GPT's kind."""
    width, count = reading.count(*style.width), reading.count(*style.layers)
    heads, vocabulary = reading.count(*style.heads), reading.count("vocab_size")
    head = head_width(reading, style.width, style.heads, width, heads)
    keys = head if reading.switch(style.multi_query) else width
    inner = reading.count(*style.inner, usual=style.inner_default and style.inner_default * width)
    first = matrix("wte", vocabulary, width)
    if style.positions is not None:
        first += matrix("wpe", reading.count(style.positions) + style.offset, width)
    first += norm("embedding_norm", width) if style.embedding_norm else []
    own = _layer(reading, style, width, keys, inner)
    mixer = Mixer(heads=heads, queries=width, keys=keys, values=keys, outputs=width)
    size = None if style.local is None else reading.count(style.local, usual=256)
    last = norm("ln_f", width, bias=style.norm_bias)
    if not reading.switch(("tie_word_embeddings", style.is_tied)):
        last += matrix("lm_head", vocabulary, width)
    last += matrix("lm_head", vocabulary, width, bias=True)[1:] if style.head_bias else []
    made = [
        Layer(
            name="", parameters=tuple(own), mixer=replace(mixer, window=window),
            inner_width=float(inner), normed_width=float(style.num_norms * width),
        )
        for window in (None, size)
    ]  # fmt: skip
    return stacked(first, "h", [made[index % 2 if size else 0] for index in range(count)], last)


def _layer(reading: Reading, style: Plain, width: int, keys: int, inner: int) -> list[Parameter]:
    """Return the tensors of a layer."""
    qkv_bias, mlp_bias = reading.switch(style.qkv_bias), reading.switch(style.mlp_bias)
    found = norm("ln_1", width, bias=style.norm_bias)
    if style.is_fused:
        found += matrix("c_attn", width + 2 * keys, width, bias=qkv_bias)
    else:
        found += matrix("q_proj", width, width, bias=qkv_bias)
        found += matrices(("k_proj", "v_proj"), keys, width, bias=qkv_bias)
    found += matrix("c_proj", width, width, bias=reading.switch(style.out_bias))
    found += norm("ln_2", width, bias=style.norm_bias) if style.num_norms > 1 else []
    found += matrix("c_fc", inner, width, bias=mlp_bias)
    found += matrix("mlp.c_proj", width, inner, bias=mlp_bias)
    if not style.is_transposed:
        return found
    return [replace(each, shape=each.shape[::-1]) for each in found]


def head_width(
    reading: Reading, width_names: tuple[str, ...], head_names: tuple[str, ...],
    width: int, heads: int,
) -> int:  # fmt: skip
    """Return the width of a head, of which the model's is a multiple."""
    width_name, head_name = (
        next((name for name in names if name in reading.config), names[0])
        for names in (width_names, head_names)
    )
    reading.divides(heads, head_name, width, width_name)
    return max(1, width // heads)


def stacked(
    first: list[Parameter], name: str, inner: list[Layer], last: list[Parameter]
) -> list[Layer]:
    """Return an embedding, inner layers with names by their order, and a head."""
    return [
        Layer(name="embedding", parameters=tuple(first)),
        *(replace(layer, name=f"{name}.{index}") for index, layer in enumerate(inner)),
        Layer(name="head", parameters=tuple(last)),
    ]


def falcon(reading: Reading) -> list[Layer]:
    """Return Falcon: one key for all heads, as many as heads, or groups of them."""
    width, count = reading.count("hidden_size"), reading.count(*_LAYERS)
    heads, vocabulary = reading.count(*_HEADS), reading.count("vocab_size")
    head = head_width(reading, ("hidden_size",), _HEADS, width, heads)
    given = reading.maybe("num_kv_heads", "n_head_kv") or heads
    is_new = reading.switch("new_decoder_architecture")
    groups, norms = (given, 2) if is_new else (heads, 1)
    if is_new:
        reading.divides(given, "num_kv_heads", heads, "num_attention_heads")
        norms = reading.maybe("num_ln_in_parallel_attn") or 2
        reading.rule(norms < 3, f"num_ln_in_parallel_attn must be 1 or 2, got {norms}")
    else:
        groups = 1 if reading.switch(("multi_query", True)) else heads
        norms = 1 if reading.switch(("parallel_attn", True)) else 2
    inner = reading.count("ffn_hidden_size", usual=4 * width)
    bias, keys = reading.switch("bias"), groups * head
    own = [
        *norm("ln_attn", width),
        *matrix("qkv_proj", width + 2 * keys, width, bias=bias),
        *matrix("out_proj", width, width, bias=bias),
        *(norm("ln_mlp", width) if norms > 1 else []),
        *matrix("dense_h_to_4h", inner, width, bias=bias),
        *matrix("dense_4h_to_h", width, inner, bias=bias),
    ]
    last = norm("ln_f", width)
    if not reading.switch(("tie_word_embeddings", True)):
        last += matrix("lm_head", vocabulary, width)
    layer = Layer(
        name="", parameters=tuple(own), inner_width=float(inner),
        normed_width=float(norms * width),
        mixer=Mixer(heads=heads, queries=width, keys=keys, values=keys, outputs=width),
    )  # fmt: skip
    return stacked(matrix("word_embeddings", vocabulary, width), "h", [layer] * count, last)


def opt(reading: Reading) -> list[Layer]:
    """Return OPT, whose embedding may be narrower than its layers."""
    width, vocabulary = reading.count("hidden_size"), reading.count("vocab_size")
    inner, count = reading.count("ffn_dim"), reading.count("num_hidden_layers")
    outer = reading.maybe("word_embed_proj_dim") or width
    bias = reading.switch(("enable_bias", True))
    is_affine = reading.switch(("layer_norm_elementwise_affine", True))
    has_last = reading.switch(("do_layer_norm_before", True))
    has_last = has_last and not reading.switch("_remove_final_layer_norm")
    first = [
        *matrix("embed_tokens", vocabulary, outer),
        # Positions are counted from 2, a habit of fairseq's padding.
        *matrix("embed_positions", reading.count("max_position_embeddings") + 2, width),
    ]
    last = norm("final_layer_norm", width) if has_last and is_affine else []
    if outer != width:
        first += matrix("project_in", width, outer)
        last += matrix("project_out", outer, width)
    if not reading.switch(("tie_word_embeddings", True)):
        last += matrix("lm_head", vocabulary, outer)
    own = [
        *(norm("self_attn_layer_norm", width) if is_affine else []),
        *matrices(("q_proj", "k_proj", "v_proj", "out_proj"), width, width, bias=bias),
        *(norm("final_layer_norm", width) if is_affine else []),
        *matrix("fc1", inner, width, bias=bias),
        *matrix("fc2", width, inner, bias=bias),
    ]
    return stacked(first, "layers", [_whole(reading, own, width, inner)] * count, last)


def bert(reading: Reading) -> list[Layer]:
    """Return BERT as a masked language model, without a pooler."""
    width, vocabulary = reading.count("hidden_size"), reading.count("vocab_size")
    inner, count = reading.count("intermediate_size"), reading.count("num_hidden_layers")
    first = [
        *matrix("word_embeddings", vocabulary, width),
        *matrix("position_embeddings", reading.count("max_position_embeddings"), width),
        *matrix("token_type_embeddings", reading.count("type_vocab_size", usual=2), width),
        *norm("LayerNorm", width),
    ]
    own = [
        *matrices(("query", "key", "value", "attention.output"), width, width, bias=True),
        *norm("attention.output.LayerNorm", width),
        *matrix("intermediate", inner, width, bias=True),
        *matrix("output", width, inner, bias=True),
        *norm("output.LayerNorm", width),
    ]
    last = [
        *matrix("transform", width, width, bias=True),
        *norm("transform.LayerNorm", width),
        *matrix("decoder", vocabulary, width, bias=True)[1:],
    ]
    if not reading.switch(("tie_word_embeddings", True)):
        last += matrix("decoder", vocabulary, width)
    return stacked(first, "layer", [_whole(reading, own, width, inner)] * count, last)


def _whole(reading: Reading, own: list[Parameter], width: int, inner: int) -> Layer:
    """Return a layer whose heads have keys and values of their own."""
    heads = reading.count("num_attention_heads")
    head_width(reading, ("hidden_size",), ("num_attention_heads",), width, heads)
    return Layer(
        name="", parameters=tuple(own), inner_width=float(inner), normed_width=2.0 * width,
        mixer=Mixer(heads=heads, queries=width, keys=width, values=width, outputs=width),
    )  # fmt: skip
