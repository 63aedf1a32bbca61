"""Defaults of a run whose model has weights: those of fine-tuning, in one place.

A model without weights takes the defaults of ``TrainSettings``, which are for training from
scratch. Does not import torch.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from experiments.training.parts.models.named import comes_with_weights
from experiments.training.settings.training import DTYPES
from zenflow.errors import ConfigError

FINE_TUNING: Mapping[str, Any] = {
    "lr": 1e-5,
    "schedule": "linear",
    "warmup": 0.03,
    "betas": (0.9, 0.999),
    "weight_decay": 0.0,
    "epochs": 1.0,
}
"""Settings usual for fine-tuning all weights of a language model.

Betas, decay and the linear fall are those of transformers' TrainingArguments, the rise is that of
Stanford Alpaca's recipe; the rate is its 2e-5 halved, as larger models want it.
"""
_TRAINED_AS: Mapping[str, str] = {"float16": "bfloat16"}
"""Precision to train in where it isn't the checkpoint's: float16 would need loss scaling."""
_SAFETENSORS: Mapping[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def fine_tuning(model: str) -> dict[str, Any]:
    """Return the defaults for a model, by the names of settings; none if it has no weights."""
    return dict(FINE_TUNING) if comes_with_weights(model) else {}


def train_defaults(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults in force for a model: fine-tuning's, and the precision of its weights.

    Args:
        model: What ``--model`` names.
        given: Settings that a flag or a file says; these are left out.
    """
    made = fine_tuning(model)
    if made and "dtype" not in given:
        dtype = weights_dtype(model.removeprefix("own:"))
        made |= {} if dtype is None else {"dtype": dtype}
    if {"steps", "epochs"} & given.keys():
        made.pop("epochs", None)
    return {name: value for name, value in made.items() if name not in given}


def told_defaults(defaults: Mapping[str, Any]) -> str:
    """Return the defaults in force in a sentence.

    >>> told_defaults({"lr": 1e-5, "schedule": "linear", "betas": (0.9, 0.999), "epochs": 1.0})
    'A model with weights: lr 1e-5, schedule linear, betas 0.9 0.999, epochs 1; change with --lr, \
--schedule, --betas, --epochs'
    """
    words = ", ".join(f"{name} {written(value)}" for name, value in defaults.items())
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in defaults)
    return f"A model with weights: {words}; change with {flags}"


def written(value: Any) -> str:
    """Return a setting's value as a command has it.

    >>> written(1e-5), written((0.9, 0.999)), written(1.0)
    ('1e-5', '0.9 0.999', '1')
    """
    if isinstance(value, tuple):
        return " ".join(map(written, value))
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def weights_dtype(model: str) -> str | None:
    """Return the precision to train a model in: its weights' own, as far as a run has it.

    Args:
        model: A directory, or a name of the hub.

    Returns:
        One of ``DTYPES``; None if nobody says.

    Raises:
        ConfigError: The hub does not give the model's configuration.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        found = _stored_dtype(folder) or _config_dtype(folder / "config.json")
    else:
        found = _config_dtype(_hub_config(model))
    found = _TRAINED_AS.get(str(found), found)
    return found if found in DTYPES else None


def _stored_dtype(folder: Path) -> str | None:
    """Return the precision of most numbers of the first safetensors file."""
    try:
        file = folder / "model.safetensors"
        if not file.is_file():
            index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
            file = folder / min(index["weight_map"].values())
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        numbers: Counter[str] = Counter()
        for name, tensor in header.items():
            if name != "__metadata__":
                numbers[tensor["dtype"]] += prod(tensor["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None  # who loads the weights says what is wrong with them
    return _SAFETENSORS.get(numbers.most_common(1)[0][0]) if numbers else None


def _config_dtype(path: Path | None) -> str | None:
    """Return the precision that a config.json names, of a model of several parts its text's."""
    try:
        config = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
        parts = (config, config.get("text_config") or {})
        names = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
        return next((str(name).removeprefix("torch.") for name in names if name), None)
    except (OSError, ValueError, AttributeError):
        return None  # who loads the model says what is wrong with it


def _hub_config(name: str) -> Path | None:
    """Return the hub's config.json of a model, from the cache if it is there."""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError:
        return None  # who looks for the model says what to install
    try:
        found = try_to_load_from_cache(name, "config.json")
        return Path(found if isinstance(found, str) else hf_hub_download(name, "config.json"))
    except (OSError, ValueError, RuntimeError) as error:  # the hub's own errors among them
        lines = str(error).strip().splitlines()
        raise ConfigError(
            f"the configuration of {name!r} can't be loaded ({lines[0] if lines else error!r}): "
            "check --model and the network, or give a directory that save_pretrained wrote"
        ) from error
