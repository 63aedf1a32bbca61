"""Gemma 3n and 4: tables for each layer, keys that layers share, and more streams than one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.models.shapes.feed_forward import feed_forward
from sim.models.shapes.parts import Layer, Mixer, Parameter, matrices, matrix, norm, vector
from sim.models.shapes.plain import stacked
from sim.models.shapes.reading import Reading
from sim.models.shapes.style import Experts, Style

_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)  # fmt: skip
STYLE = Style(
    norms=_NORMS, is_tied=True,
    experts=Experts(number=("num_experts",), chosen=("top_k_experts",)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Kind:
    """Facts by which layers differ."""

    slides: bool
    shares: bool
    """Whether keys and values are those of an earlier layer."""
    inner: int


def gemma3n(reading: Reading) -> list[Layer]:
    """Return Gemma 3n, with AltUp's streams (arXiv 2301.13310) and LAuReL's branches."""
    width, count = reading.count("hidden_size"), reading.count("num_hidden_layers")
    streams, rank = (
        reading.count("altup_num_inputs", usual=4),
        reading.count("laurel_rank", usual=64),
    )
    beside = [
        vector("altup.correct_output_scale", width), *matrix("altup.coefs", streams, streams),
        *matrix("altup.prediction_coefs", streams**2, streams),
        *matrix("altup.modality_router", streams, width), *norm("altup.norm", width, bias=False),
        *matrix("laurel.left", rank, width), *matrix("laurel.right", width, rank),
        *norm("laurel.norm", width, bias=False),
    ]  # fmt: skip
    kinds = _kinds(reading, count, _widths(reading, count), every=5)
    more = [*matrices([f"projections.{i}" for i in range(1, streams)], width, width)]
    first, own = _per_layer(reading, width, count, usual=256)
    layers = _stack(reading, kinds, width, [*beside, *own], [*first, *more])
    last = layers[-1]
    unembed = tuple(replace(each, name=f"unembed.{each.name}") for each in more)
    return [*layers[:-1], replace(last, parameters=unembed + last.parameters)]


def gemma4(reading: Reading) -> list[Layer]:
    """Return Gemma 4, whose layers that attend to all have wider heads."""
    width, count = reading.count("hidden_size"), reading.count("num_hidden_layers")
    inner = [reading.count("intermediate_size")] * count
    kinds = _kinds(reading, count, inner, every=6)
    if reading.switch("use_double_wide_mlp"):
        kinds = [replace(kind, inner=kind.inner * (1 + kind.shares)) for kind in kinds]
    first, own = _per_layer(reading, width, count, usual=256)
    return _stack(reading, kinds, width, own, first, is_fourth=True)


def _kinds(reading: Reading, count: int, inner: Sequence[int], *, every: int) -> list[_Kind]:
    """Return the facts by which layers differ; the last ones share keys and values."""
    known = ("sliding_attention", "full_attention")
    words = reading.kinds("layer_types", known, count) or [
        known[(index + 1) % every == 0] for index in range(count)
    ]
    usual = 15 if every == 5 else 0  # as in transformers' classes
    shared = reading.count("num_kv_shared_layers", usual=usual, least=0)
    if every == 6:
        words[-1] = "full_attention"
    return [
        _Kind(word == known[0], index >= count - shared, width)
        for index, (word, width) in enumerate(zip(words, inner, strict=True))
    ]


def _widths(reading: Reading, count: int) -> Sequence[int]:
    """Return the feed-forward's width of each layer: one number, or a list of them."""
    given = reading.config.get("intermediate_size")
    if not isinstance(given, list):
        return [reading.count("intermediate_size")] * count
    reading.rule(
        len(given) == count and all(type(each) is int and 0 < each < 1 << 24 for each in given),
        f"intermediate_size must be a whole number or a list of {count}, got {given!r:.60}",
        "num_hidden_layers",
    )
    sound = [each if type(each) is int and each > 0 else 1 for each in given]
    return (sound + [1] * count)[:count]


def _per_layer(
    reading: Reading, width: int, count: int, *, usual: int
) -> tuple[list[Parameter], list[Parameter]]:
    """Return the tables that each layer has a part of, and what a layer does with its part."""
    small = reading.count("hidden_size_per_layer_input", usual=usual, least=0)
    words = reading.count("vocab_size_per_layer_input", usual=1 << 18)
    if not small:
        return [], []
    first = [
        *matrix("embed_tokens_per_layer", words, count * small),
        *matrix("per_layer_model_projection", count * small, width),
        *norm("per_layer_norm", small, bias=False),
    ]
    own = [
        *matrix("per_layer_input_gate", small, width), *matrix("per_layer_output", width, small),
        *norm("post_per_layer_input_norm", width, bias=False),
    ]  # fmt: skip
    return first, own


def _stack(
    reading: Reading, kinds: Sequence[_Kind], width: int, beside: list[Parameter],
    first: list[Parameter], *, is_fourth: bool = False,
) -> list[Layer]:  # fmt: skip
    """Return the layers of all kinds, with what each has beside attention and feed-forward."""
    made = {kind: _layer(reading, kind, width, beside, is_fourth) for kind in dict.fromkeys(kinds)}
    vocabulary = reading.count("vocab_size")
    last = norm("norm", width, bias=False)
    if not reading.switch(("tie_word_embeddings", True)):
        last += matrix("lm_head", vocabulary, width)
    table = matrix("embed_tokens", vocabulary, width)
    return stacked([*table, *first], "layers", [made[kind] for kind in kinds], last)


def _layer(
    reading: Reading, kind: _Kind, width: int, beside: list[Parameter], is_fourth: bool
) -> Layer:
    heads = reading.count("num_attention_heads")
    groups = reading.maybe("num_key_value_heads", absent=4 if is_fourth else 2) or heads
    head, equal = reading.count("head_dim", usual=256), False
    if is_fourth:
        wide = reading.count("global_head_dim", usual=512)
        own = reading.maybe("num_global_key_value_heads")
        equal = reading.switch("attention_k_eq_v") and not kind.slides
        head = head if kind.slides else wide
        groups = own if equal and own else groups
    reading.divides(groups, "num_key_value_heads", heads, "num_attention_heads")
    bias = reading.switch("attention_bias")
    queries, keys = heads * head, groups * head
    found = [
        *(each for name in _NORMS for each in norm(name, width, bias=False)),
        *matrix("q_proj", queries, width, bias=bias), *norm("q_norm", head, bias=False),
    ]  # fmt: skip
    if not kind.shares:
        names = ("k_proj",) if equal else ("k_proj", "v_proj")
        found += matrices(names, keys, width, bias=bias) + norm("k_norm", head, bias=False)
    found += matrix("o_proj", width, queries, bias=bias)
    found += [
        *matrices(("mlp.gate_proj", "mlp.up_proj"), kind.inner, width),
        *matrix("mlp.down_proj", width, kind.inner), *beside,
    ]  # fmt: skip
    inner, routed = float(kind.inner), 0
    if is_fourth and reading.switch("enable_moe_block"):
        feed = feed_forward(reading, STYLE, width, is_sparse=True)
        found += [*feed.parameters, *(vector(f"moe_norm.{i}", width) for i in range(3))]
        found += [vector("router.scale", width)]
        found += [vector("router.per_expert_scale", reading.count("num_experts"))]
        inner, routed = inner + feed.inner_width, feed.routed
    size = reading.count("sliding_window", usual=512)
    mixer = Mixer(
        heads=heads, queries=queries, keys=keys, values=keys, outputs=queries,
        window=size if kind.slides else None,
    )  # fmt: skip
    return Layer(
        name="", parameters=tuple(found), mixer=mixer, inner_width=inner, is_gated=True,
        routed=routed, normed_width=5.0 * width + queries + keys,
    )  # fmt: skip
