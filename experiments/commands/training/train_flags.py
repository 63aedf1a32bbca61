"""The flags of ``zenflow train``, made from the fields of its settings and of the update rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from experiments.commands.command import given, with_flags
from experiments.commands.flag_types import Gigabytes, LinkRates, NumberOr
from experiments.training.parts.models.fine_tuning import FINE_TUNING, written
from experiments.training.settings.field import Setting, settings_of, written_settings
from experiments.training.settings.training import TrainSettings
from experiments.training.settings.tuning import TuningSettings
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError

_KNOB_HELP: Mapping[str, str] = {
    "topk_ratio": "Share of columns that the device updates, k.",
    "select_strategy": "Unit of --select-interval.",
    "select_interval": "Steps or epochs between two selections; 0: only the first.",
    "update_interval": "Steps between two uploads of a deferred column, S.",
    "overlap_step": "Run the host's updates behind the following steps.",
    "update_rule": "What becomes of columns on the host.",
    "queue_depth": "Gradients that wait on the host, q.",
    "full_warm_up_rounds": "First steps that defer nothing.",
    "importance_decay": "Memory of the columns' scores.",
    "hysteresis": "Lead that a column needs to be selected.",
    "min_split_elements": "Smaller parameters stay on the device whole.",
    "block_elements": "Most elements in a block.",
}
KNOB_NAMES = tuple(_KNOB_HELP)

_KNOBS = settings_of(ZenFlowConfig)
_TUNING = written_settings(TuningSettings)
_OF_A_RUN = tuple(item for item in written_settings(TrainSettings) if item not in _TUNING)


def _flag(item: Setting, words: str) -> Callable[[Any], Any]:
    name = item.key.replace("_", "-")
    if item.kind is bool:
        return click.option(f"--{name}/--no-{name}", default=None, help=words)
    return click.option(f"--{name}", type=_type(item), default=None, help=words)


def _type(item: Setting) -> Any:
    if item.choices:
        return click.Choice(item.choices)
    if item.none is not None:
        return NumberOr(item.kind, item.none)
    if item.kind is tuple:
        return (float, float) if item.unit == 1.0 else LinkRates()
    return item.kind if item.unit == 1.0 else Gigabytes()


def _with_default(item: Setting) -> str:
    if item.default in (None, False):
        return item.help
    default = item.default
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    if item.name in FINE_TUNING:
        shown += f"; of a model with weights {written(FINE_TUNING[item.name])}"
    return f"{item.help}  [default: {shown}]"


knob_flags = with_flags(*(_flag(_KNOBS[name], words) for name, words in _KNOB_HELP.items()))
"""Flags of the update rule alone."""

train_flags = with_flags(*(_flag(item, _with_default(item)) for item in _OF_A_RUN), knob_flags)
"""Flags of a run and of the update rule, as their fields follow."""

tuning_flags = with_flags(
    click.option(
        "--auto",
        is_flag=True,
        help="Choose k, S and selections while the run goes on: --controller both.",
    ),
    *(_flag(item, item.help) for item in _TUNING),
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
    if any(value and not known[name].help for name, value in settings.items()):
        return None
    items = [(known[name], value) for name, value in settings.items() if known[name].help]
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
