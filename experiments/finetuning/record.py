"""Record of a fine-tuning beside its model: settings, the rows' hash, the result."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.finetuning.settings import FineTuning
from experiments.output.files import write_json
from zenflow.errors import CheckpointError, ConfigError

RECORD = "finetune.json"
"""File of a run's settings and result, in its folder."""
_LAST_FILE = "trainer_state.json"
"""The file of a checkpoint that the Trainer writes last."""


def write_record(folder: Path, settings: FineTuning, digest: str) -> None:
    """Write the settings of a run that begins.

    Args:
        folder: The run's folder.
        settings: Its settings.
        digest: Hash of the rows that it trains on.
    """
    write_json(folder / RECORD, {**settings.to_dict(), "rows_digest": digest})


def add_result(folder: Path, figures: Mapping[str, Any]) -> None:
    """Put the figures of a run that has ended into its record."""
    write_json(folder / RECORD, {**_read(folder), "result": dict(figures)})


def recorded_settings(folder: Path) -> FineTuning:
    """Return the settings of the run in a folder.

    Raises:
        ConfigError: The folder holds none.
    """
    try:
        return FineTuning.from_dict(_read(folder))
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / RECORD} is not what a run of this version wrote ({error}): start it anew"
        ) from error


def check_same_rows(folder: Path, digest: str) -> None:
    """Refuse to go on with other rows than the run began with.

    Raises:
        CheckpointError: They are others.
    """
    if _read(folder).get("rows_digest") != digest:
        raise CheckpointError(
            f"the rows to train on are not those that the run in {folder} began with: restore "
            "data, tokenizer and chat template, or start a new run"
        )


def last_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint of a run, and remove those whose save was cut off.

    The Trainer would keep one of these for the newest, and remove what it saves next.

    Raises:
        CheckpointError: There is no whole one.
    """
    found = {}
    for path in folder.glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-\d+", path.name) is None:
            continue
        if (path / _LAST_FILE).is_file():
            found[int(path.name.partition("-")[2])] = path
        else:
            shutil.rmtree(path)
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {folder}: the run ended before its first save, or was "
            "told --no-checkpoint; start it anew with another --out"
        )
    return found[max(found)]


def _read(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--resume needs the folder of a run of zenflow finetune, but {path} can't be read "
            f"({error.strerror}): check the path"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}): restore it from a copy") from error
    return dict(found)
