"""Models: configurations by name, or from a config.json. No network.

``sim/data/models`` holds, for each named model, the fields of its public Hugging Face config that
decide its shapes, its repository, and others whose models have the same shapes.
"""

from __future__ import annotations

import functools
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from sim.models.families import read_model
from sim.models.file import read_config
from sim.names import fold, nearest
from zenflow.errors import ConfigError


def model_names() -> list[str]:
    """Return the names of all models that need no file.

    Examples:
        >>> "llama-2-7b" in model_names()
        True
    """
    return list(_named())


def find_model(name_or_path: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """Return a model's name and its configuration.

    Args:
        name_or_path: A named model whatever its case and separators, also as its Hugging Face id
            (``Qwen/Qwen2.5-0.5B``); or the path of a config.json, or of a directory with one.
            A name comes before a path: write ``./gpt2`` for a directory of a model's name.

    Raises:
        ConfigError: There is no such model or file, or the file is not a model's configuration.

    Examples:
        >>> name, config = find_model("Qwen/Qwen2.5-0.5B")
        >>> name, config["hidden_size"]
        ('qwen2.5-0.5b', 896)
    """
    if isinstance(name_or_path, str):
        found = _known().get(fold(name_or_path))
        if found is not None:
            return found, json.loads(_named()[found])
    path = Path(name_or_path)
    if not os.path.exists(path):  # Path.exists raises where a name is too long
        raise ConfigError(
            f"there is no model {str(name_or_path)!r}, and no such file: "
            f"{nearest(str(name_or_path), _known())}, or give the path of a config.json"
        )
    file = path / "config.json" if path.is_dir() else path
    # `resolve`, so that "." has a name too.
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return name, _read(file)


def hub_name(name_or_path: str) -> str:
    """Return a named model's id on the Hugging Face hub; any other name unchanged.

    >>> hub_name("llama_3.1_8b_instruct"), hub_name("llama-3.1-8b"), hub_name("./mine")
    ('meta-llama/Llama-3.1-8B-Instruct', 'meta-llama/Llama-3.1-8B', './mine')
    """
    name = _known().get(fold(name_or_path))
    if name is None:
        return name_or_path
    own, *others = _repositories(name)
    asked = fold(name_or_path)
    return next((r for r in others if asked in (fold(r), fold(r.rsplit("/", 1)[-1]))), own)


def _read(file: Path) -> dict[str, Any]:
    """Return a file's configuration, after checking that its shapes can be told."""
    config = read_config(file)
    try:
        read_model(config)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return config


@functools.cache
def _named() -> dict[str, str]:
    """Return the text of each named model's file, by name in order."""
    folder = resources.files("sim").joinpath("data", "models")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".json"): file.read_text(encoding="utf-8")
        for file in files
        if file.name.endswith(".json")
    }


@functools.cache
def _known() -> dict[str, str]:
    """Return the models' names by what they may be called, folded."""
    known = {fold(name): name for name in _named()}
    for name in _named():
        for repository in _repositories(name):
            known[fold(repository)] = name
            known[fold(repository.rsplit("/", 1)[-1])] = name
    return known


def _repositories(name: str) -> list[str]:
    """Return a named model's repositories on the Hugging Face hub, its own first."""
    config = json.loads(_named()[name])
    return [config["_name_or_path"], *config.get("same_shapes", ())]
