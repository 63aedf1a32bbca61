"""Hybrids: decoders some of whose layers have a recurrence, or have one part of a layer alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sim.models.shapes.attention import Mixing, attention
from sim.models.shapes.decoder import head_of, layer_of
from sim.models.shapes.feed_forward import feed_forward
from sim.models.shapes.parts import Layer, matrix
from sim.models.shapes.reading import Reading
from sim.models.shapes.style import Style


@dataclass(frozen=True, slots=True)
class Block:
    """Parts of one layer."""

    attends: bool = False
    recurs: bool = False
    feeds: str | None = None
    """Kind of its feed-forward: dense or sparse; None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    """A family of hybrids."""

    style: Style
    recurrence: Callable[[Reading, int], Mixing]
    blocks: Callable[[Reading], Sequence[Block]]
    """Function that tells the parts of each layer."""


def hybrid(reading: Reading, family: Hybrid) -> list[Layer]:
    """Return the layers of a hybrid."""
    style, width = family.style, reading.count("hidden_size")
    vocabulary, blocks = reading.count("vocab_size"), family.blocks(reading)
    made: dict[Block, Layer] = {}
    for block in dict.fromkeys(blocks):
        feed = None
        if block.feeds is not None:
            feed = feed_forward(reading, style, width, is_sparse=block.feeds == "sparse")
        made[block] = layer_of(reading, style, width, _mixing(reading, family, width, block), feed)
    first = Layer(name="embedding", parameters=tuple(matrix("embed_tokens", vocabulary, width)))
    inner = [replace(made[block], name=f"layers.{i}") for i, block in enumerate(blocks)]
    return [first, *inner, head_of(reading, style, width, vocabulary)]


def _mixing(reading: Reading, family: Hybrid, width: int, block: Block) -> Mixing | None:
    """Return attention, a recurrence, both side by side, or None."""
    parts = []
    if block.attends:
        parts.append(attention(reading, family.style, width))
    if block.recurs:
        parts.append(family.recurrence(reading, width))
    if len(parts) < 2:
        return parts[0] if parts else None
    (own, first, normed), (more, second, others) = parts
    # Attention's widths decide its scores; the recurrence's come on top of what is kept.
    mixer = replace(first, between=first.between + second.width, state_flop=second.state_flop)
    return [*own, *more], mixer, normed + others


def by_types(
    reading: Reading, *, every: str | None = None, usual: int | None = None,
    recurs: Sequence[str] = ("linear_attention", "mamba", "conv"), feeds: str = "dense",
) -> list[Block]:  # fmt: skip
    """Return blocks by `layer_types`, or with attention in every so many layers.

    Args:
        reading: File.
        every: Field with the distance of two layers with attention.
        usual: Distance where that is missing; None makes the list required.
        recurs: Words for layers with a recurrence.
        feeds: Kind of all layers' feed-forward.
    """
    count = reading.count("num_hidden_layers")
    words = (*recurs, "full_attention", "attention")
    kinds = reading.kinds("layer_types", words, count)
    if kinds is None and every is not None and usual is not None:
        distance = reading.count(every, usual=usual)
        kinds = [
            "full_attention" if (index + 1) % distance == 0 else recurs[0]
            for index in range(count)
        ]
    elif kinds is None:
        reading.rule(
            reading.config.get("layer_types") is not None,
            "lacks layer_types, which tells attention from recurrence: take the config.json that "
            "belongs to the weights",
        )  # fmt: skip
        kinds = ["full_attention"] * count
    return [Block(kind not in recurs, kind in recurs, feeds) for kind in kinds]
