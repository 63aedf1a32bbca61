"""A run's settings as a file that ``zenflow train --config`` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from experiments.training.settings.field import settings_of
from experiments.training.settings.training import TrainSettings


def file_content(settings: Mapping[str, Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's keys and values for settings by their fields' names, in SI units.

    What None stands for is left out, unless the setting has a word for it.
    """
    known = settings_of(TrainSettings)
    content = {}
    for name, value in settings.items():
        written = known[name].none if value is None else known[name].written(value)
        if written is not None and written != {}:
            content[known[name].key] = list(written) if isinstance(written, tuple) else written
    return {**content, "zenflow": dict(knobs)}


def toml_of(content: Mapping[str, Any]) -> str:
    """Return a file's content as TOML, tables behind the other keys; None is left out."""
    tables = {name: value for name, value in content.items() if isinstance(value, Mapping)}
    lines = _lines({name: value for name, value in content.items() if name not in tables})
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    # JSON's strings, numbers, booleans and lists are TOML's too, but for pairs of \u escapes.
    return [
        f"{name} = {json.dumps(value, ensure_ascii=False)}"
        for name, value in table.items()
        if value is not None
    ]
