"""``read_deepspeed``: a DeepSpeed JSON as this project's settings."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from zenflow.deepspeed.file import loaded
from zenflow.deepspeed.schedule import DeepSpeedSchedule
from zenflow.deepspeed.settings import DeepSpeedSettings, read_content
from zenflow.errors import raise_violations

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

__all__ = ["DeepSpeedSchedule", "DeepSpeedSettings", "read_deepspeed"]


def read_deepspeed(
    source: str | PathLike[str] | Mapping[str, Any], *, steps_per_epoch: int | None = None
) -> DeepSpeedSettings:
    """Return the settings that a DeepSpeed configuration asks for.

    A window length of "auto", DeepSpeed's default, starts at 1 and is named in ``auto_knobs``.
    Give the optimizer a controller then; without one S stays 1.

    Keys that can't be honoured and change no result (buffers, buckets, logs) are named in one
    ``UserWarning``.

    Args:
        source: Path of the JSON file, or its content.
        steps_per_epoch: Optimizer steps in an epoch; needed where the file selects by epochs.
            Where it leaves that to DeepSpeed ("auto": once an epoch), columns are selected every
            100 steps without it, and a ``UserWarning`` says so.

    Raises:
        ConfigError: The file can't be read, a key is unknown, or a key would change results and
            can't be honoured; the message lists them all.
    """
    settings, reading = read_content(loaded(source), steps_per_epoch=steps_per_epoch)
    raise_violations("the DeepSpeed configuration", [words for _, words in reading.refused])
    for note in reading.notes:
        warnings.warn(note, stacklevel=2)
    if reading.unused:
        warnings.warn(
            "these DeepSpeed keys have no effect here (and change no result): "
            + ", ".join(reading.unused),
            stacklevel=2,
        )
    return settings
