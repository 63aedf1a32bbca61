"""Codecs that the study compares: from numbers to bytes and back.

Numbers are float32 matrices (R, O) whose rows are columns of the model's matrices, as the host has
them. Each codec says what it takes a number, and returns the numbers that it gives back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zenflow.host import e4m3
from zenflow.host.compact import CompactState, Rounding, keys_of
from zenflow.host_state import gradient_width, num_groups

BLOCK = 256
"""Numbers that share a scale in blockwise integers (Dettmers et al. 2022, 8-bit optimizers)."""
RELATIVE_ERROR = 0.05
"""Bound on each number's error as a share of the tensor's root mean square: zfp's tolerance. It is
about the error that four bits of E4M3 make."""
_SEED = 1

Coded = tuple[object, int]
"""Coded numbers, and their bytes."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A format: how numbers become bytes, and bytes numbers."""

    name: str
    encode: Callable[[Tensor], Coded]
    decode: Callable[[object, Tensor], Tensor]
    """Takes what `encode` made, and a matrix of the shape that is wanted."""
    kinds: tuple[str, ...] = ("gradient", "first moment", "second moment", "weight")
    """Kinds of tensors that it is for."""
    package: str | None = None
    """Package beside torch that it needs."""


def _bfloat16() -> Codec:
    return Codec(
        "bfloat16",
        lambda values: ((half := values.bfloat16()), half.nbytes),
        lambda coded, _: coded.float(),  # type: ignore[attr-defined]
    )


def _e4m3() -> Codec:
    def encode(values: Tensor) -> Coded:
        width = gradient_width("e4m3", values.shape[1])
        out = torch.empty(len(values), width, dtype=torch.uint8)
        e4m3.encode(values, out)
        return out, out.nbytes

    def decode(coded: object, _: Tensor) -> Tensor:
        assert isinstance(coded, Tensor)
        return e4m3.decode(coded)

    return Codec("E4M3, exponents of 64", encode, decode)


def _compact(kind: str) -> Codec:
    """Return the compact state's own format of a kind, rounded at random."""
    place = ("weight", "first moment", "second moment").index(kind)
    bytes_each = (3.0, 1.0, 1.0)[place]
    names = ("24 bits at random", "E4M3 at random", "E5M3 at random")

    def encode(values: Tensor) -> Coded:
        state = CompactState.zeros(*values.shape)
        none = torch.zeros_like(values)
        weight, exp_avg, exp_avg_sq = (values if place == at else none for at in range(3))
        keys = keys_of(_SEED, torch.ones(len(values), dtype=torch.int64))
        first = torch.arange(len(values)) * values.shape[1]
        rounding = Rounding.drawn(keys, first, values.shape[1])
        state.encode(weight, exp_avg, exp_avg_sq, rounding)
        groups = 0 if place == 0 else len(values) * num_groups(values.shape[1])
        return state, int(bytes_each * values.numel()) + groups

    def decode(coded: object, _: Tensor) -> Tensor:
        assert isinstance(coded, CompactState)
        return coded.numbers()[place]

    return Codec(names[place], encode, decode, kinds=(kind,))


def _blockwise_int8() -> Codec:
    def encode(values: Tensor) -> Coded:
        flat = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK))
        blocks = flat.view(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-38) / 127
        codes = (blocks / scale).round().to(torch.int8)
        return (codes, scale), codes.nbytes + scale.nbytes

    def decode(coded: object, like: Tensor) -> Tensor:
        assert isinstance(coded, tuple)
        codes, scale = coded
        values: Tensor = (codes.float() * scale).flatten()[: like.numel()].view_as(like)
        return values

    return Codec(f"int8, scales of {BLOCK}", encode, decode)


def _zfp() -> Codec:
    def encode(values: Tensor) -> Coded:
        import zfpy

        tolerance = RELATIVE_ERROR * float(values.double().square().mean().sqrt())
        coded = zfpy.compress_numpy(values.numpy(), tolerance=max(tolerance, 1e-45))
        return coded, len(coded)

    def decode(coded: object, _: Tensor) -> Tensor:
        import zfpy

        return torch.from_numpy(zfpy.decompress_numpy(coded))

    return Codec("zfp, bounded error", encode, decode, package="zfpy")


def _lossless(dtype: torch.dtype, name: str) -> Codec:
    """Return zstd behind a shuffle that puts equal bytes of all numbers side by side."""
    size = dtype.itemsize

    def encode(values: Tensor) -> Coded:
        import zstandard

        typed = values.to(dtype).contiguous().view(torch.uint8).numpy()
        shuffled = typed.reshape(-1, size).T.copy()
        coded = zstandard.ZstdCompressor(level=1).compress(shuffled.tobytes())
        return coded, len(coded)

    def decode(coded: object, like: Tensor) -> Tensor:
        import zstandard

        assert isinstance(coded, bytes)
        shuffled = np.frombuffer(zstandard.ZstdDecompressor().decompress(coded), dtype=np.uint8)
        numbers = torch.from_numpy(shuffled.reshape(size, -1).T.copy())
        return numbers.view(dtype).view_as(like).float()

    return Codec(name, encode, decode, package="zstandard")


CODECS = (
    _bfloat16(),
    _e4m3(),
    *(_compact(kind) for kind in ("weight", "first moment", "second moment")),
    _blockwise_int8(),
    _zfp(),
    _lossless(torch.float32, "zstd of float32"),
    _lossless(torch.bfloat16, "zstd of bfloat16"),
)
"""All codecs, those that a step could bear first."""
LOSSLESS = "zstd of float32"
