"""Flags of a request: a machine, a workload and a strategy, shared by the predicting commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import click

from experiments.commands.command import option, with_flags
from experiments.commands.setting_flags import setting_flag
from experiments.request.request import Request
from experiments.training.settings.field import settings_of

_MOST_DRAWS = 10_000
"""Most draws of a machine's uncertain figures: more move an interval by nothing."""


def request_flags(
    *,
    requires: Collection[str] = (),
    without: Collection[str] = (),
    defaults: Mapping[str, str] | None = None,
) -> Callable[[Any], Any]:
    """Return the decorator that gives a command a flag for each field of `Request`.

    Args:
        requires: Fields that have to be given.
        without: Fields that the command does not ask for.
        defaults: Words on what holds where a field is not given, if that isn't its default.
    """
    return with_flags(
        *(
            setting_flag(
                item,
                default=(defaults or {}).get(item.name, str(item.default or "")),
                required=item.name in requires,
            )
            for item in settings_of(Request).values()
            if item.name not in without
        )
    )


def draws_flag(default: int) -> Callable[[Any], Any]:
    """Return the decorator that gives a command ``--draws``."""
    return option(
        "--draws", type=click.IntRange(min=0, max=_MOST_DRAWS), default=default,
        show_default=True, section="Prediction",
        help="Draws of uncertain figures; 0: no interval.",
    )  # fmt: skip
