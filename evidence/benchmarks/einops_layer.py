"""A decoder's layer whose products and layouts go through einops and einx.

Written as the layers of Stanford's course CS336 are (cs336-basics, model.py), whose published
times the simulator is compared with: RMS norms and softmax of single operations, rotary positions
that are looked up in every layer, a mask that is made in every layer.
"""

from __future__ import annotations

import einops
import einx
import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """A product without bias."""

    def __init__(self, into: int, out: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(out, into))

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        product: Tensor = einops.einsum(x, self.weight, "... i, o i -> ... o")
        return product


class Norm(nn.Module):
    """An RMS norm in float32."""

    def __init__(self, width: int) -> None:
        """Begin with weights of 1."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed input."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * wide).to(x.dtype)


class Rotary(nn.Module):
    """Rotary positions of pairs of neighbours."""

    def __init__(self, length: int, width: int) -> None:
        """Make the table of cosines and sines, (2, length, width / 2)."""
        super().__init__()
        angles = torch.outer(torch.arange(length), 1e4 ** -(torch.arange(0, width, 2) / width))
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the rotated input."""
        even, odd = einops.rearrange(x, "... (half two) -> two ... half", two=2)
        cos, sin = einx.get_at("t [pos] half, ... -> t ... half", self.table, positions)
        turned = cos * even - sin * odd, sin * even + cos * odd
        both: Tensor = einx.rearrange("... half, ... half -> ... (half (1 + 1))", *turned)
        return both.contiguous()


class EinopsLayer(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int, inner: int, length: int) -> None:
        """Make the norms, the attention and the feed-forward."""
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(Norm(width) for _ in range(2))
        self.projections = nn.ModuleList(Linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = (
            Linear(width, inner), Linear(width, inner), Linear(inner, width)
        )  # fmt: skip
        self.rotary = Rotary(length, width // heads)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, (batch, sequence, width)."""
        x = x + self._attention(self.norms[0](x))
        normed = self.norms[1](x)
        gate = self.gate(normed)
        output: Tensor = x + self.down(gate * torch.sigmoid(gate) * self.up(normed))
        return output

    def _attention(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        query, key, value = (
            einops.rearrange(own(x), "b s (h d) -> b h s d", h=self.heads)
            for own in self.projections[:3]
        )
        ones = [1] * (x.ndim - 2)
        positions = einx.rearrange("s -> b... s", torch.arange(length), b=ones)
        positions = einops.rearrange(positions, "... s -> ... 1 s")
        query, key = self.rotary(query, positions), self.rotary(key, positions)
        row = einx.rearrange("q -> b... 1 q 1", torch.arange(length), b=ones)
        column = einx.rearrange("k -> b... 1 1 k", torch.arange(length), b=ones)
        scores = einops.einsum(query, key, "... q d, ... k d -> ... q k") / key.shape[-1] ** 0.5
        scores = torch.where(row >= column, scores, float("-inf"))
        powers = torch.exp(scores - scores.max(-1, keepdim=True).values)
        weights = powers / powers.sum(-1, keepdim=True)
        mixed = einops.einsum(weights, value, "... q k, ... k d -> ... q d")
        joined = einops.rearrange(mixed, "b h s d -> b s (h d)").contiguous()
        output: Tensor = self.projections[3](joined)
        return output
