"""A compact Llama-style decoder, and the same trunk with a classifier's head.

RMSNorm, rotary positions, gated feed-forward, grouped or full attention heads. Parameters carry
the names and shapes of transformers' Llama classes, so that a state dict fits either; a model
made here and one made there from the same seed start from the same weights and compute the same
function.

Legend: B sequences, L tokens, D width, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from experiments.training.settings.sizes import ModelSize
from zenflow.errors import ConfigError

INIT_STD = 0.02
_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder, under transformers' names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    """Heads of keys and values, each shared by as many of the queries'; None for one a query."""

    @classmethod
    def of_size(cls, size: ModelSize, vocab_size: int) -> DecoderConfig:
        """Return the configuration of a named size over a vocabulary."""
        return cls.of_json(size.config(vocab_size))

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """Return the configuration that a config.json of the Llama family describes.

        Raises:
            ConfigError: It describes something that this decoder is not.
        """
        known = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        heads = values.get("num_attention_heads")
        if (
            values.get("model_type") != "llama"
            or (values.get("num_key_value_heads") or heads) != heads
        ):
            raise ConfigError(
                "without transformers only models that this project has written can be loaded, "
                f"not {values.get('model_type')!r}: pip install 'zenflow-offload[hf]'"
            )
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name; heads of keys and values only where they are fewer."""
        values = asdict(self)
        if self.num_key_value_heads is None:
            del values["num_key_value_heads"]
        return values


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Output of a forward pass: ``logits``, (B, L, V) or (B, classes)."""

    logits: Tensor


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, in float32, then by learnt weights."""

    def __init__(self, width: int, eps: float) -> None:
        """Start with weights of 1."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the normalised vectors in the input's dtype."""
        x = x_BLD.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * x.to(x_BLD.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        groups = config.num_key_value_heads or heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width // heads * groups, bias=False)
        self.v_proj = nn.Linear(width, width // heads * groups, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self._head_width = width // heads
        self._is_grouped = groups != heads

    def forward(self, x_BLD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the attended values, (B, L, D)."""
        query, key, value = (
            projection(x_BLD).unflatten(-1, (-1, self._head_width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(
            _rotate(query, rotation),
            _rotate(key, rotation),
            value,
            is_causal=True,
            enable_gqa=self._is_grouped,
        )
        out_BLD: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out_BLD


class GatedFeedForward(nn.Module):
    """SwiGLU: silu(gate) * up, projected down."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return (B, L, D)."""
        gated = functional.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD)
        out_BLD: Tensor = self.down_proj(gated)
        return out_BLD


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normalised residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedFeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BLD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the residual stream behind this layer."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), rotation)
        out_BLD: Tensor = x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))
        return out_BLD


class Trunk(nn.Module):
    """Embedding, layers and the last norm: everything below a head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._head_width = config.hidden_size // config.num_attention_heads
        self.recomputes = False

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the last hidden states (B, L, D) of token ids (B, L)."""
        x_BLD = self.embed_tokens(input_ids)
        rotation = _rotation(input_ids.shape[1], self._head_width, x_BLD)
        for layer in self.layers:
            if self.recomputes and self.training:
                x_BLD = checkpoint(layer, x_BLD, rotation, use_reentrant=False)
            else:
                x_BLD = layer(x_BLD, rotation)
        out_BLD: Tensor = self.norm(x_BLD)
        return out_BLD


class LanguageModel(nn.Module):
    """The trunk and an output layer over the vocabulary."""

    def __init__(self, config: DecoderConfig) -> None:
        """Make the model; with tied embeddings the two ends share one storage."""
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> ModelOutput:
        """Return logits (B, L, V); a mask is not needed, padding on the right is never seen."""
        del attention_mask
        return ModelOutput(self.lm_head(self.model(input_ids)))


class Classifier(nn.Module):
    """The trunk and a linear head on each sequence's last real token."""

    def __init__(self, config: DecoderConfig, num_classes: int) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.score = nn.Linear(config.hidden_size, num_classes, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> ModelOutput:
        """Return logits (B, classes)."""
        hidden_BLD = self.model(input_ids)
        if attention_mask is None:
            return ModelOutput(self.score(hidden_BLD[:, -1]))
        last = attention_mask.sum(1) - 1  # padding stands on the right
        rows = torch.arange(len(input_ids), device=input_ids.device)
        return ModelOutput(self.score(hidden_BLD[rows, last]))


def init_weights(model: nn.Module, seed: int) -> None:
    """Draw every matrix from N(0, 0.02^2), in order of names, and set every norm to 1.

    Names and shapes decide the values, so an equal model of transformers gets equal weights.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.ndim < 2:
                parameter.fill_(1.0)
            else:
                # Always on the CPU: the same numbers for every device.
                drawn = torch.randn(parameter.shape, generator=generator, device="cpu")
                parameter.copy_(drawn * INIT_STD)


def _rotation(length: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (L, head width) of positions 0 to L, in ``like``'s dtype."""
    # Angles in float32 whatever the model's dtype: bf16 can't tell position 257 from 258.
    powers = torch.arange(0, head_width, 2, device=like.device).float() / head_width
    positions = torch.arange(length, device=like.device).float()
    angles = torch.outer(positions, _ROTARY_BASE**-powers).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn pairs (i, i + half) of the last dimension by their position's angles."""
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines
