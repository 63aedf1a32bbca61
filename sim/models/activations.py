"""Activations: bytes that forward leaves for backward, and those that backward and the loss add.

Bytes of one micro-batch on one device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sim.models.kernels import KERNELS
from sim.models.recomputation import kept_products
from sim.models.shapes.parts import Layer
from sim.models.workload import Workload

LOSS_PARTS = 8
"""Parts of a sequence whose loss is computed one after another (torchtune's default,
modules/loss/ce_chunked_output_loss.py)."""
CHUNK_LOGITS = 1 << 25
"""Largest number of logits of a chunk in `zenflow train --chunked-loss`: 128 MiB in float32."""
_FLOAT_BYTES = 4
_RESIDENT_LAYERS = 2
"""Number of the last layers whose activations stay on the device: backward needs them first."""


@dataclass(frozen=True)
class Activations:
    """Bytes of a workload's activations.

    Examples:
        >>> from sim.models.table import find_model
        >>> from sim.models.workload import Workload
        >>> for checkpointing in (False, True):
        ...     workload = Workload.of_config(*find_model("gpt2"), checkpointing=checkpointing)
        ...     print(round(sum(Activations(workload).kept_bytes()) / 2**20), "MiB")
        506 MiB
        218 MiB
    """

    workload: Workload
    """Model and batch whose activations are counted."""

    def kept_bytes(self) -> Sequence[float]:
        """Return the bytes that each layer keeps from forward to backward, in order.

        - By Korthikanti et al. 2022, section 4.1, without the terms quadratic in the sequence,
          which fused attention does not keep: 34 bytes for each token and unit of width of a plain
          layer in 16 bits (an activation that is a ReLU keeps less).
        - Gated layers are counted likewise: see `_kept_per_token`.
        - A layer that is recomputed keeps its input, and by operation some products' outputs.
        - The embedding keeps indices; the head its norm, its product's input and what the loss
          keeps of its logits.
        - Fused kernels keep less: see `Kernels`.
        """
        return self._kept

    @functools.cached_property
    def _kept(self) -> Sequence[float]:
        work = self.workload
        is_gated = any(layer.is_gated for layer in work.distinct_layers)
        whole = {
            id(layer.parameters): self._kept_per_token(layer) for layer in work.distinct_layers
        }
        kept = []
        for index, (layer, again) in enumerate(zip(work.layers, work.recomputed, strict=True)):
            if index == len(work.layers) - 1:
                each = work.hidden * (self._norm_bytes(is_gated) + work.dtype_bytes)
                each += self._kept_logit * work.vocabulary
            elif not layer.is_inner:
                each = 8.0 + (0 if is_gated else work.hidden)
            elif again:
                each = work.dtype_bytes * (work.hidden + sum(self._outputs_kept(layer)))
            else:
                each = whole[id(layer.parameters)]
            kept.append(work.tokens * each)
        return kept

    def _kept_per_token(self, layer: Layer) -> float:
        """Return the bytes that a whole layer keeps for each token.

        Inputs of both norms; the common input of queries, keys and values; all three; attention's
        output; the feed-forward's input. Plain: the activation's input and output, and a byte of
        mask for each of two dropouts. Gated: gate, its activation unless it is fused, the other
        factor, the product; each routed expert also its own copy of the input, and its output.
        """
        work = self.workload
        size, width, mixer = work.dtype_bytes, work.hidden, layer.mixer
        attention = 0 if mixer is None else width + mixer.width
        is_gated = layer.is_gated
        kept_gate = KERNELS[work.kernels].kept_gate if is_gated else 2.0
        feed_forward = width + kept_gate * layer.inner_width if layer.inner_width else 0.0
        feed_forward += 2.0 * width * layer.routed
        norms = layer.normed_width * self._norm_bytes(is_gated)
        kept = norms + size * (attention + feed_forward) + self._kept_scores(layer)
        return kept + 2.0 * width * work.dropouts[0]

    def _outputs_kept(self, layer: Layer) -> tuple[float, float]:
        """Return elements that a layer recomputed by operation keeps for each token.

        Outputs of attention and of products: those that backward reads or computes on with, and
        the last one, which it does not. Eager checkpoints keep that as well, compiled ones don't.
        """
        work = self.workload
        if not work.keeps_products:
            return 0.0, 0.0
        read, last = kept_products(layer)
        is_kept = last is not None and work.kernels != "compiled"
        used = (layer.mixer.outputs if layer.mixer else 0) + sum(p.shape[0] for p in read)
        return float(used), float(last.shape[0]) if last is not None and is_kept else 0.0

    def _kept_scores(self, layer: Layer) -> float:
        """Return the bytes of scores that eager attention keeps for each token of a layer.

        Plain families keep softmax's output, and with dropout its mask and its output: 5 bytes in
        16 bits (Korthikanti et al. 2022, section 4.1). The gated ones' softmax is in float32 in
        transformers' eager modules, and its cast is kept as well.
        """
        work = self.workload
        mixer, is_gated = layer.mixer, layer.is_gated
        if work.attention != "eager" or mixer is None or not mixer.is_attention:
            return 0.0
        size = work.dtype_bytes
        each = size + work.dropouts[1] * (size + 1.0)
        if is_gated:
            each = 4.0 + (size if size < 4 else 0.0)
        return each * mixer.heads * work.sequence

    def leaving_bytes(self) -> list[float]:
        """Return the bytes of each layer's activations that wait on the host, in order.

        All that layers between embedding and head keep, but for the last ones'.
        """
        work = self.workload
        if not work.offloads_activations:
            return [0.0] * len(work.layers)
        inner = [index for index, layer in enumerate(work.layers) if layer.is_inner]
        away = set(inner[:-_RESIDENT_LAYERS])
        kept = self.kept_bytes()
        return [size if index in away else 0.0 for index, size in enumerate(kept)]

    def _norm_bytes(self, is_gated: bool) -> float:
        """Return the bytes a norm keeps for each token and unit of width, its output aside.

        A layer norm keeps its input. The gated families' RMS norm computes in float32 on a copy of
        its input, and keeps what it multiplies by its weights in the model's dtype. Fused ones
        keep their input.
        """
        work = self.workload
        kept = KERNELS[work.kernels].kept_norm if is_gated else 1.0
        return 4.0 + work.dtype_bytes if kept is None else kept * work.dtype_bytes

    @property
    def _kept_logit(self) -> float:
        """Bytes of a logit that are kept for the loss's backward."""
        size = float(self.workload.dtype_bytes)
        return {"float32": 4.0, "logits": size, "sum": size}.get(self._loss, 0.0)

    @property
    def _loss(self) -> str:
        work = self.workload
        return KERNELS[work.kernels].loss if work.loss in ("tokens", "parts") else work.loss

    @property
    def chunks_logits(self) -> bool:
        """Whether the loss makes logits chunk by chunk, with its gradients at once."""
        return self._loss == "chunks"

    def kept_at_the_end(self) -> float:
        """Return the bytes that the last layer to go through backward keeps, at its largest.

        A recomputed layer keeps its input. `recomputed_bytes` come on top, and both are together
        more than another layer keeps.
        """
        work, kept = self.workload, self.kept_bytes()[:-1]
        again = work.recomputed[:-1]
        if any(again):
            kept = [
                size
                for size, layer, redone in zip(kept, work.layers[:-1], again, strict=True)
                if redone or not layer.is_inner
            ]
        return max(kept, default=0.0)

    def loss_bytes(self) -> float:
        """Return the largest bytes that the loss holds beside those it keeps.

        - Backward of cross entropy makes the gradient of the log-probabilities and then that of
          the logits, both in float32.
        - Backward of a sum makes the logits' gradient alone, in the model's type. So does that of
          a compiled loss, but a compiled model returns its logits beside the loss: their gradient
          of zeros is made as well (pytorch/pytorch #131794, #177764).
        - A loss in chunks holds a chunk's logits and the gradient of the output layer's input. A
          chunk has about as many elements as that input, and its tokens are a power of two
          (Liger-Kernel, ops/fused_linear_cross_entropy.py).
        - `zenflow train` has no kernel for that: a chunk's logits are in float32 twice, and the
          gradient of the output layer's weight is there besides.
        - A loss in parts holds the tensors of one part at a time. It keeps the log-probabilities
          of all, and forward has the 16-bit logits of all and one part's float32 copy besides.
        """
        work = self.workload
        logits, size = float(work.tokens * work.vocabulary), work.dtype_bytes
        part = logits / LOSS_PARTS
        if self._loss == "float32":
            in_parts = max(8.0 * part, size * logits + _FLOAT_BYTES * part)
            return in_parts if work.loss == "parts" else 8.0 * logits
        if self._loss == "logits":
            return size * (part if work.loss == "parts" else 2.0 * logits)
        if self._loss == "sum":
            return size * logits
        if self._loss == "classes":
            return 0.0
        if work.loss == "chunks":
            wide = 8.0 * min(logits, CHUNK_LOGITS)
            return wide + size * work.hidden * (work.tokens + work.vocabulary)
        parts = math.ceil(work.vocabulary / work.hidden)
        chunk = min(work.tokens, 1 << (math.ceil(work.tokens / parts) - 1).bit_length())
        return float(size * (chunk * work.vocabulary + work.tokens * work.hidden))

    def idle_bytes(self) -> float:
        """Return the largest bytes that the loss leaves to the allocator, and can't use again.

        A loss in float32 casts 16-bit logits and lets go of them. Tensors of float32 that come
        later don't fit their block.
        """
        work = self.workload
        if self._loss != "float32" or work.dtype_bytes == _FLOAT_BYTES:
            return 0.0
        parts = LOSS_PARTS if work.loss == "parts" else 1
        return work.dtype_bytes * work.tokens * work.vocabulary / parts

    def recomputed_bytes(self) -> float:
        """Return the bytes of one layer's recomputation, beside what the layer keeps.

        0 where none is recomputed.
        """
        work = self.workload
        if not any(work.recomputed):
            return 0.0
        each = [
            self._kept_per_token(layer) - self._there_already(layer)
            for layer in work.distinct_layers
            if layer.is_inner
        ]
        return work.tokens * max(each, default=0.0)

    def _there_already(self, layer: Layer) -> float:
        """Return the bytes for each token that a layer needs and has kept all the time.

        Outputs of products, and its input where its first norm reads it in backward.
        """
        work = self.workload
        needs_input = not layer.is_gated or KERNELS[work.kernels].kept_norm is not None
        there = needs_input * work.hidden + self._outputs_kept(layer)[0]
        return work.dtype_bytes * there

    def gradient_bytes(self) -> float:
        """Return the bytes of activations' gradients in the largest layer's backward.

        Counted are those of the feed-forward's factors and of the residual stream.
        """
        work = self.workload
        each = [
            layer.inner_width * (KERNELS[work.kernels].gate_gradients if layer.is_gated else 2.0)
            for layer in work.distinct_layers
            if layer.is_inner
        ]
        return work.tokens * work.dtype_bytes * (max(each, default=0.0) + work.hidden)
