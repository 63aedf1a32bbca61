"""Decoders some of whose layers attend to pictures: Llama 3.2 Vision's text part."""

from __future__ import annotations

from dataclasses import replace

from sim.models.shapes.attention import attention
from sim.models.shapes.decoder import head_of, layer_of
from sim.models.shapes.feed_forward import feed_forward
from sim.models.shapes.parts import Layer, matrix
from sim.models.shapes.reading import Reading
from sim.models.shapes.style import Style

MLLAMA = Style(usual_groups=8)
_CROSSED = replace(MLLAMA, head_norm="head", scalars=("attn_gate", "mlp_gate"))
_OWN_WORDS = 8
"""Rows of the embedding's table beyond the vocabulary, for pictures' own tokens."""


def mllama(reading: Reading) -> list[Layer]:
    """Return a decoder whose layers of `cross_attention_layers` attend to pictures.

    Texts alone pass these layers by. They are counted as the others are, attention included.
    """
    width, count = reading.count("hidden_size"), reading.count("num_hidden_layers")
    vocabulary = reading.count("vocab_size")
    crossed = reading.indices("cross_attention_layers") or ()
    made = [
        layer_of(
            reading, style, width, attention(reading, style, width),
            feed_forward(reading, style, width, is_sparse=False),
        )
        for style in (MLLAMA, _CROSSED)
    ]  # fmt: skip
    first = Layer(
        name="embedding", parameters=tuple(matrix("embed_tokens", vocabulary + _OWN_WORDS, width))
    )
    inner = [replace(made[i in crossed], name=f"layers.{i}") for i in range(count)]
    return [first, *inner, head_of(reading, MLLAMA, width, vocabulary)]
