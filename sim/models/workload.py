"""Workload: what one optimizer step computes and holds, from a model's config.json.

FLOP are counted as multiply and add, 2 for each; backward is twice forward, and one forward more
where activations are recomputed (Kaplan et al. 2020, section 2.1; Korthikanti et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.models.activations import Activations
from sim.models.families import Layer, Parameter, dropouts_of, layers_of
from sim.models.kernels import KERNELS, PLAIN_LAUNCHES
from sim.models.recomputation import (
    BY_OPERATION,
    Recomputation,
    products_again,
    recomputed,
    violations,
)
from sim.traced.step import TracedStep
from zenflow.config import raise_violations, unknown_name

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
ATTENTIONS = ("fused", "eager")
LOSSES = ("tokens", "parts", "float32", "sum", "classes")

_SCORE_PASSES = 10.0
"""Number of times that eager attention's forward reads or writes a score: product, scale and
mask, softmax in float32 (twice as wide), its cast, the product with values. Estimated."""
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
    elementwise_bytes: float
    """Bytes of activations read and written by everything that is not a product."""
    weight_bytes: float
    """Bytes of weights that are read."""
    tensor_bytes: float = math.inf
    """Bytes of one tensor of the residual stream's width."""
    num_kernels: int
    """Number of kernels."""
    keeps_scores: bool = False
    """Whether attention's scores are kept, so that backward does not compute them once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and its batch, on each device.

    Raises:
        ConfigError: A number breaks its rule.
    """

    name: str
    layers: tuple[Layer, ...]
    """Layers in the order of forward."""
    batch_size: int = 1
    """Number of sequences of a micro-batch on one device."""
    sequence: int = 1024
    """Number of tokens of a sequence."""
    accumulation: int = 1
    """Number of micro-batches of a step."""
    dtype: str = "bfloat16"
    """Type of parameters, gradients and activations."""
    checkpointing: Recomputation = False
    """What backward computes again (`sim.models.recomputation`): a share of the layers, evenly
    spread, or of every layer what is cheap (`BY_OPERATION`)."""
    attention: str = "fused"
    """Kernels of attention, one of `ATTENTIONS`.

    Fused ones keep no scores and compute them once more in backward, as *selective* recomputation
    does (Korthikanti et al. 2022, section 4.2). Eager ones keep them, over the whole square."""
    offloads_activations: bool = False
    """Whether what a layer keeps for backward waits on the host meanwhile."""
    num_heads: int = 1
    """Number of attention's heads."""
    kernels: str = "eager"
    """Kernels of elementwise work: a key of `KERNELS`."""
    loss: str = "tokens"
    """What follows the last layer, one of `LOSSES`.

    Cross entropy of each token's logits by `kernels`, of all of them or of one part after another;
    by PyTorch's own in float32, where layers alone are compiled; their sum, as benchmarks take it;
    or a few classes of a sequence, with no output layer over the vocabulary."""
    is_causal: bool = True
    """Whether a token attends to earlier ones alone."""
    dropouts: tuple[bool, bool] = (False, False)
    """Whether a layer's two outputs, and attention's scores, go through dropout."""
    num_key_value_heads_share: float = 1.0
    """Width of keys over width of queries."""
    traced: TracedStep | None = None
    """A step of it as it was traced, which times are taken from; None is shapes alone."""

    def __post_init__(self) -> None:
        """Check every number."""
        raise_violations(f"the workload {self.name!r}", self._violations())

    def _violations(self) -> Iterator[str]:
        for name in ("batch_size", "sequence", "accumulation"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                yield f"{name} must be a whole number of at least 1, got {value!r}"
        if self.dtype not in DTYPE_BYTES:
            yield f"dtype {unknown_name(self.dtype, DTYPE_BYTES)}"
        if self.attention not in ATTENTIONS:
            yield f"attention {unknown_name(self.attention, ATTENTIONS)}"
        if self.kernels not in KERNELS:
            yield f"kernels {unknown_name(self.kernels, KERNELS)}"
        if self.loss not in LOSSES:
            yield f"loss {unknown_name(self.loss, LOSSES)}"
        if not self.layers:
            yield "a model needs at least one layer"
        yield from violations(self)

    @classmethod
    def of_config(cls, name: str, config: Mapping[str, Any], **settings: Any) -> Workload:
        """Return the workload of a Hugging Face config.json.

        Args:
            name: For tables.
            config: The file's content.
            settings: Other fields of this class.

        Raises:
            ConfigError: The family is unknown, a field is missing, or a setting breaks its rule.
        """
        heads = config.get("num_attention_heads") or config.get("n_head") or 1
        groups = config.get("num_key_value_heads") or heads
        settings.setdefault("is_causal", config.get("model_type") != "bert")
        settings.setdefault("dropouts", dropouts_of(config))
        layers = layers_of(config)
        if settings.get("loss") == "classes":
            layers[-1] = layers[-1].without(("lm_head", "decoder"))
        return cls(
            name=name,
            layers=tuple(layers),
            num_key_value_heads_share=groups / heads,
            num_heads=heads,
            **settings,
        )

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one parameter as the model holds it."""
        return DTYPE_BYTES[self.dtype]

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one device."""
        return self.batch_size * self.sequence

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step on one device."""
        return self.tokens * self.accumulation

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All tensors, in the order of forward."""
        return tuple(parameter for layer in self.layers for parameter in layer.parameters)

    @property
    def num_params(self) -> int:
        """Parameters of the model, tied ones counted once."""
        sizes = {id(layer.parameters): layer.numel for layer in self.distinct_layers}
        return sum(sizes[id(layer.parameters)] for layer in self.layers)

    @property
    def model_bytes(self) -> int:
        """Bytes of its weights."""
        return self.num_params * self.dtype_bytes

    @property
    def recomputes_all(self) -> bool:
        """Whether backward computes all of every layer again."""
        return self.checkpointing == 1

    @property
    def keeps_products(self) -> bool:
        """Whether layers that are recomputed keep attention's output and some products'."""
        return self.checkpointing == BY_OPERATION

    def recomputed(self) -> list[bool]:
        """Return whether each layer is recomputed, in the order of forward."""
        return recomputed(self.layers, self.checkpointing)

    def works(self) -> list[LayerWork]:
        """Return every layer's forward, in the order of forward."""
        last = len(self.layers) - 1
        known: dict[tuple[int, bool, bool], LayerWork] = {}
        found = []
        for index, layer in enumerate(self.layers):
            key = (id(layer.parameters), index == 0, index == last)
            if key not in known:
                known[key] = self._work(layer, is_first=key[1], is_last=key[2])
            found.append(known[key])
        return found

    def works_again(self) -> list[LayerWork | None]:
        """Return what backward computes again of every layer; None where that is nothing."""
        known: dict[int, LayerWork] = {}
        found: list[LayerWork | None] = []
        for layer, work, redone in zip(self.layers, self.works(), self.recomputed(), strict=True):
            if redone and id(work) not in known:
                known[id(work)] = self._part(layer, work) if self.keeps_products else work
            found.append(known[id(work)] if redone else None)
        return found

    def _part(self, layer: Layer, work: LayerWork) -> LayerWork:
        """Return what is computed again by operation: elementwise work, and some products."""
        passes, kernels = self._elementwise(layer)
        products = self._products([(p, p.active) for p in products_again(layer)])
        return replace(
            work,
            matmul_flop=products["matmul_flop"],
            num_matmuls=products["num_matmuls"],
            attention_flop=0.0,
            elementwise_bytes=products["elementwise_bytes"] + self.tokens * passes,
            weight_bytes=products["weight_bytes"],
            num_kernels=kernels + products["num_matmuls"],
        )

    def _products(self, products: Sequence[tuple[Parameter, float]]) -> dict[str, Any]:
        """Return work of products with weights, by field, each for a share of the tokens.

        ``elementwise_bytes`` are what they read and write beside weights.
        """
        tokens, size = self.tokens, self.dtype_bytes
        touched = sum(tokens * share * (p.shape[0] + p.shape[1]) for p, share in products)
        return {
            "matmul_flop": sum(2.0 * tokens * share * p.numel for p, share in products),
            "num_matmuls": len(products),
            "elementwise_bytes": touched * size,
            "weight_bytes": sum(p.numel * size for p, _ in products),
        }

    @property
    def distinct_layers(self) -> list[Layer]:
        """Layers that don't share their parameters' shapes with one before, in order."""
        return list({id(layer.parameters): layer for layer in reversed(self.layers)}.values())[
            ::-1
        ]

    def _work(self, layer: Layer, *, is_first: bool, is_last: bool) -> LayerWork:
        tokens, size = self.tokens, self.dtype_bytes
        matrices = [p for p in layer.parameters if len(p.shape) > 1]
        if is_first:  # tables are looked up, only projections are multiplied by
            matrices = [p for p in layer.parameters if "project" in p.name]
        products = [(p, p.active) for p in matrices]
        if is_last and self.is_tied:  # the embedding once more
            products.append((self.layers[0].parameters[0], 1.0))
        multiplied = self._products(products)
        width = layer.attention_width
        is_eager = self.attention == "eager" and width > 0
        pairs = self.batch_size * self.sequence**2
        score = _SCORE_PASSES * size + self.dropouts[1] * (2.0 * size + 1.0)
        scores = pairs * self.num_heads * score if is_eager else 0.0
        computed = pairs * (0.5 if self.is_causal and not is_eager else 1.0)
        logits = tokens * self.vocabulary if is_last and self.loss != "classes" else 0
        passes, kernels = self._elementwise(layer)
        return LayerWork(
            matmul_flop=multiplied["matmul_flop"],
            num_matmuls=len(products),
            attention_flop=4.0 * computed * width,
            # Beside what products read and write.
            elementwise_bytes=multiplied["elementwise_bytes"]
            + tokens * passes
            + logits * self._logit_bytes
            + scores,
            weight_bytes=multiplied["weight_bytes"],
            tensor_bytes=float(tokens * self.hidden * size),
            num_kernels=kernels + len(products) + (self._score_kernels(layer) if is_eager else 0),
            keeps_scores=is_eager,
        )

    def _elementwise(self, layer: Layer) -> tuple[float, int]:
        """Return bytes for each token, and kernels, of a layer's elementwise operations.

        As `KERNELS` counts them. Llama's family: two RMS norms, rotary positions on queries and
        keys, a gated activation; others: two fused norms and an activation. Both: two sums into
        the residual stream, and copies between layouts. A dropout reads and writes, and writes a
        mask of bytes; compiled ones are part of the sums.
        """
        if not layer.attention_width:
            return 0.0, 4
        size, hidden = self.dtype_bytes, self.hidden
        inner = self.inner_width(layer)
        kernels = KERNELS[self.kernels]
        shared = kernels.residual * size * hidden
        if not layer.is_gated:
            plain, launches = (4.0 * hidden + 2.0 * inner) * size, PLAIN_LAUNCHES
            if self.dropouts[0] and self.kernels != "compiled":
                plain, launches = plain + 2.0 * (2.0 * size + 1.0) * hidden, launches + 2
            return shared + plain, min(launches, kernels.launches)
        if kernels.norm is None:  # in float32
            norm = 24.0 + 4.0 * size if size < 4 else 28.0
        else:
            norm = kernels.norm * size
        rotated = layer.attention_width * (1.0 + self.num_key_value_heads_share)
        more = (kernels.rotary * rotated + kernels.gate * inner) * size
        return shared + norm * self.normed_width(layer) + more, kernels.launches

    def _score_kernels(self, layer: Layer) -> int:
        casts = _SCORE_CASTS if layer.is_gated and self.dtype_bytes < 4 else 0
        return _SCORE_KERNELS + casts + self.dropouts[1]

    @property
    def _logit_bytes(self) -> float:
        if self.loss in ("sum", "classes"):  # a sum reads them once
            return self.dtype_bytes
        kernels = KERNELS["eager" if self.loss == "float32" else self.kernels]
        return kernels.logit + kernels.logit_units * self.dtype_bytes

    def normed_width(self, layer: Layer) -> float:
        """Return the width that a layer's norms have together: two, and those of its family."""
        names = [p.name.removesuffix(".weight") for p in layer.parameters]
        more = sum(name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")
                   for name in names)  # fmt: skip
        query = layer.attention_width
        heads = query * (
            ("q_norm" in names) + self.num_key_value_heads_share * ("k_norm" in names)
        )
        return (2.0 + more) * self.hidden + heads

    def inner_width(self, layer: Layer) -> float:
        """Return the width inside the feed-forward, over all experts that a token goes to."""
        if layer.is_gated:
            return sum(gate.active * width for gate, width in layer.gates)
        matrices = sum(p.numel for p in layer.parameters if len(p.shape) > 1)
        return (matrices - 4.0 * self.hidden * layer.attention_width) / (2.0 * self.hidden)

    @property
    def activations(self) -> Activations:
        """Bytes of its activations."""
        return Activations(self)

    def tied_bytes(self) -> float:
        """Return the bytes of an output layer's gradient to which an embedding's is added; or 0.

        Both are there when backward ends, if the two layers share their table.
        """
        return float(self.is_tied * self.layers[0].parameters[0].numel * self.dtype_bytes)

    @property
    def is_tied(self) -> bool:
        """Whether the output layer multiplies by the embedding's table."""
        names = {p.name for p in self.layers[-1].parameters}
        return self.loss != "classes" and not names & {"lm_head.weight", "decoder.weight"}

    @property
    def vocabulary(self) -> int:
        """Number of rows of the embedding's table."""
        return self.layers[0].parameters[0].shape[0]

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        inner = next((layer for layer in self.layers if layer.attention_width), None)
        norms = [p for p in inner.parameters if len(p.shape) == 1] if inner else []
        return norms[0].shape[0] if norms else self.layers[0].parameters[0].shape[-1]
