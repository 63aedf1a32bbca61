"""Work: what each layer computes in forward, and what backward computes again.

Of one micro-batch on one device. A product counts 2 FLOP for each multiply and add.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.models.kernels import KERNELS, NOTHING, PLAIN_LAUNCHES, Passes
from sim.models.recomputation import products_again
from sim.models.shapes.parts import Layer, Mixer, Parameter
from sim.models.workload import Workload

_SCORE_PASSES = 10.0
"""Number of times that eager attention's forward reads or writes a score: product, scale and
mask, softmax in float32 (twice as wide), its cast, the product with values. Estimated."""
_COMPILED_SCORE_PASSES = 4.0
"""Number of times that a score is read or written where one compiled kernel is between the two
products. Counted."""
_FIRST_FLASH = 0.5
"""Rate of the first FlashAttention's kernels over the second's, which are about twice as fast: 50
to 73 % of an A100's peak in place of 25 to 40 % (Dao 2023, abstract)."""
_SCORE_KERNELS, _SCORE_CASTS = 5, 2
"""Kernels of eager attention's forward beside the one of fused attention, counted in transformers'
own modules. Gated families take the softmax in float32, which casts where they have 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One layer's forward over one micro-batch, on one device."""

    matmul_flop: float
    """FLOP of products with weights."""
    num_matmuls: int
    """Number of products with weights."""
    attention_flop: float
    """FLOP of scores and of their product with values."""
    elementwise_bytes: Passes
    """Bytes of activations that all but products read and write, forward and backward."""
    weight_bytes: float
    """Bytes of weights that are read."""
    product_bytes: float = 0.0
    """Bytes of activations that products with weights read and write."""
    tensor_bytes: float = math.inf
    """Bytes of one tensor of the residual stream's width."""
    num_kernels: int
    """Number of kernels of forward, products included."""
    attention_tokens: float = math.inf
    """Tokens of a causal sequence that fused attention goes over; infinite by other kernels."""
    is_native: bool = False
    """Whether attention runs by kernels of the device's generation."""
    attention_share: float = 1.0
    """Rate of attention's kernels over that of fused ones, or native ones."""
    keeps_scores: bool = False
    """Whether attention's scores are kept, so that backward does not compute them once more."""


@dataclass(frozen=True, slots=True)
class Work:
    """Forward and recomputation of a workload's layers, in FLOP, bytes and kernels.

    Examples:
        Forward takes two FLOP for each weight and token, and those of attention.

        >>> from sim.models.table import find_model
        >>> from sim.models.workload import Workload
        >>> workload = Workload.of_config(*find_model("llama-2-7b"))
        >>> flop = sum(layer.matmul_flop for layer in Work(workload).all())
        >>> round(flop / workload.tokens / workload.num_params, 2)
        1.96
    """

    workload: Workload
    """Model and batch whose work is counted."""

    def all(self) -> list[LayerWork]:
        """Return the forward of each layer, in order."""
        layers = self.workload.layers
        last = len(layers) - 1
        known: dict[tuple[int, bool, bool], LayerWork] = {}
        found = []
        for index, layer in enumerate(layers):
            key = (id(layer.parameters), index == 0, index == last)
            if key not in known:
                known[key] = self._work(layer, is_first=key[1], is_last=key[2])
            found.append(known[key])
        return found

    def again(self) -> list[LayerWork | None]:
        """Return the work that backward computes again of each layer; None for nothing."""
        known: dict[int, LayerWork] = {}
        found: list[LayerWork | None] = []
        for layer, work, redone in zip(
            self.workload.layers, self.all(), self.workload.recomputed, strict=True
        ):
            if redone and id(work) not in known:
                known[id(work)] = self._part(layer, work) if self.workload.keeps_products else work
            found.append(known[id(work)] if redone else None)
        return found

    def _part(self, layer: Layer, work: LayerWork) -> LayerWork:
        """Return the work computed again by operation: elementwise work, and some products."""
        passes, kernels = self._elementwise(layer)
        products = self._products([(p, p.active) for p in products_again(layer)])
        return replace(
            work,
            matmul_flop=products["matmul_flop"],
            num_matmuls=products["num_matmuls"],
            attention_flop=0.0,
            elementwise_bytes=passes * self.workload.tokens,
            weight_bytes=products["weight_bytes"],
            product_bytes=products["product_bytes"],
            num_kernels=kernels + products["num_matmuls"],
        )

    def _products(self, products: Sequence[tuple[Parameter, float]]) -> dict[str, Any]:
        """Return work of products with weights, by field, each for a share of the tokens."""
        tokens, size = self.workload.tokens, self.workload.dtype_bytes
        touched = sum(tokens * share * (p.shape[0] + p.shape[1]) for p, share in products)
        return {
            "matmul_flop": sum(2.0 * tokens * share * p.numel for p, share in products),
            "num_matmuls": len(products),
            "weight_bytes": sum(p.numel * size for p, _ in products),
            "product_bytes": touched * size,
        }

    def _work(self, layer: Layer, *, is_first: bool, is_last: bool) -> LayerWork:
        workload = self.workload
        tokens, size = workload.tokens, workload.dtype_bytes
        matrices = [p for p in layer.parameters if len(p.shape) > 1]
        if is_first:  # tables are looked up, only projections are multiplied by
            matrices = [p for p in layer.parameters if "project" in p.name]
        products = [(p, p.active) for p in matrices]
        if is_last and workload.is_tied:  # the embedding once more
            products.append((workload.layers[0].parameters[0], 1.0))
        multiplied = self._products(products)
        mixer = layer.mixer
        attends = mixer is not None and mixer.is_attention
        is_eager = workload.attention == "eager" and attends
        is_cut = workload.is_causal and not is_eager
        pairs = workload.batch_size * workload.sequence**2
        heads = mixer.heads if mixer is not None else 0
        logits = tokens * workload.vocabulary if is_last and workload.loss != "classes" else 0
        passes, kernels = self._elementwise(layer)
        return LayerWork(
            matmul_flop=multiplied["matmul_flop"],
            num_matmuls=len(products),
            attention_flop=0.0 if mixer is None else self._mixing_flop(mixer, is_cut=is_cut),
            elementwise_bytes=passes * tokens
            + self._logit_bytes * logits
            + self._score_bytes * (pairs * heads if is_eager else 0),
            weight_bytes=multiplied["weight_bytes"],
            product_bytes=multiplied["product_bytes"],
            tensor_bytes=float(tokens * workload.hidden * size),
            num_kernels=kernels + len(products) + (self._score_kernels(layer) if is_eager else 0),
            attention_tokens=self._span(mixer) if is_cut else math.inf,
            is_native=workload.attention == "native",
            attention_share=_FIRST_FLASH if workload.attention == "flash1" else 1.0,
            keeps_scores=is_eager,
        )

    def _mixing_flop(self, mixer: Mixer, *, is_cut: bool) -> float:
        """Return FLOP of scores and of their product with values, or of a recurrence.

        A window leaves each token that many pairs at most; eager attention computes all.
        """
        workload = self.workload
        state = workload.tokens * mixer.state_flop
        if not mixer.is_attention:
            return state
        pairs = float(workload.sequence**2)
        if is_cut:
            window = min(workload.sequence, mixer.window or workload.sequence)
            pairs = window * (workload.sequence - window / 2.0)
        width = mixer.queries + mixer.outputs + mixer.scored
        return state + 2.0 * workload.batch_size * pairs * width

    def _span(self, mixer: Mixer | None) -> float:
        """Return the tokens of a causal sequence with as many pairs for each as a layer has."""
        sequence = float(self.workload.sequence)
        if mixer is None or mixer.window is None:
            return sequence
        return min(sequence, 2.0 * mixer.window)

    def _elementwise(self, layer: Layer) -> tuple[Passes, int]:
        """Return bytes for each token, and kernels, of a layer's elementwise operations.

        As `KERNELS` counts them. Llama's family: two RMS norms, rotary positions on queries and
        keys, a gated activation; others: two layer norms and an activation. Both: two sums into
        the residual stream, and copies between layouts. A dropout reads and writes, and writes a
        mask of bytes; compiled ones are part of the sums.
        """
        if not layer.is_inner:
            return NOTHING, 4
        size, hidden = self.workload.dtype_bytes, self.workload.hidden
        inner, mixer = layer.inner_width, layer.mixer
        kernels = KERNELS[self.workload.kernels]
        shared = kernels.residual.of(size) * hidden
        if not layer.is_gated:
            plain = kernels.layer_norm.of(size) * (2 * hidden) + _twice(2.0 * inner * size)
            launches = PLAIN_LAUNCHES
            if self.workload.dropouts[0] and self.workload.kernels != "compiled":
                plain += _twice(2.0 * (2.0 * size + 1.0) * hidden)
                launches += 2
            return shared + plain, min(launches, kernels.launches)
        norms = kernels.rms_norm.of(size) * layer.normed_width
        rotated = 0 if mixer is None else mixer.queries + mixer.keys
        more = kernels.rotary.of(size) * rotated + kernels.gate.of(size) * inner
        return shared + norms + more, kernels.launches

    @property
    def _score_bytes(self) -> Passes:
        """Bytes that eager attention moves for each score."""
        workload = self.workload
        passes = _COMPILED_SCORE_PASSES if workload.kernels == "compiled" else _SCORE_PASSES
        size = workload.dtype_bytes
        return _twice(passes * size + workload.dropouts[1] * (2.0 * size + 1.0))

    def _score_kernels(self, layer: Layer) -> int:
        casts = _SCORE_CASTS if layer.is_gated and self.workload.dtype_bytes < 4 else 0
        return _SCORE_KERNELS + casts + self.workload.dropouts[1]

    @property
    def _logit_bytes(self) -> Passes:
        size = self.workload.dtype_bytes
        if self.workload.loss in ("sum", "classes"):  # read once, and a gradient is written
            return Passes(size, size)
        kernels = KERNELS["eager" if self.workload.loss == "float32" else self.workload.kernels]
        return kernels.logit.of(size)


def _twice(forward: float) -> Passes:
    """Return passes whose backward moves twice what forward does."""
    return Passes(forward, 2.0 * forward)
