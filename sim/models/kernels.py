"""Elementwise kernels of a layer: tensors that they read, write and keep, and their launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Passes:
    """One quantity of a forward and of its backward."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        """Return the sum, pass by pass."""
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> Passes:
        """Return both passes so many times."""
        return Passes(self.forward * factor, self.backward * factor)


NOTHING = Passes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that an operation moves for each element of its tensor.

    Bytes are those that a copy would move in the operation's time: kernels that reach less of the
    memory's bandwidth than a copy count for more than they move.
    """

    units: Passes = NOTHING
    """Tensors of the model's type, read or written once."""
    fixed: Passes = NOTHING
    """Bytes by any type."""
    casts: Passes = NOTHING
    """Bytes more where the model's type is not float32."""

    def of(self, size: int) -> Passes:
        """Return the bytes of an element of so many bytes."""
        found = self.units * size + self.fixed
        return found if size == _FLOAT_BYTES else found + self.casts


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Elementwise kernels of a layer and of the loss."""

    rms_norm: Moved
    """Traffic of an RMS norm, for each element of its width."""
    layer_norm: Moved
    """Traffic of a layer norm, for each element of its width."""
    rotary: Moved
    """Traffic of rotary positions, for each element of queries and keys."""
    gate: Moved
    """Traffic of a gated activation, for each element of the feed-forward's inner width."""
    residual: Moved
    """Traffic of both sums and of copies between layouts, for each element of the residual
    stream."""
    logit: Moved
    """Traffic of the loss, for each logit."""
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


def _units(forward: float, backward: float) -> Moved:
    return Moved(units=Passes(forward, backward))


# Norms, rotary positions and PyTorch's cross entropy have measured seconds, times 0.85 of the
# memory's bandwidth: of A100 SXM and H100 SXM (linkedin/Liger-Kernel,
# benchmark/data/all_benchmark_data.csv, the widest tensors). Other numbers count tensors.
KERNELS: Mapping[str, Kernels] = {
    # Seven kernels an RMS norm: cast, square, mean, root, scale, cast, weight. 16 bits took 50 and
    # 131 bytes with weights of float32, which are 4 and 19 of them; float32 took 43 and 116 with a
    # sum of 12 a pass. A layer norm's backward takes as long in either type.
    # Positions read views of transposed tensors. The loss casts logits to float32 and copies
    # the shifted ones; its softmax and its gradient take 17 and 32 bytes of float32.
    "eager": Kernels(
        rms_norm=Moved(fixed=Passes(31, 104), casts=Passes(15, 8)),
        layer_norm=Moved(units=Passes(3.2, 0), fixed=Passes(0, 28)),
        rotary=_units(20, 24), gate=_units(5, 10), residual=_units(10, 20),
        logit=Moved(units=Passes(1, 1), fixed=Passes(29, 48)),
        launches=31, kept_norm=None, kept_gate=4, gate_gradients=2, loss="float32"),
    # One kernel each for a norm, for rotary positions and for the gate (Liger-Kernel, ops/). The
    # fused loss writes a chunk's logits, reads them, and leaves their gradient in place, all in
    # forward. A norm keeps its input, the gate both of its factors beside the product, and it
    # writes their gradients over them.
    "liger": Kernels(
        rms_norm=Moved(units=Passes(2.4, 0), fixed=Passes(0, 20)),
        layer_norm=Moved(units=Passes(2.4, 0), fixed=Passes(0, 20)),
        rotary=_units(2, 2), gate=_units(3, 6), residual=_units(10, 20), logit=_units(3, 0),
        launches=12, kept_norm=1, kept_gate=3, gate_gradients=1, loss="chunks"),
    # A sum into the residual stream goes with the norm that reads it: two units less. The loss
    # reads logits for the maximum and for the sum, and once for the gradient that it writes: it
    # keeps them as they are, and casts nothing in memory.
    "compiled": Kernels(
        rms_norm=_units(2, 4), layer_norm=_units(2, 4), rotary=_units(2, 2), gate=_units(3, 6),
        residual=_units(4, 8), logit=_units(2, 2),
        launches=6, kept_norm=1, kept_gate=3, gate_gradients=2, loss="logits"),
}  # fmt: skip
"""Elementwise kernels by name: transformers' own modules, Liger's, and torch.compile's."""
