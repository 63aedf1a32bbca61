"""Style: by what families of decoders differ, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sim.models.shapes.reading import Reading, Switch

Sparse = Callable[[Reading, int], Sequence[bool]]
"""A function from a file and its number of layers to whether each has experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Layers that attend to a window of tokens, where the file has no list of them."""

    usual: int | None = None
    """Tokens of a window where `sliding_window` is missing; null in a file is none."""
    field: str = "sliding_window"
    every: int | None = None
    """Distance between two layers that attend to all, the last of so many being the first; None
    where all layers have windows."""
    switch: Switch = True
    """Whether there are windows at all."""
    since: str | None = None
    """Field with the first layer that has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of feed-forward layers."""

    number: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    chosen: tuple[str, ...] = ("num_experts_per_tok",)
    inner: tuple[str, ...] = ("moe_intermediate_size",)
    """Names of an expert's width."""
    dense: tuple[str, ...] = ("intermediate_size",)
    """Names of the width of layers without experts."""
    sparse: Sparse = lambda reading, count: [True] * count
    """Function that tells which layers have experts."""
    shared: str | None = None
    """Field with the width of an expert for every token; 0 is none."""
    num_shared: tuple[str, ...] = ()
    """Names of the number of experts for every token, each as wide as a routed one."""
    usual_shared: int = 0
    """Number of these where the field is missing; null in a file is none."""
    shares_inner: bool = False
    """Whether there is one more expert as wide as a routed one, for every token."""
    shared_gate: bool = False
    """Whether a gate scales the shared expert's output."""
    router: bool = True
    bias: bool = False
    """Whether router and experts have biases."""
    expert_bias: bool = False
    """Whether the router has a trained correction for each expert."""
    fused: bool = False
    """Whether the shared expert has gate and up in one matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """A family of decoders that differs from Llama's in these facts."""

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Names of a layer's norms of the residual stream's width."""
    norm: Literal["rms", "layer", "none"] = "rms"
    """Kind of norm: weights alone, with a bias, or without either."""
    norm_switch: Switch = False
    """Whether attention and feed-forward run side by side behind the first norm alone."""
    qkv_bias: Switch = False
    out_bias: Switch = False
    mlp_bias: Switch = False
    head_bias: Switch = False
    """Whether the output layer over the vocabulary has a bias."""
    head_norm: Literal["head", "heads", "whole"] | None = None
    """Norms of queries and keys: of one head's width, one for each head, or over all heads."""
    head_norm_switch: Switch = True
    head_norm_bias: bool = False
    is_gated: bool = True
    fused_qkv: bool = False
    fused_gate: bool = False
    output_gate: Literal["in queries"] | None = None
    """Gate of attention's output, whose projection is the other half of the queries'."""
    latent: bool = False
    """Whether queries, keys and values come through low ranks (DeepSeek's MLA)."""
    indexer: bool = False
    """Whether a small network chooses the tokens to attend to (DeepSeek's sparse attention)."""
    sinks: bool = False
    """Whether each head has a score for no token at all."""
    inner_norms: bool = False
    """Whether attention's output and the feed-forward's product have norms (BitNet)."""
    scalars: tuple[str, ...] = ()
    """Names of single numbers that a layer trains."""
    experts: Experts | None = None
    windows: Windows | None = None
    usual_head: int | None = None
    """Width of a head where `head_dim` is missing; None is the model's width over its heads."""
    usual_groups: int | None = None
    """Number of groups where `num_key_value_heads` is missing; None is one for each head."""
    is_tied: bool = False
    """Whether the output layer shares the embedding's table where nothing is said."""
    dropouts: tuple[str, ...] = ("", "attention_dropout")
    """Fields with the dropout of a layer's outputs, and of attention's scores."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of fields that are called otherwise than in transformers' classes."""
    halves_inner: bool = False
    """Whether the file has the width of gate and up together."""
    usual: Mapping[str, int] = field(default_factory=dict)
    """Sizes that a nested part of a file may leave out, by transformers' classes."""

    def called(self, name: str) -> tuple[str, ...]:
        """Return the names that a field may have."""
        return self.names.get(name, (name,))
