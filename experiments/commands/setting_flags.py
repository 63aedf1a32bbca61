"""Flags from settings: what click is told of a dataclass's field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from experiments.commands.command import option
from experiments.commands.flag_types import PATH, Gigabytes, LinkRates, Memory, NumberOr, Word
from experiments.request.words import GIB
from experiments.training.settings.field import Setting


def setting_flag(
    item: Setting, *, default: str = "", section: str = "", **how: Any
) -> Callable[[Any], Any]:
    """Return the option of a setting, which is None where nobody gives it.

    Args:
        item: The setting.
        default: Words of the help on what holds then.
        section: Heading of the help, where the setting has none of its own.
        how: More of click's options.
    """
    how |= {"help": _help(item, default), "section": item.section or section}
    names = [name.replace("_", "-") for name in (item.key, *item.aliases)]
    if item.kind is bool:
        return option(*(f"--{name}/--no-{name}" for name in names), default=None, **how)
    flags = [f"--{name}" for name in names]
    return option(*flags, type=_type(item), bare=item.bare, **how)


def _help(item: Setting, default: str) -> str:
    """Return a field's text in the words of a command line."""
    words = item.help.replace("``", "`").replace("None is", "default:")
    if item.known:
        words += f" One of {', '.join(item.known)}."
    return f"{words}  [default: {default}]" if default else words


def _type(item: Setting) -> Any:
    if item.choices:
        return click.Choice(item.choices)
    if item.none is not None:
        return NumberOr(item.kind, item.none)
    if item.unit != 1.0:
        return LinkRates() if item.kind is tuple else Memory() if item.unit == GIB else Gigabytes()
    if item.kind is Path:
        return PATH
    if item.parse is not None and item.kind is not str:  # names are looked up where they are used
        return Word(item.parse, item.metavar or "INTEGER")
    return (float, float) if item.kind is tuple else item.kind
