"""Set-ups of published runs, built from their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from evidence.published.tables import build
from evidence.published.times import TIME_KEYS
from experiments.paper.setups import Alternative, AnySetup, HostPass, Phases, Setup
from sim.models.table import find_model
from zenflow.config import unknown_name
from zenflow.errors import ConfigError

Models = Mapping[str, Mapping[str, Any]]
"""Configurations by name, of models that the simulator's table lacks."""

_BESIDE = ("label", "source", "assumption", "quantity", "alternatives", *TIME_KEYS)
"""Keys of a row that are not of its set-up."""
_KINDS = (Setup, HostPass, Phases)
KEYS = (*_BESIDE, *dict.fromkeys(item.name for kind in _KINDS for item in fields(kind)))
"""Keys of all rows."""


def setup_of(row: Mapping[str, Any], models: Models, where: str) -> AnySetup:
    """Return a run's set-up: a step by its phases, a host's pass, or a model on a machine.

    Args:
        row: All that is said of a run.
        models: The group's own.
        where: The row's name, for errors.

    Raises:
        ConfigError: A key is unknown or missing, or its value is of another type.
    """
    if "forward" in row:
        return build(Phases, row, where, beside=_BESIDE)
    if "num_params" in row:
        return build(HostPass, row, where, beside=_BESIDE)
    config = config_of(row, models)
    whole = row if config is None else {**row, "config": config}
    return build(Setup, whole, where, beside=_BESIDE)


def config_of(row: Mapping[str, Any], models: Models) -> Mapping[str, Any] | None:
    """Return a row's configuration of its model; None is that of the simulator's table.

    A row's ``config`` is laid over the model's, be it of the group or of the table.
    """
    name = row.get("model", "")
    config = {**models.get(name, {}), **row.get("config", {})}
    if not config or "model_type" in config:
        return config or None
    return {**find_model(name)[1], **config}


def alternatives_of(
    row: Mapping[str, Any],
    models: Models,
    shared: Mapping[str, Mapping[str, float]],
    where: str,
) -> tuple[Alternative, ...]:
    """Return the other values that something unknown of a row may have.

    Args:
        row: All that is said of a run. An alternative is the text of a shared one, or a table of
            ``text`` and of ``values`` of the machine, of keys of the set-up, or both.
        models: The group's own.
        shared: Values of the machine, by text.
        where: The row's name, for errors.

    Raises:
        ConfigError: There is no such shared one, or a table has no text or changes nothing.
    """
    given = row.get("alternatives", ())
    return tuple(_alternative(each, row, models, shared, where) for each in given)


def _alternative(
    each: Any,
    row: Mapping[str, Any],
    models: Models,
    shared: Mapping[str, Mapping[str, float]],
    where: str,
) -> Alternative:
    if isinstance(each, str):
        if each not in shared:
            raise ConfigError(f"{where}: alternative {unknown_name(each, shared)}")
        return Alternative(text=each, values=shared[each])
    changes = {key: value for key, value in each.items() if key not in ("text", "values")}
    if "text" not in each or len(each) == 1:
        raise ConfigError(
            f"{where}: an alternative has text, and values of the machine or keys of the set-up; "
            f"got {each}"
        )
    return Alternative(
        text=each["text"],
        setup=setup_of({**row, **changes}, models, where) if changes else None,
        values=each.get("values", {}),
    )
