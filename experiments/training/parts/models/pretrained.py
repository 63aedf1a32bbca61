"""The model and tokenizer that ``--model`` names: a size, a config.json, a directory, a hub name.

A size gives a Llama-style decoder over bytes: transformers' class where the extra ``hf`` is
installed, our own of ``experiments.training.parts.models.decoder`` elsewhere, with the same
weights to start from. A directory that a run has written loads into either; the rest needs the
extra. ``own:SIZE`` and ``own:DIRECTORY`` keep to our own class anyway.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model as load_model_file
from safetensors.torch import save_model
from torch import Tensor, nn

from experiments.training.parts.data.tokens import (
    PADDING,
    ByteTokenizer,
    PretrainedTokenizer,
    TextTokenizer,
)
from experiments.training.parts.models.decoder import (
    Classifier,
    DecoderConfig,
    LanguageModel,
    init_weights,
)
from experiments.training.parts.models.named import WEIGHT_FILES, NamedModel, has_weights
from experiments.training.settings.sizes import MODEL_SIZES, NUM_BYTE_TOKENS
from experiments.training.settings.training import TrainSettings
from sim.models.positions import check_sequence
from zenflow.errors import ConfigError, naming_file

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "tokenizer.model")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a directory holds a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(found: NamedModel) -> TextTokenizer:
    """Return the tokenizer that belongs to the model: bytes for those made from scratch.

    Raises:
        ConfigError: The tokenizer can't be loaded.
    """
    if found.kind == "size" or found.own:
        return ByteTokenizer()
    folder = Path(found.name).parent if found.kind == "config" else Path(found.name)
    if found.kind != "hub" and not has_tokenizer(folder):
        return ByteTokenizer()
    transformers = _transformers()
    try:
        location = found.name if found.kind == "hub" else str(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(location)
        config = transformers.AutoConfig.from_pretrained(found.name)
    except (OSError, ValueError) as error:
        raise _unloadable(found, "tokenizer", error) from error
    return PretrainedTokenizer(tokenizer, config.get_text_config().vocab_size)


def load_model(
    found: NamedModel, settings: TrainSettings, tokenizer: TextTokenizer, num_classes: int
) -> nn.Module:
    """Return the model in float32, with pretrained weights where there are any.

    Args:
        found: What ``find_model`` returned.
        settings: Of these the seed and the sequence are used.
        tokenizer: What ``load_tokenizer`` returned.
        num_classes: Classes of the head; 0 asks for a language model.

    Raises:
        ConfigError: The model can't be loaded, or can't take such long sequences.
    """
    if found.kind == "size":
        shape = DecoderConfig.of_size(MODEL_SIZES[found.name], NUM_BYTE_TOKENS)
        if found.own:
            model = _decoder(shape, num_classes)
        else:
            model = _transformers_llama(shape, settings.sequence, num_classes)
        init_weights(model, settings.seed)
        return model
    if found.own:
        return _own_directory(Path(found.name), settings.seed, num_classes)
    transformers = _transformers()
    family = "AutoModelForSequenceClassification" if num_classes else "AutoModelForCausalLM"
    auto = getattr(transformers, family)
    head = {"num_labels": num_classes} if num_classes else {}
    torch.manual_seed(settings.seed)  # heads that no checkpoint holds are drawn from here
    try:
        config = transformers.AutoConfig.from_pretrained(found.name, **head)
        _check_length(found, config, settings.sequence)
        _check_bytes(found, config, tokenizer)
        if has_weights(found):
            model = auto.from_pretrained(found.name, config=config)
        else:
            model = auto.from_config(config)
    except ConfigError:  # which is a ValueError
        raise
    except (OSError, ValueError) as error:
        raise _unloadable(found, "model", error) from error
    if num_classes and model.config.pad_token_id is None:
        model.config.pad_token_id = PADDING
    model.config.use_cache = False
    loaded: nn.Module = model.float()
    return loaded


def recompute_activations(model: nn.Module, name: str) -> None:
    """Let backward recompute each layer's activations.

    Raises:
        ConfigError: The model can't.
    """
    if isinstance(model, LanguageModel | Classifier):
        model.model.recomputes = True
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(f"{name} can't recompute activations: leave out --checkpointing")
    settings = {"use_reentrant": False}
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:  # the name since transformers 5
        enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(  # type: ignore[operator] # transformers' own
            gradient_checkpointing_kwargs=settings
        )


def save_model_folder(
    model: nn.Module,
    tokenizer: TextTokenizer,
    folder: Path,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the weights and config.json so that transformers, and ``--model``, load them.

    Args:
        model: What is written.
        tokenizer: What belongs to it.
        folder: Where it goes.
        state: Its state dict, where its own tensors are spread over ranks.

    Raises:
        OSError: They can't be written; an earlier folder is then as it was.
    """
    temporary = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with naming_file(folder, temporary):
            temporary.mkdir(parents=True)
            _save_model(model, tokenizer, temporary, state)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
    except SafetensorError as error:
        raise OSError(f"{folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _WithState(nn.Module):
    """Value that ``save_model`` takes in a model's place."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._state = state

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return dict(self._state)


def _save_model(
    model: nn.Module, tokenizer: TextTokenizer, folder: Path, state: Mapping[str, Tensor] | None
) -> None:
    if isinstance(model, LanguageModel | Classifier):
        config = _llama_json(model)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        held = model if state is None else _WithState(state)
        save_model(held, str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    transformers_model: Any = model
    transformers_model.save_pretrained(folder, state_dict=state)
    if isinstance(tokenizer, PretrainedTokenizer):
        tokenizer.save(folder)


def _decoder(config: DecoderConfig, num_classes: int) -> nn.Module:
    return Classifier(config, num_classes) if num_classes else LanguageModel(config)


def _own_directory(folder: Path, seed: int, num_classes: int) -> nn.Module:
    """Return our class with the weights of a run's export; a head that it lacks is drawn."""
    weights = folder / WEIGHT_FILES[0]
    if not weights.is_file():
        raise ConfigError(f"{folder} holds no {weights.name}: give a run's model/ directory")
    config = DecoderConfig.of_json(json.loads((folder / "config.json").read_text()))
    model = _decoder(config, num_classes)
    init_weights(model, seed)
    load_model_file(model, str(weights), strict=not num_classes)
    return model


def _transformers_llama(shape: DecoderConfig, sequence: int, num_classes: int) -> nn.Module:
    transformers = _transformers()
    config = transformers.LlamaConfig(
        **shape.to_dict(),
        max_position_embeddings=max(sequence, 2048),
        pad_token_id=PADDING,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        **({"num_labels": num_classes} if num_classes else {}),
    )
    family = "LlamaForSequenceClassification" if num_classes else "LlamaForCausalLM"
    made: nn.Module = getattr(transformers, family)(config)
    return made


def _llama_json(model: LanguageModel | Classifier) -> dict[str, Any]:
    config = model.config.to_dict() | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "pad_token_id": PADDING,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if isinstance(model, Classifier):
        names = {str(index): f"LABEL_{index}" for index in range(model.score.out_features)}
        config["architectures"] = ["LlamaForSequenceClassification"]
        config["id2label"] = names
    return config


_ROTARY = ("rope_theta", "rope_parameters", "rope_scaling")
"""Fields of configurations with rotary positions, which go on beyond those that were trained."""


def _check_length(found: NamedModel, config: Any, sequence: int) -> None:
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is None or sequence <= longest:
        return
    if any(getattr(text, name, None) is not None for name in _ROTARY):
        for note in check_sequence(found.name, text.to_dict(), sequence):
            warnings.warn(note, stacklevel=2)
        return
    raise ConfigError(
        f"{found.name} takes at most {longest} positions, but --sequence is {sequence}: lower it"
    )


def _check_bytes(found: NamedModel, config: Any, tokenizer: TextTokenizer) -> None:
    rows = config.get_text_config().vocab_size
    if isinstance(tokenizer, ByteTokenizer) and rows < NUM_BYTE_TOKENS:
        raise ConfigError(
            f"{found.name} has no tokenizer beside it, so text is read as bytes, which takes a "
            f"vocab_size of at least {NUM_BYTE_TOKENS}, but its is {rows}: save the tokenizer "
            "there too, or raise vocab_size"
        )


def _unloadable(found: NamedModel, what: str, error: Exception) -> ConfigError:
    lines = str(error).strip().splitlines()
    return ConfigError(
        f"the {what} of {found.name!r} can't be loaded ({lines[0] if lines else error!r}): give "
        f"a size ({', '.join(MODEL_SIZES)}), a config.json, a directory that save_pretrained "
        "wrote, or a hub name that this machine can reach"
    )


def _transformers() -> Any:
    import transformers  # an optional extra, and seconds to import

    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    return transformers
