"""Recurrences in attention's place: Mamba's two, the gated delta rule, and short convolutions.

FLOP of a recurrence are estimated: what chunked kernels do for each token beside the projections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sim.models.shapes.attention import Mixing
from sim.models.shapes.parts import Mixer, Parameter, matrix, vector
from sim.models.shapes.reading import Reading

_CHUNK = 64
"""Tokens that kernels of the delta rule take at a time (flash-linear-attention)."""
_SCAN = 6.0
"""FLOP of Mamba's scan for each element of a state: decay, input, sum and output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Names of the fields of a family with Mamba-2's recurrence, and their defaults."""

    heads: str = "mamba_n_heads"
    head: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    kernel: str = "mamba_d_conv"
    inner: str | None = None
    """Field with the inner width; null or None is heads times their width."""
    chunk: str = "mamba_chunk_size"
    bias: str = "mamba_proj_bias"
    conv_bias: str = "mamba_conv_bias"
    has_norm: tuple[str, bool] | bool = True


def delta_rule(reading: Reading, width: int, *, is_split: bool) -> Mixing:
    """Return the gated delta rule of Qwen3-Next (arXiv 2412.06464).

    Args:
        reading: File.
        width: Width of the model.
        is_split: Whether each projection has a matrix of its own, as in Qwen3.5.
    """
    key_heads = reading.count("linear_num_key_heads", usual=16)
    heads = reading.count("linear_num_value_heads", usual=32)
    key = reading.count("linear_key_head_dim", usual=128)
    value = reading.count("linear_value_head_dim", usual=128)
    kernel = reading.count("linear_conv_kernel_dim", usual=4)
    reading.divides(key_heads, "linear_num_key_heads", heads, "linear_num_value_heads")
    keys, values = key_heads * key, heads * value
    channels = 2 * keys + values
    found = [
        vector("dt_bias", heads), vector("A_log", heads), _convolution(channels, kernel),
    ]  # fmt: skip
    if is_split:
        found += matrix("in_proj_qkv", channels, width) + matrix("in_proj_z", values, width)
        found += matrix("in_proj_b", heads, width) + matrix("in_proj_a", heads, width)
    else:
        found += matrix("in_proj_qkvz", channels + values, width)
        found += matrix("in_proj_ba", 2 * heads, width)
    found += [vector("linear_attn.norm.weight", value), *matrix("out_proj", width, values)]
    pairs = 2.0 * _CHUNK * (3.0 * key + 2.0 * value)  # inside a chunk, triangles whole
    mixer = Mixer(
        heads=0, queries=keys, keys=keys, values=values, outputs=values, between=values,
        state_flop=heads * (pairs + 6.0 * key * value),
    )  # fmt: skip
    return found, mixer, float(values)


def mamba(reading: Reading, width: int, *, prefix: str = "", has_norms: bool = False) -> Mixing:
    """Return Mamba's selective scan (arXiv 2312.00752).

    Args:
        reading: File.
        width: Width of the model.
        prefix: Beginning of the fields' names, as in Jamba.
        has_norms: Whether steps, inputs and outputs have norms.
    """
    names = ("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank") if prefix else (
        "state_size", "conv_kernel", "expand", "time_step_rank"
    )  # fmt: skip
    state, kernel = reading.count(names[0], usual=16), reading.count(names[1], usual=4)
    given = None if prefix else reading.maybe("intermediate_size")
    inner = given or reading.count(names[2], usual=2) * width
    usual = math.ceil(width / 16)
    is_auto = reading.config.get(names[3]) == "auto"
    rank = usual if is_auto else reading.count(names[3], usual=usual)
    bias, conv_bias = ("mamba_proj_bias", "mamba_conv_bias") if prefix else (
        "use_bias", "use_conv_bias"
    )  # fmt: skip
    has_bias = reading.switch(bias)
    found = [
        Parameter(name="A_log", shape=(inner, state)), vector("D", inner),
        _convolution(inner, kernel),
        *([vector("conv1d.bias", inner)] if reading.switch((conv_bias, True)) else []),
        *matrix("in_proj", 2 * inner, width, bias=has_bias),
        *matrix("x_proj", rank + 2 * state, inner), *matrix("dt_proj", inner, rank, bias=True),
        *matrix("mamba.out_proj", width, inner, bias=has_bias),
    ]  # fmt: skip
    if has_norms:
        found += [vector("dt_layernorm.weight", rank)]
        found += [vector(f"{name}_layernorm.weight", state) for name in ("b", "c")]
    mixer = Mixer(
        heads=0, queries=inner, keys=inner, values=inner, outputs=inner,
        between=rank + 2 * state, state_flop=_SCAN * inner * state,
    )  # fmt: skip
    return found, mixer, float(has_norms * (rank + 2 * state))


def mamba2(reading: Reading, width: int, names: Mamba2) -> Mixing:
    """Return Mamba-2's recurrence, a scalar decay for each head (arXiv 2405.21060).

    Its FLOP are those of the chunked form (section 6): pairs of tokens inside a chunk, and the
    states that chunks leave and take.
    """
    heads = reading.count(names.heads)
    given = None if names.inner is None else reading.maybe(names.inner)
    is_auto = reading.config.get(names.head, "auto") in ("auto", None)
    inner = given or (2 * width if is_auto else heads * reading.count(names.head))
    reading.divides(heads, names.heads, inner, "the recurrence's inner width")
    groups, state = reading.count(names.groups, usual=1), reading.count(names.state)
    kernel, bias = reading.count(names.kernel, usual=4), reading.switch(names.bias)
    channels = inner + 2 * groups * state
    found = [
        vector("dt_bias", heads), vector("A_log", heads), vector("D", heads),
        _convolution(channels, kernel),
        *([vector("conv1d.bias", channels)] if reading.switch((names.conv_bias, True)) else []),
        *matrix("in_proj", inner + channels + heads, width, bias=bias),
    ]  # fmt: skip
    has_norm = reading.switch(names.has_norm)
    found += [vector("mamba.norm.weight", inner)] if has_norm else []
    found += matrix("mamba.out_proj", width, inner, bias=bias)
    chunk = reading.count(names.chunk, usual=256)
    mixer = Mixer(
        heads=0, queries=groups * state, keys=groups * state, values=inner, outputs=inner,
        between=inner, state_flop=2.0 * chunk * (groups * state + inner) + 4.0 * state * inner,
    )  # fmt: skip
    return found, mixer, float(has_norm * inner)


def short_convolution(reading: Reading, width: int) -> Mixing:
    """Return LFM2's gated convolution over a few tokens."""
    kernel, bias = reading.count("conv_L_cache", usual=3), reading.switch("conv_bias")
    found = [
        _convolution(width, kernel), *([vector("conv.bias", width)] if bias else []),
        *matrix("conv.in_proj", 3 * width, width, bias=bias),
        *matrix("conv.out_proj", width, width, bias=bias),
    ]  # fmt: skip
    mixer = Mixer(
        heads=0, queries=width, keys=width, values=width, outputs=width, state_flop=4.0 * width
    )
    return found, mixer, 0.0


def _convolution(channels: int, kernel: int) -> Parameter:
    """Return a convolution of each channel over the last tokens."""
    return Parameter(name="conv1d.weight", shape=(channels, kernel))
