"""Workload: the FLOP and bytes of one optimizer step, from a model's config.json.

FLOP are counted as multiply and add, 2 for each; backward is twice forward, and one forward more
where activations are recomputed (Kaplan et al. 2020, section 2.1; Korthikanti et al. 2022).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sim.models.families import read_model
from sim.models.kernels import KERNELS
from sim.models.recomputation import (
    BY_OPERATION,
    Recomputation,
    recomputed,
    violations,
)
from sim.models.shapes.parts import Layer, Parameter
from sim.traced.step import TracedStep
from zenflow.config import raise_violations, unknown_name

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
ATTENTIONS = ("fused", "native", "eager", "flash1")
MOST_MICRO_BATCHES = 4_096
"""Most micro-batches of a step that commands take: more take minutes to simulate."""
LOSSES = ("tokens", "parts", "chunks", "float32", "sum", "classes")
LOOP, TRL = "loop", "trl"
TRAINERS = (LOOP, "transformers", TRL)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its batch, on each device.

    Raises:
        ConfigError: A number breaks its rule.

    Examples:
        >>> from sim.models.table import find_model
        >>> workload = Workload.of_config(*find_model("llama-2-7b"), batch_size=8, sequence=2048)
        >>> workload.num_params, workload.tokens_per_step
        (6738415616, 16384)
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
    """Recomputation in backward (`sim.models.recomputation`): a share of the layers, evenly
    spread, or of every layer what is cheap (`BY_OPERATION`)."""
    attention: str = "native"
    """Kernels of attention, one of `ATTENTIONS`.

    Fused ones, FlashAttention-2 and kernels like it, keep no scores and compute them once more in
    backward, as *selective* recomputation does (Korthikanti et al. 2022, section 4.2). Native ones
    do so by what a device's generation has of its own: FlashAttention-3 and 4, or cuDNN. They are
    what PyTorch picks on Hopper and the B200 where cuDNN is newer than 9.15 (its sdp_utils.cpp);
    a device without such kernels has fused ones. Eager ones keep scores, over the whole square.
    The first FlashAttention, of before July 2023, is that of PyTorch 2.0 and 2.1 too."""
    offloads_activations: bool = False
    """Whether what a layer keeps for backward waits on the host meanwhile."""
    kernels: str = "eager"
    """Kernels of elementwise work: a key of `KERNELS`."""
    loss: str = "tokens"
    """Loss behind the last layer, one of `LOSSES`.

    Cross entropy of each token's logits by `kernels`, of all of them or of one part after another,
    or of logits that the output layer makes chunk by chunk, as `zenflow train` does;
    by PyTorch's own in float32, where layers alone are compiled; their sum, as benchmarks take it;
    or a few classes of a sequence, with no output layer over the vocabulary."""
    is_causal: bool = True
    """Whether a token attends to earlier ones alone."""
    dropouts: tuple[bool, bool] = (False, False)
    """Whether a layer's two outputs, and attention's scores, go through dropout."""
    scales_logits: bool = False
    """Whether the model changes its logits behind the output layer, as by a soft cap."""
    stored_as: str | None = None
    """Method by which the model's file has its weights quantised; None where it has not."""
    notes: tuple[str, ...] = ()
    """Sentences on what of the model's file was left out or taken for granted."""
    trainer: str = LOOP
    """Code around the passes, one of `TRAINERS`: a plain loop, whose own time hides behind the
    device, transformers' Trainer or TRL's SFTTrainer."""
    traced: TracedStep | None = None
    """Traced step of the workload, which times are taken from; None is shapes alone."""

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
        if self.trainer not in TRAINERS:
            yield f"trainer {unknown_name(self.trainer, TRAINERS)}"
        if not self.layers:
            yield "a model needs at least one layer"
        yield from violations(
            self.checkpointing, self.layers, self.attention, is_traced=self.traced is not None
        )

    @classmethod
    def of_config(cls, name: str, config: Mapping[str, Any], **settings: Any) -> Workload:
        """Return the workload of a Hugging Face config.json.

        Args:
            name: For tables.
            config: The file's content.
            settings: Other fields of this class.

        Raises:
            ConfigError: The family is unknown, or a field or a setting breaks its rule.
        """
        model = read_model(config)
        layers = list(model.layers)
        settings.setdefault("is_causal", model.is_causal)
        settings.setdefault("dropouts", model.dropouts)
        if settings.get("loss") == "classes":
            layers[-1] = layers[-1].without(("lm_head", "decoder"))
        return cls(
            name=name,
            layers=tuple(layers),
            scales_logits=model.scales_logits,
            stored_as=model.stored_as,
            notes=model.notes,
            **settings,
        )

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one parameter as the model holds it."""
        return DTYPE_BYTES[self.dtype]

    @property
    def against_chunks(self) -> str | None:
        """Reason why `zenflow train --chunked-loss` refuses the model; None where it trains."""
        if self.loss == "classes" or not self.is_causal:
            return "is no decoder with an output layer over its vocabulary"
        if self.dtype == "float16":
            return "has gradients in float16, of which small ones vanish before they are scaled"
        return "changes its logits behind the output layer" if self.scales_logits else None

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one device."""
        return self.batch_size * self.sequence

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step on one device."""
        return self.tokens * self.accumulation

    # Sums over all layers are asked for again and again: they are made once.

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All tensors, in the order of forward."""
        return tuple(parameter for layer in self.layers for parameter in layer.parameters)

    @functools.cached_property
    def num_params(self) -> int:
        """Parameters of the model, tied ones counted once."""
        sizes = {id(layer.parameters): layer.numel for layer in self.distinct_layers}
        return sum(sizes[id(layer.parameters)] for layer in self.layers)

    @functools.cached_property
    def active_params(self) -> int:
        """Parameters that compute with a token: of a mixture's experts those that are chosen."""
        sizes = {
            id(layer.parameters): sum(p.active * p.numel for p in layer.parameters)
            for layer in self.distinct_layers
        }
        return round(sum(sizes[id(layer.parameters)] for layer in self.layers))

    @property
    def sizes(self) -> str:
        """Parameters in words, and of a mixture those that compute with a token."""
        words = f"{self.num_params / 1e9:.3g} B parameters"
        if self.active_params == self.num_params:
            return words
        return f"{words}, {self.active_params / 1e9:.3g} B active"

    @property
    def model_bytes(self) -> int:
        """Bytes of all weights."""
        return self.num_params * self.dtype_bytes

    @property
    def recomputes_all(self) -> bool:
        """Whether backward computes all of every layer again."""
        return self.checkpointing == 1

    @property
    def keeps_products(self) -> bool:
        """Whether layers that are recomputed keep attention's output and some products'."""
        return self.checkpointing == BY_OPERATION

    @functools.cached_property
    def recomputed(self) -> tuple[bool, ...]:
        """Whether each layer is recomputed, in the order of forward."""
        return tuple(recomputed(self.layers, self.checkpointing))

    @functools.cached_property
    def distinct_layers(self) -> tuple[Layer, ...]:
        """Layers that don't share their parameters' shapes with one before, in order."""
        last_first = {id(layer.parameters): layer for layer in reversed(self.layers)}
        return tuple(reversed(last_first.values()))

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

    @functools.cached_property
    def hidden(self) -> int:
        """Width of the residual stream."""
        first = self.layers[0].parameters
        # An embedding may be narrower than the layers, and is projected then.
        projected = next((p for p in first if p.name == "project_in.weight"), None)
        return first[0].shape[1] if projected is None else projected.shape[0]
