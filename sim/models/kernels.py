"""Elementwise kernels of a layer: tensors that they read, write and keep, and their launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Elementwise kernels of a gated layer in forward, by count of tensors read and written.

    A unit is one tensor of the model's type, read or written once.
    """

    norm: float | None
    """Units of a norm's width; None is in float32, as `Workload` counts eager modules."""
    rotary: float
    """Units of the widths of queries and keys."""
    gate: float
    """Units of the feed-forward's inner width."""
    residual: float
    """Units of the residual stream's width: both sums, and copies between layouts."""
    logit: float
    """Bytes of a logit in float32 tensors."""
    logit_units: float
    """Units of a logit in tensors of the model's type."""
    launches: int
    """Number of kernels of a layer, products left out."""
    kept_norm: float | None
    """Units of a norm's width that wait for backward; None is a copy in float32, and a unit."""
    kept_gate: float
    """Units of the feed-forward's inner width that wait for backward."""
    gate_gradients: float
    """Units of the feed-forward's inner width that gradients take in backward beside what waits
    for it."""
    loss: Literal["float32", "logits", "chunks"]
    """Logits that the loss keeps: their float32 log-probabilities, the logits themselves, or no
    more than a chunk at a time."""


PLAIN_LAUNCHES = 18
"""Launches of a plain layer without its products and dropout. OPT's, GPT-2's and BERT's have fewer
kernels than Llama's, but take the host 0.63 of its forward's time and 0.58 of its backward's on
average (record 2026-11-25_module-launches_amd-epyc)."""

KERNELS: Mapping[str, Kernels] = {
    # Six kernels a norm: cast, square, mean, root, scale, weight. Five for each of queries and
    # keys. The loss casts logits to float32, copies the shifted ones, and takes a softmax.
    "eager": Kernels(norm=None, rotary=9, gate=5, residual=10, logit=20, logit_units=1,
                     launches=31, kept_norm=None, kept_gate=4, gate_gradients=2, loss="float32"),
    # One kernel each for a norm, for rotary positions and for the gate (Liger-Kernel, ops/). The
    # fused loss writes a chunk's logits, reads them, and leaves their gradient in place. A norm
    # keeps its input, the gate both of its factors beside the product, and it writes their
    # gradients over them.
    "liger": Kernels(norm=2, rotary=2, gate=3, residual=10, logit=0, logit_units=3, launches=12,
                     kept_norm=1, kept_gate=3, gate_gradients=1, loss="chunks"),
    # A sum into the residual stream goes with the norm that reads it: two units less. The loss
    # reads logits once for the maximum and the sum, and once for its gradient: it keeps them as
    # they are, and casts nothing in memory.
    "compiled": Kernels(norm=2, rotary=2, gate=3, residual=4, logit=0, logit_units=3,
                        launches=6, kept_norm=1, kept_gate=3, gate_gradients=2, loss="logits"),
}  # fmt: skip
"""Elementwise kernels by name: transformers' own modules, Liger's, and torch.compile's."""
