"""Decoder: the layers of a language model of Llama's kind, by its family's style."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.models.shapes.attention import Mixing, attention
from sim.models.shapes.feed_forward import FeedForward, feed_forward, sparse_layers
from sim.models.shapes.parts import Layer, Parameter, matrix, norm, vector
from sim.models.shapes.reading import Reading
from sim.models.shapes.style import Style, Windows

_WINDOWED = ("sliding_attention", "chunked_attention")
_ATTENTIONS = ("full_attention", *_WINDOWED, "attention")


def decoder(reading: Reading, style: Style) -> list[Layer]:
    """Return the layers of a decoder."""
    width, count = reading.count("hidden_size"), reading.count(*style.called("num_hidden_layers"))
    vocabulary = reading.count(*style.called("vocab_size"))
    mixing = attention(reading, style, width)
    windows = _windows(reading, style.windows, count)
    sparse = sparse_layers(reading, style, count)
    feeds = {
        each: feed_forward(reading, style, width, is_sparse=each) for each in sorted(set(sparse))
    }
    made: dict[tuple[int | None, bool], Layer] = {}
    for kind in dict.fromkeys(zip(windows, sparse, strict=True)):
        made[kind] = layer_of(reading, style, width, mixing, feeds[kind[1]], window=kind[0])
    inner = [
        replace(made[kind], name=f"layers.{index}")
        for index, kind in enumerate(zip(windows, sparse, strict=True))
    ]
    first = Layer(name="embedding", parameters=tuple(matrix("embed_tokens", vocabulary, width)))
    return [first, *inner, head_of(reading, style, width, vocabulary)]


def mimo(reading: Reading, style: Style) -> list[Layer]:
    """Return MiMo: a decoder, and a layer that predicts further tokens.

    Its own code holds that layer, and no step of training computes with it (modeling_mimo.py).
    """
    layers = decoder(reading, style)
    width, more = (
        reading.count("hidden_size"),
        reading.count("num_nextn_predict_layers", usual=0, least=0),
    )
    beside = [
        *norm("token_layernorm", width, bias=False), *norm("hidden_layernorm", width, bias=False),
        *norm("final_layernorm", width, bias=False), *matrix("input_proj", width, 2 * width),
    ]  # fmt: skip
    held = [*layers[1].parameters, *beside] * more
    unused = tuple(replace(each, name=f"mtp.{each.name}", active=0.0) for each in held)
    return [*layers[:-1], replace(layers[-1], parameters=layers[-1].parameters + unused)]


def layer_of(
    reading: Reading, style: Style, width: int, mixing: Mixing | None, feed: FeedForward | None,
    *, window: int | None = None,
) -> Layer:  # fmt: skip
    """Return a layer without a name; one of both parts may be missing."""
    names = style.norms[:1] if reading.switch(style.norm_switch) else style.norms
    found: list[Parameter] = []
    for name in names:
        found += [] if style.norm == "none" else norm(name, width, bias=style.norm == "layer")
    normed, mixer = float(len(names) * width), None
    if mixing is not None:
        found += mixing[0]
        mixer, normed = replace(mixing[1], window=window), normed + mixing[2]
    if feed is not None:
        found += feed.parameters
        normed += feed.normed
    found += [vector(name, 1) for name in style.scalars]
    return Layer(
        name="", parameters=tuple(found), mixer=mixer, is_gated=style.is_gated,
        inner_width=feed.inner_width if feed else 0.0, routed=feed.routed if feed else 0,
        normed_width=normed,
    )  # fmt: skip


def head_of(reading: Reading, style: Style, width: int, vocabulary: int) -> Layer:
    """Return the last norm, and an output layer unless it is the embedding's."""
    last = [] if style.norm == "none" else norm("norm", width, bias=style.norm == "layer")
    has_bias = reading.switch(style.head_bias)
    if not reading.switch(("tie_word_embeddings", style.is_tied)):
        last += matrix("lm_head", vocabulary, width, bias=has_bias)
    elif has_bias:
        last.append(vector("lm_head.bias", vocabulary))
    return Layer(name="head", parameters=tuple(last))


def _windows(reading: Reading, asked: Windows | None, count: int) -> Sequence[int | None]:
    """Return the tokens that each layer attends to; None is all."""
    if asked is None:
        return [None] * count
    size = reading.maybe(asked.field, absent=asked.usual, least=0) or None
    is_on = reading.switch(asked.switch)
    kinds = reading.kinds("layer_types", _ATTENTIONS, count)
    if kinds is not None:
        return [size if kind in _WINDOWED else None for kind in kinds]
    if not is_on or size is None:
        return [None] * count
    since = 0 if asked.since is None else reading.count(asked.since, usual=0, least=0)
    every = asked.every and reading.count(
        "sliding_window_pattern", "_sliding_window_pattern", usual=asked.every
    )
    return [
        None if index < since or (every and (index + 1) % every == 0) else size
        for index in range(count)
    ]
