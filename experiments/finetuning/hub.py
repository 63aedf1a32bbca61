"""The Hugging Face hub: a repository at the start of a run, and its model in the end.

The Trainer's own push would send the run's record and lock too, which name paths of this machine.
"""

from __future__ import annotations

from pathlib import Path

from autotune.decisions.file import DECISIONS
from experiments.finetuning.record import RECORD
from experiments.training.parts.files.runlock import LOCK
from zenflow.errors import ConfigError, ZenFlowError

_KEPT_HERE = ["checkpoint-*", "runs/*", RECORD, DECISIONS, LOCK, "training_args.bin"]
"""Files of the run and not of the model: checkpoints, trackers' logs, record, decisions, lock."""


def open_repository(name: str) -> None:
    """Make the repository of a model, if there is none.

    Raises:
        ConfigError: The hub refuses, or can't be reached.
    """
    from huggingface_hub import create_repo

    try:
        create_repo(name, exist_ok=True)
    except Exception as error:  # the client has errors of several packages
        raise ConfigError(
            f"--push-to-hub {name}: the model can't be pushed there ({error}): log in with "
            "`hf auth login`, check the network, or leave it out"
        ) from error


def push(name: str, folder: Path) -> str:
    """Push a model with its tokenizer and card, and return the address of the repository.

    Args:
        name: Of the repository.
        folder: Where the model is.

    Raises:
        ZenFlowError: The hub refuses, or can't be reached.
    """
    from huggingface_hub import constants, upload_folder

    try:
        upload_folder(repo_id=name, folder_path=str(folder), ignore_patterns=_KEPT_HERE)
        return f"{constants.ENDPOINT}/{name}"
    except Exception as error:  # as above
        raise ZenFlowError(
            f"the model is in {folder}, but can't be pushed to {name} ({error}): push it with "
            f"`hf upload {name} {folder}` once that is mended"
        ) from error
