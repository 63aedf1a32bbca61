"""File: the text of a config.json, and words on any other file that is given in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sim.models.shapes.reading import named
from zenflow.errors import ConfigError

_REMEDY = "give the config.json beside a model's weights"
_STARTS = (
    (b"GGUF", "a GGUF file of llama.cpp: its model is to be found under the name of the original"),
    (b"PK\x03\x04", "an archive, as PyTorch saves weights"),
    (b"\x80", "a pickle, as PyTorch saves weights"),
    (b"\x1f\x8b", "compressed"),
    (b"\x89HDF", "an HDF5 file"),
    (b"version https://git-lfs", "a pointer of Git LFS: fetch the file itself with git lfs pull"),
    (b"<", "a page of HTML or XML, as a download that was refused leaves"),
)
"""First bytes of files that people give in place of a config.json, and words for each."""
_FIELDS = (
    ("peft_type", "the file of an adapter: give the config.json of base_model_name_or_path"),
    ("weight_map", "an index of weights' files"),
    ("tokenizer_class", "the file of a tokenizer"),
    ("_class_name", "the file of a diffusion model's part"),
    ("n_layers", "a params.json as Meta or Mistral publish one: give the config.json of the same "
     "model on the Hugging Face hub"),
    ("decoder_start_token_id", "the file of generation's settings"),
    ("eos_token_id", "the file of generation's settings"),
    ("zero_optimization", "a DeepSpeed file: `zenflow convert` reads it"),
)  # fmt: skip
"""Fields of files without `model_type` that people give in its place, and words for each."""
_MOST_BYTES = 16 << 20


def read_config(file: Path) -> dict[str, Any]:
    """Return the object that a config.json holds.

    Raises:
        ConfigError: It can't be read, or is something else; the message says what.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file} can't be read ({error.strerror}): {_remedy(file)}") from error
    what = _what_else(content)
    if what is not None:
        raise ConfigError(f"{file} is {what}: {_REMEDY}")
    try:
        # Editors of Windows put a mark in front, which is no part of the text.
        config = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested without end
        raise ConfigError(f"{file} is not JSON ({error}): {_REMEDY}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold an object, got {config!r:.60}: {_REMEDY}")
    if not isinstance(config.get("model_type"), str) and not config.get("architectures"):
        known = next((words for name, words in _FIELDS if name in config), None)
        seems = "" if known is None else f", and seems to be {known}"
        raise ConfigError(
            f"{file} lacks model_type, a family's name such as 'llama'{seems}: give a model's "
            "config.json"
        )
    return config


def _what_else(content: bytes) -> str | None:
    """Return words for a file of another kind, by its first bytes; None where it may be text."""
    if not content.strip():
        return "empty"
    found = next((words for start, words in _STARTS if content.startswith(start)), None)
    # Safetensors begin with the length of their header, which is JSON.
    if found is None and content[8:9] == b"{" and b"\0" in content[:8]:
        return "a safetensors file of weights"
    if found is None and len(content) > _MOST_BYTES:
        return f"larger than {_MOST_BYTES >> 20} MiB, which no config.json is"
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object each of whose keys stands there once, or always with one value."""
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made and made[name] != value:
            raise ValueError(f"the key {name!r} stands there twice, with different values")
        made[name] = value
    return made


def _remedy(file: Path) -> str:
    """Return the remedy for a file that is not there."""
    folder = file.parent
    if file.name != "config.json" or not folder.is_dir():
        return "give a model's config.json, or a directory that holds one"
    inside = list(_models_in(folder))
    if inside:
        return f"its directory has models in {named(inside)}: give one of them"
    return "give a model's config.json, or a directory that holds one"


def _models_in(folder: Path) -> Iterator[str]:
    """Yield folders in a folder that hold a config.json, three at most."""
    try:
        found = sorted(each.parent.name for each in folder.glob("*/config.json"))
    except OSError:
        found = []
    yield from found[:3]
