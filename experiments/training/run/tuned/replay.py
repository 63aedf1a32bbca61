"""``zenflow train --replay FILE``: a tuned run again, from its decisions file alone.

A run's weights depend on its settings and on the knobs in force at each step, and the file has
both. Times may differ, and whatever a controller made of them is not asked again. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from autotune.decisions.file import read_decisions
from experiments.training.settings.training import PACES, TrainSettings
from zenflow.errors import ConfigError

HARMLESS = frozenset(
    {
        "link", "host_threads", "save_every", "save_minutes", "eval_every", "eval_batches",
        "timeline_steps", "parallel", "bind_cores", "memory_check",
    }
)  # fmt: skip
"""Settings that a replay may change: no weight depends on them, but for rounding over ranks.

Under compact host state weights depend on `PACES`."""


def replay_settings(path: Path, changes: Mapping[str, Any]) -> TrainSettings:
    """Return the settings of the run that a decisions file tells of.

    Args:
        path: The file of a finished run.
        changes: Settings and knobs that stand on the command line.

    Raises:
        ConfigError: The file is damaged or unfinished, or a change would make it another run.
    """
    refuse_changes(path, [name for name in changes if name not in HARMLESS])
    return replayed_run(path, read_decisions(path).header.settings, changes)


def replayed_run(
    path: Path, saved: Mapping[str, Any], changes: Mapping[str, Any]
) -> TrainSettings:
    """Return the settings of a run that is repeated.

    Args:
        path: Decisions file of the run.
        saved: Settings that the run had.
        changes: Settings that stand on the command line, of `HARMLESS`.

    Raises:
        ConfigError: A version of its own wrote the file, or a change would make it another run.
    """
    if saved.get("knobs", {}).get("host_state") == "compact":
        refuse_changes(path, [name for name in changes if name in PACES])
    unknown = sorted(saved.keys() - {item.name for item in fields(TrainSettings)})
    if unknown:
        raise ConfigError(
            f"{path}, line 1: the run had settings that this version of zenflow does not know "
            f"({', '.join(unknown)}): replay it with the version that wrote it"
        )
    return TrainSettings.from_dict({**saved, **changes, "replay": str(path.resolve())})


def refuse_changes(path: Path, changes: Collection[str]) -> None:
    """Refuse flags that would make another run of the one that a decisions file repeats.

    Raises:
        ConfigError: There are some.
    """
    if changes:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changes)
        raise ConfigError(
            f"--replay repeats the run in {path} as it was, and {flags} would make another one "
            "of it: leave that out, or start a run of its own"
        )
