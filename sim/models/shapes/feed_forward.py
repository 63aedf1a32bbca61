"""Feed-forward of a decoder's layer: gated or plain, or a mixture of experts with its router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.models.shapes.parts import Parameter, matrix, vector
from sim.models.shapes.reading import Reading
from sim.models.shapes.style import Experts, Style


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Tensors of a feed-forward, and its widths as `Layer` has them."""

    parameters: tuple[Parameter, ...]
    inner_width: float
    routed: int = 0
    normed: float = 0.0
    """Width of its own norms."""


def sparse_layers(reading: Reading, style: Style, count: int) -> Sequence[bool]:
    """Return whether each layer has experts."""
    if style.experts is None:
        return [False] * count
    kinds = reading.kinds("mlp_layer_types", ("dense", "sparse"), count)
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    return style.experts.sparse(reading, count)


def feed_forward(reading: Reading, style: Style, width: int, *, is_sparse: bool) -> FeedForward:
    """Return a layer's feed-forward."""
    if is_sparse and style.experts is not None:
        return _mixture(reading, style, style.experts, width)
    names = style.called("intermediate_size") if style.experts is None else style.experts.dense
    inner, bias = reading.count(*names), reading.switch(style.mlp_bias)
    if style.halves_inner:
        reading.rule(inner % 2 == 0, f"{names[0]} must be even, got {inner}", names[0])
        inner = max(1, inner // 2)
    own = _one("mlp", width, inner, style, bias=bias, fused=style.fused_gate)
    if style.inner_norms:
        own.append(vector("mlp.ffn_sub_norm.weight", inner))
    normed = float(inner) if style.inner_norms else 0.0
    return FeedForward(parameters=tuple(own), inner_width=float(inner), normed=normed)


def _one(
    name: str, width: int, inner: int, style: Style, *, bias: bool = False, fused: bool = False,
    active: float = 1.0,
) -> list[Parameter]:  # fmt: skip
    """Return one feed-forward's matrices."""
    if not style.is_gated:
        made = matrix(f"{name}.up_proj", inner, width, bias=bias)
    elif fused:  # both factors in one matrix
        made = matrix(f"{name}.gate_up_proj", 2 * inner, width, bias=bias)
    else:
        made = [
            *matrix(f"{name}.gate_proj", inner, width, bias=bias),
            *matrix(f"{name}.up_proj", inner, width, bias=bias),
        ]
    made += matrix(f"{name}.down_proj", width, inner, bias=bias)
    return made if active == 1.0 else [replace(each, active=active) for each in made]


def _mixture(reading: Reading, style: Style, asked: Experts, width: int) -> FeedForward:
    number = reading.count(*asked.number)
    chosen, inner = reading.count(*asked.chosen), reading.count(*asked.inner)
    reading.rule(
        chosen <= number,
        f"{asked.chosen[0]} must be at most the {number} experts, got {chosen}",
        asked.chosen[0], asked.number[0],
    )  # fmt: skip
    share = min(1.0, chosen / number)
    found = matrix("router", number, width, bias=asked.bias) if asked.router else []
    if asked.expert_bias:
        found.append(vector("router.expert_bias", number))
    for index in range(number):
        found += _one(f"experts.{index}", width, inner, style, bias=asked.bias, active=share)
    shared = _shared_width(reading, asked, inner)
    if shared:
        found += _one(
            "shared_expert", width, shared, style,
            bias=reading.switch(style.mlp_bias), fused=asked.fused,
        )  # fmt: skip
        found += matrix("shared_expert_gate", 1, width) if asked.shared_gate else []
    return FeedForward(
        parameters=tuple(found), inner_width=float(chosen * inner + shared), routed=chosen
    )


def _shared_width(reading: Reading, asked: Experts, inner: int) -> int:
    """Return the width of experts for every token; 0 where there are none."""
    if asked.shared is not None:
        return reading.count(asked.shared, usual=0, least=0)
    if asked.num_shared:
        return inner * (reading.maybe(*asked.num_shared, absent=asked.usual_shared, least=0) or 0)
    return inner if asked.shares_inner else 0
