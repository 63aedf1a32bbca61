"""Fields of a config.json that each family's shapes need, and the rules of their values.

A file may come from anywhere, so each field that is read is checked, and all violations are listed
at once. Fields that nothing here reads may hold anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sim.names import fold
from zenflow.config import raise_violations
from zenflow.errors import ConfigError

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Fields that a family reads."""

    required: tuple[tuple[str, ...], ...]
    """Fields that have to be there, each with the names that it may have."""
    optional: tuple[str, ...] = ()
    """Fields with a default, for which null stands as well."""
    switches: tuple[str, ...] = ()
    """Boolean fields, which are true or false."""
    shares: tuple[str, ...] = ()
    """Probability fields, from 0 to 1."""


_WIDTH, _LENGTH, _LAYERS, _FEW = 1 << 20, 1 << 24, 2000, 1 << 16
_MOST: Mapping[str, int] = {
    "ffn_dim": _LENGTH,
    "head_dim": _FEW,
    "hidden_size": _WIDTH,
    "intermediate_size": _LENGTH,
    "max_position_embeddings": _LENGTH,
    "moe_intermediate_size": _LENGTH,
    "n_embd": _WIDTH,
    "n_head": _FEW,
    "n_inner": _LENGTH,
    "n_layer": _LAYERS,
    "n_positions": _LENGTH,
    "num_attention_heads": _FEW,
    "num_experts": _FEW,
    "num_experts_per_tok": _FEW,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": _FEW,
    "num_local_experts": _FEW,
    "shared_expert_intermediate_size": _LENGTH,
    "type_vocab_size": _LENGTH,
    "vocab_size": _LENGTH,
    "word_embed_proj_dim": _WIDTH,
}
"""Largest value of each count, some times that of any published model: the deepest has 1,000
layers (DeepNet, Wang et al. 2022)."""

_SIZES = (("hidden_size",), ("num_attention_heads",), ("vocab_size",), ("num_hidden_layers",))
_EXPERTS = (("num_local_experts", "num_experts"), ("num_experts_per_tok",))
_GROUPED = ("head_dim", "num_key_value_heads")
_DECODER_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias")
_DECODER = Fields(
    required=(*_SIZES, ("intermediate_size",)), optional=_GROUPED, switches=_DECODER_SWITCHES
)
_DROPOUTS: Mapping[str, Mapping[str, float]] = {
    "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.1},
    "opt": {"dropout": 0.1, "attention_dropout": 0.0},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
}
"""Fields of a configuration that say how often outputs and scores are dropped, with defaults."""

LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Fields of transformers' configurations by which a model changes its logits behind the layer."""
_USUAL_SCALES = {"gemma2": {"final_logit_softcapping": 30.0}}
"""Defaults of `LOGIT_SCALES` in transformers, by family."""

FIELDS: Mapping[str, Fields] = {
    "mixtral": Fields(
        required=(*_SIZES, ("intermediate_size",), *_EXPERTS), optional=_GROUPED,
        switches=_DECODER_SWITCHES,
    ),
    "qwen2_moe": Fields(
        required=(
            *_SIZES, ("moe_intermediate_size", "intermediate_size"),
            ("shared_expert_intermediate_size",), *_EXPERTS,
        ),
        optional=_GROUPED,
        switches=_DECODER_SWITCHES,
    ),
    "gpt2": Fields(
        required=(
            ("n_embd",), ("num_attention_heads", "n_head"), ("vocab_size",), ("n_layer",),
            ("n_positions",),
        ),
        optional=("n_inner", "num_key_value_heads"),
        switches=("tie_word_embeddings",),
        shares=tuple(_DROPOUTS["gpt2"]),
    ),
    "opt": Fields(
        required=(*_SIZES, ("ffn_dim",), ("max_position_embeddings",)),
        optional=("word_embed_proj_dim", "num_key_value_heads"),
        switches=(
            "tie_word_embeddings", "do_layer_norm_before", "enable_bias",
            "layer_norm_elementwise_affine", "_remove_final_layer_norm",
        ),
        shares=tuple(_DROPOUTS["opt"]),
    ),
    "bert": Fields(
        required=(*_SIZES, ("intermediate_size",), ("max_position_embeddings",)),
        optional=("type_vocab_size", "num_key_value_heads"),
        switches=("tie_word_embeddings",),
        shares=tuple(_DROPOUTS["bert"]),
    ),
}  # fmt: skip
"""Fields of each family that reads others than a plain decoder of Llama's family."""


def check(config: Config, families: Mapping[str, object]) -> None:
    """Refuse a configuration of an unknown family, or with a field that is missing or can't be.

    Args:
        config: Content of the file.
        families: Names of the families that are known.

    Raises:
        ConfigError: It is one; all violations are listed.
    """
    kind = config.get("model_type")
    if kind not in families:
        raise ConfigError(f"model_type {kind!r:.60} is unknown; {_remedy(str(kind), families)}")
    raise_violations(f"the {kind} config", _violations(config, FIELDS.get(str(kind), _DECODER)))


def _remedy(kind: str, families: Mapping[str, object]) -> str:
    """Return another spelling of a family's name, or all names.

    Names are never guessed by likeness: another family's shapes would be taken without a word.
    """
    same = next((name for name in families if fold(name) == fold(kind)), None)
    if same is not None:
        return f"did you mean {same!r}?"
    return f"known are {', '.join(families)}, and no other family has their shapes"


def first_of(config: Config, *names: str) -> Any:
    """Return the first of these fields that is there, or None."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def dropouts_of(config: Config) -> tuple[bool, bool]:
    """Return whether a layer's outputs, and attention's scores, go through dropout.

    What a configuration does not say is transformers' default for its family.
    """
    names = _DROPOUTS.get(str(config.get("model_type")))
    if names is None:
        return False, False
    outputs, scores = (config.get(name, usual) > 0 for name, usual in names.items())
    return outputs, scores


def _violations(config: Config, fields: Fields) -> Iterator[str]:
    for names in fields.required:
        if first_of(config, *names) is None:
            yield (
                f"lacks {' or '.join(names)}, which decides shapes: take the config.json that "
                "belongs to the weights"
            )
    sound: dict[str, int] = {}
    for name in (*itertools.chain(*fields.required), *fields.optional):
        value: Any = config.get(name)
        if _is_count(value, _MOST[name]):
            sound[name] = value
        elif value is not None:
            yield f"{name} must be a whole number from 1 to {_MOST[name]:,}, got {value!r:.60}"
    has_own_width = "head_dim" in fields.optional and config.get("head_dim") is not None
    yield from _relations(sound, has_own_width=has_own_width)
    for name in fields.switches:
        if not isinstance(config.get(name, False), bool):
            yield f"{name} must be true or false, without quotes, got {config[name]!r:.60}"
    for name in fields.shares:
        if not _is_share(config.get(name, 0)):
            yield f"{name} must be a number from 0 to 1, got {config[name]!r:.60}"
    if not isinstance(config.get("quantization_config"), Mapping | None):
        yield f"quantization_config must be an object, got {config['quantization_config']!r:.60}"


def _relations(sound: Mapping[str, int], *, has_own_width: bool) -> Iterator[str]:
    """Yield violations between counts of which each by itself is right."""
    width, heads = (
        next((name for name in names if name in sound), None)
        for names in (("hidden_size", "n_embd"), ("num_attention_heads", "n_head"))
    )
    if width and heads and not has_own_width and sound[width] % sound[heads]:
        yield (
            f"{width} must be a multiple of {heads} where head_dim is not given, got "
            f"{sound[width]} and {sound[heads]}"
        )
    groups = sound.get("num_key_value_heads")
    if heads and groups and sound[heads] % groups:
        yield f"{heads} must be a multiple of num_key_value_heads, got {sound[heads]} and {groups}"
    experts = first_of(sound, "num_local_experts", "num_experts")
    active = sound.get("num_experts_per_tok")
    if experts and active and active > experts:
        yield f"num_experts_per_tok must be at most the {experts} experts, got {active}"


def scales_logits(config: Config) -> bool:
    """Return whether a model changes its logits behind the output layer."""
    known = {**_USUAL_SCALES.get(config["model_type"], {}), **config}
    return any(known.get(name) not in (None, 1.0) for name in LOGIT_SCALES)


def stored_as(config: Config) -> str | None:
    """Return the method by which a file's weights are quantised; None where they are not."""
    quantised = config.get("quantization_config")
    return None if not quantised else str(quantised.get("quant_method", "a method of its own"))


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
