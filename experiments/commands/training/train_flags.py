"""The flags of ``zenflow train``, made from the fields of its settings and of the update rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import click

from experiments.commands.command import given, option, with_flags
from experiments.commands.setting_flags import setting_flag
from experiments.training.parts.models.fine_tuning import FINE_TUNING, written
from experiments.training.settings.field import Setting, settings_of, written_settings
from experiments.training.settings.training import TrainSettings
from experiments.training.settings.tuning import TuningSettings
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError

DATA = "my_texts/"
"""Folder that stands for the user's own in commands that are printed."""
RULE = "Update rule"
_KNOBS = settings_of(ZenFlowConfig)
KNOB_NAMES = tuple(name for name in _KNOBS if name != "steps_per_epoch")  # the data says that one
_TUNING = written_settings(TuningSettings)
_OF_A_RUN = tuple(item for item in written_settings(TrainSettings) if item not in _TUNING)
_FIRST_OF = {
    "strategy": "Model and data",
    "sequence": "Batch and steps",
    "lr": "Optimizer",
    "gradients": "Precision and memory",
    "parallel": "Machine",
    "seed": "Seed, checkpoints and records",
}
"""Headings of the help, by the first of the fields below each."""


def _default(item: Setting) -> str:
    """Return the words on a setting's default in a run."""
    if item.default in (None, False):
        return ""
    default = item.default
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    if item.name in FINE_TUNING:
        shown += f"; of a model with weights {written(FINE_TUNING[item.name])}"
    return shown


def run_flags(
    names: Collection[str] | None = None, default: Callable[[Setting], str] = _default
) -> Iterator[Callable[[Any], Any]]:
    """Yield the flags of a run's settings.

    Args:
        names: Fields of ``TrainSettings``; None is all of them.
        default: Returns the words of the help on a setting's default.
    """
    section = ""
    for item in _OF_A_RUN:
        section = _FIRST_OF.get(item.name, section)
        if names is None or item.name in names:
            yield setting_flag(item, default=default(item), section=section)


knob_flags = with_flags(*(setting_flag(_KNOBS[name], section=RULE) for name in KNOB_NAMES))
"""Flags of the update rule alone."""

train_flags = with_flags(*run_flags(), knob_flags)
"""Flags of a run and of the update rule, as their fields follow."""

tuning_flags = with_flags(
    option(
        "--auto",
        is_flag=True,
        help="Choose k, S and selections while the run goes on: --controller both.",
        section="Tuning",
    ),
    *(setting_flag(item, section="Tuning") for item in _TUNING),
)
"""Flags of a run that chooses its own knobs, ``--auto`` first."""


def given_flags(context: click.Context) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings and the knobs that stand on the command line, and no others."""
    values = given(context)
    return _named(_OF_A_RUN, values), {n: v for n, v in values.items() if n in KNOB_NAMES}


def flags_of(settings: Mapping[str, Any], knobs: Mapping[str, Any]) -> list[str] | None:
    """Return the words of a command line that give these settings and knobs.

    They are None where a setting has no flag, as tables of a file have none.
    """
    known = settings_of(TrainSettings)
    if any(value and not known[name].is_written for name, value in settings.items()):
        return None
    items = [(known[name], value) for name, value in settings.items() if known[name].is_written]
    words = []
    for item, value in [*items, *((_KNOBS[name], value) for name, value in knobs.items())]:
        flag = item.key.replace("_", "-")
        if item.kind is bool:
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None or item.none is not None:
            written = item.none if value is None else item.written(value)
            parts = written if isinstance(written, list | tuple) else [written]
            words += [f"--{flag}", *map(str, parts)]
    return words


def given_tuning(context: click.Context) -> dict[str, Any]:
    """Return the settings of a tuned run that stand on the command line, and no others.

    Raises:
        ConfigError: Two flags name different controllers.
    """
    values = given(context)
    found = _named(_TUNING, values)
    if values.get("auto") and found.setdefault("controller", "both") != "both":
        raise ConfigError(
            f"--auto is --controller both, but --controller {found['controller']} is given: "
            "leave one of the two out"
        )
    return found


def _named(items: tuple[Setting, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    return {item.name: values[item.key] for item in items if item.key in values}
