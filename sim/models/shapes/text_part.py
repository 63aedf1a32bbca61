"""Text part: of a file with several models in it the language model's fields, and its family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sim.models.shapes.reading import Config, named
from sim.names import fold
from zenflow.errors import ConfigError

_NESTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields that hold a language model's own configuration."""
_BESIDE = ("vision_config", "audio_config", "vision_tower_config", "talker_config", "visual",
           "img_processor", "audio_processor", "embd_layer", "mm_vision_tower")  # fmt: skip
"""Fields that hold the configuration of what reads pictures or sound."""

ALIASES: Mapping[str, str] = {
    "gemma3_text_model": "gemma3_text",
    "gpt-sw3": "gpt2",
    "kimi_k2": "deepseek_v3",
    "stablelm_epoch": "stablelm",
    "RefinedWebModel": "falcon",
    "Yi": "llama",
    "aquila": "llama",
    "llava_llama": "llama",
    "llava_mistral": "mistral",
    "llava_qwen": "qwen2",
    "granite_docling_text": "granite",
    "ministral3_text": "ministral3",
    "paddleocr_vl_text": "ernie4_5",
    "phi3_v": "phi3",
    "phi4_multimodal": "phi3",
    "phi4mm": "phi3",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
"""Family whose shapes a `model_type` has under another name."""
_NESTED: Mapping[str, str] = {
    "fuyu": "persimmon", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text", "mllama": "mllama_text_model", "idefics2": "mistral",
    "idefics3": "llama", "llama4": "llama4_text", "llava": "llama", "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral", "paligemma": "gemma", "qwen2_5_vl": "qwen2", "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe", "smolvlm": "llama", "video_llava": "llama", "vipllava": "llama",
    "internvl": "qwen2", "aya_vision": "cohere2", "glm4v": "glm4", "glm4v_moe": "glm4_moe",
}  # fmt: skip
"""Family of a nested text part that does not name its own, by the model that it is part of."""
_CLASSES: Mapping[str, str] = {
    "DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3",
    "GPTNeoXForCausalLM": "gpt_neox", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text", "GemmaForCausalLM": "gemma", "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral", "MixtralForCausalLM": "mixtral", "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2", "Qwen2MoeForCausalLM": "qwen2_moe", "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}  # fmt: skip
"""Family of a class of transformers that `architectures` names, where `model_type` says none."""
_TIED_INSIDE = ("fast_vlm", "glm4", "glm_ocr", "hunyuan_vl", "llava", "minimax_m3_vl")
"""Beginnings of names of models whose outer "not tied" leaves the word to the inner part."""
_DEEPEST = 3
"""Number of parts around another that a file may have."""
_WHY_NOT: Mapping[str, str] = {
    "clip": "it compares pictures with texts, and is no language model",
    "zamba": "its layers share one block of attention, which is not counted yet",
    "zamba2": "its layers share blocks of attention, which is not counted yet",
    "nemotron-nas": "its layers differ by a list of blocks, which is not counted yet",
}
"""Reason for which a well-known `model_type` is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Language model's fields of a file."""

    kind: str
    """Family whose shapes it has."""
    config: Config
    is_nested: bool = False
    """Whether the fields stand in an object of their own, which may leave out usual values."""
    notes: tuple[str, ...] = ()
    """Sentences on what else the file has."""


def text_part(config: Config, families: Mapping[str, object], depth: int = 0) -> Part:
    """Return the language model's fields of a file.

    Args:
        config: Content of the file, or of a part of it.
        families: Names of the families that are known.
        depth: Number of parts around it.

    Raises:
        ConfigError: The family is not known, or the part that should have it is no object.
    """
    given = config.get("model_type")
    kind = given if isinstance(given, str) else ""
    name = next((name for name in _NESTS if config.get(name) is not None), None)
    if name is not None and kind not in families and kind not in _WHY_NOT:
        return _nested(config, kind, name, families, depth)
    own = _family(config, kind, families)
    if own is None:
        raise ConfigError(
            f"model_type {given!r:.60} is unknown; {_remedy(config, kind, families)}"
        )
    notes = [f"of {kind} the text part is counted{_left_out(config)}"] if _left_out(config) else []
    if own != kind:
        notes.append(f"model_type {given!r:.60} has the shapes of {own!r}")
    return Part(kind=own, config=config, notes=tuple(notes))


def _nested(
    config: Config, kind: str, name: str, families: Mapping[str, object], depth: int
) -> Part:
    """Return the part below a field of a file of this kind."""
    inner = config[name]
    if not isinstance(inner, Mapping) or depth == _DEEPEST:
        raise ConfigError(
            f"{name} must be an object with the language model's fields, got {inner!r:.60}: take "
            "the config.json that belongs to the weights"
        )
    part = dict(inner)
    if part.get("model_type") is None and kind in _NESTED and not _class_of(part):
        part["model_type"] = _NESTED[kind]
    tie = config.get("tie_word_embeddings")
    if tie is not None and not (kind.startswith(_TIED_INSIDE) and tie is False):
        part["tie_word_embeddings"] = tie
    if config.get("quantization_config") is not None:
        part["quantization_config"] = config["quantization_config"]
    try:
        found = text_part(part, families, depth + 1)
    except ConfigError as error:
        raise ConfigError(f"model_type {kind!r:.60}, {name}: {error}") from error
    own = f"of {kind} the text part is counted ({name}, {found.kind}){_left_out(config)}"
    others = [note for note in found.notes if not note.startswith("model_type")]
    return Part(kind=found.kind, config=found.config, is_nested=True, notes=(own, *others))


def _left_out(config: Config) -> str:
    """Return words for the parts that read pictures or sound; empty without any."""
    others = [name for name in _BESIDE if config.get(name) is not None]
    return f"; {named(others)} left out" if others else ""


def _family(config: Config, kind: str, families: Mapping[str, object]) -> str | None:
    """Return the family that a file names, by its `model_type` or its class; None for none."""
    if kind in families:
        return kind
    if kind in ALIASES:
        return ALIASES[kind]
    return None if kind in _WHY_NOT else _class_of(config)


def _class_of(config: Config) -> str | None:
    named_classes = config.get("architectures")
    names = named_classes if isinstance(named_classes, list) else []
    return next((_CLASSES[name] for name in _words(names) if name in _CLASSES), None)


def _words(values: list[Any]) -> Iterator[str]:
    yield from (value for value in values if isinstance(value, str))


def _remedy(config: Config, kind: str, families: Mapping[str, object]) -> str:
    """Return why a family is not known, another spelling of its name, or all names.

    Names are never guessed by likeness: another family's shapes would be taken without a word.
    """
    same = next((name for name in families if fold(name) == fold(kind)), None)
    if same is not None:
        return f"did you mean {same!r}?"
    why = _WHY_NOT.get(kind.removesuffix("_model").removesuffix("_text"))
    if why is None and config.get("is_encoder_decoder") is True:
        why = "it has an encoder and a decoder, and decoders alone are counted"
    known = f"known are {', '.join(families)}"
    if why is not None:
        return f"{why}; {known}"
    return (
        f"{known}, and no other family has their shapes. Where its tensors are those of one of "
        "them, give a copy of the file with that family's model_type"
    )
