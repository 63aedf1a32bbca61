"""``read_deepspeed``: a DeepSpeed JSON as this project's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zenflow.config import ZenFlowConfig
from zenflow.deepspeed.schedule import DeepSpeedSchedule
from zenflow.deepspeed.settings import DeepSpeedSettings, settings_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

__all__ = ["DeepSpeedSchedule", "DeepSpeedSettings", "read_deepspeed"]


def read_deepspeed(
    source: str | PathLike[str] | Mapping[str, Any], *, steps_per_epoch: int | None = None
) -> DeepSpeedSettings:
    """Return what a DeepSpeed configuration says.

    A window length of "auto", DeepSpeed's default, starts at 1 and is named in ``auto_knobs``:
    hand the optimizer a controller, else it stays there.

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
    return settings_of(source, ZenFlowConfig.preset, steps_per_epoch=steps_per_epoch)
