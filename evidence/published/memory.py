"""Published fits, failures and peaks of device memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from evidence.published.runs import published
from evidence.published.setups import config_of
from evidence.published.tables import (
    FOLDER,
    Entry,
    build,
    entries,
    groups_of,
    read_file,
    read_index,
    refuse_twice,
)
from experiments.paper.setups import Measurement, MemoryCase, Setup
from zenflow.errors import ConfigError

_UNITS = {"gigabytes": 1e9, "gibibytes": 2**30, "mebibytes": 2**20}
_OF_CASE = ("label", "fits", "scope", "source", "assumption")
_BESIDE = (*_OF_CASE, *_UNITS, "timed")


@functools.cache
def memory_cases(folder: Path = FOLDER / "memory") -> tuple[MemoryCase, ...]:
    """Return all cases in order.

    Args:
        folder: It has ``index.toml``, with the order of the other files.

    Raises:
        ConfigError: A file lacks something or says something unknown; the message has the place.
    """
    cases = []
    for name in read_index(folder)["files"]:
        for key, table in groups_of(read_file(folder / f"{name}.toml"), f"{name}.toml"):
            cases += [_case(entry) for entry in entries(table, f"{name}.toml, {key}")]
    refuse_twice(((case.label, case.source) for case in cases), folder.name)
    return tuple(cases)


def _case(entry: Entry) -> MemoryCase:
    row, where = entry.fields, entry.where
    timed = _timed(row, where)
    made: dict[str, Any] = {key: row[key] for key in _OF_CASE if key in row}
    if timed is not None:
        made = {"source": timed.source, "assumption": timed.assumption, **made}
    return build(
        MemoryCase, {**made, "peak": _peak(row, where), "setup": _setup(row, timed, where)}, where
    )


def _timed(row: Mapping[str, Any], where: str) -> Measurement | None:
    """Return the published time of the same run, where the case names one."""
    label = row.get("timed", False)
    if label is False:
        return None
    label = row["label"] if label is True else label
    found = [item for item in published().measurements if item.label == label]
    if len(found) != 1:
        raise ConfigError(f"{where}: timed must be the label of one timed row, got {label!r}")
    return found[0]


def _setup(row: Mapping[str, Any], timed: Measurement | None, where: str) -> Setup:
    """Return a case's set-up: the row's own keys, laid over its timed row's set-up."""
    outer: dict[str, Any] = {}
    if timed is not None:
        outer = {item.name: getattr(timed.setup, item.name) for item in fields(timed.setup)}
    setup = {**outer, **row}
    if timed is None and (config := config_of(row, {})) is not None:
        setup["config"] = config
    return build(Setup, setup, where, beside=_BESIDE)


def _peak(row: Mapping[str, Any], where: str) -> float | None:
    """Return the bytes of a published peak, None where only the outcome is published."""
    units = [unit for unit in _UNITS if unit in row]
    if len(units) > 1:
        raise ConfigError(f"{where}: a case has one peak, this one has {units}")
    return row[units[0]] * _UNITS[units[0]] if units else None
