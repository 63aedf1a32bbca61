"""Published times of others' runs, by groups of rows with one heading.

`evidence/data/published/index.toml` says what the keys of the files mean.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from evidence.published.setups import KEYS, alternatives_of, setup_of
from evidence.published.tables import (
    FOLDER,
    build,
    entries,
    groups_of,
    read_file,
    read_index,
    refuse_twice,
)
from evidence.published.times import seconds_of
from experiments.paper.setups import HostPass, Measurement
from sim.hardware.cells import refuse_unknown
from zenflow.errors import ConfigError

Entered = Literal["fitted", "unfitted", "blind", "last", "third", "fourth", "fifth", "sixth"]
Open = Literal["device", "host", "network", "batch", "modules", "recomputation", "time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Published rows that share a heading and a doubt."""

    title: str
    """Heading of the group's table."""
    doubts: str
    """Facts that the source does not state, and that the set-ups do not have."""
    entered: Entered
    """Time at which the rows were entered: before or after they were predicted."""
    open: tuple[Open, ...] = ()
    """Facts that the sources leave open; empty where they state all that a prediction needs."""
    listed_late: bool = False
    """Whether ``open`` was filled in when the rows' errors had been seen."""

    @property
    def is_blind(self) -> bool:
        """Whether all rows were entered before any of them was predicted."""
        return self.entered not in ("fitted", "unfitted")


@dataclass(frozen=True, slots=True)
class Published:
    """Content of a folder of published times."""

    topics: Mapping[str, tuple[str, Sequence[str]]]
    """Titles and groups of the pages that show the rows, by the page's name."""
    groups: Mapping[str, Group]
    """Groups by their keys, in order."""
    measurements: tuple[Measurement, ...]
    """Rows in the order of their groups."""
    not_predicted: tuple[str, ...]
    """Published runs that are no rows, and why, in words."""


_OF_GROUP = tuple(item.name for item in fields(Group))
_OF_ROW = ("label", "source", "assumption", "quantity")


@functools.cache
def published(folder: Path = FOLDER / "published") -> Published:
    """Return the content of a folder's files.

    Args:
        folder: It has ``index.toml``, with the order of the other files, and a file for each page.

    Raises:
        ConfigError: A file lacks something or says something unknown; the message has the place.
    """
    index = read_index(folder, "not_predicted", "alternatives")
    topics: dict[str, tuple[str, Sequence[str]]] = {}
    groups: dict[str, Group] = {}
    rows: list[Measurement] = []
    for name in index["files"]:
        tables = read_file(folder / f"{name}.toml")
        if not isinstance(tables.get("title"), str):
            raise ConfigError(f"{name}.toml lacks title, the heading of its page: begin with it")
        title = tables.pop("title")
        topics[name] = (title, tuple(tables))
        for key, table in groups_of(tables, f"{name}.toml"):
            where = f"{name}.toml, {key}"
            if key in groups:
                raise ConfigError(
                    f"{where}: another file has a group of this name; choose another"
                )
            refuse_unknown(table, (*_OF_GROUP, "models", "rows", *KEYS), where)
            about = {field: table[field] for field in _OF_GROUP if field in table}
            groups[key] = build(Group, about, where)
            rows += _rows(key, table, index["alternatives"], where)
    refuse_twice(((row.label, row.source) for row in rows), folder.name)
    return Published(topics, groups, tuple(rows), tuple(index["not_predicted"]))


def _rows(
    group: str, table: Mapping[str, Any], shared: Mapping[str, Any], where: str
) -> Iterator[Measurement]:
    """Yield the rows of a group."""
    models = table.get("models", {})
    own = {key: value for key, value in table.items() if key not in (*_OF_GROUP, "models")}
    used = set()
    for entry in entries(own, where):
        row, place = entry.fields, entry.where
        setup = setup_of(row, models, place)
        made = {
            "quantity": "host" if isinstance(setup, HostPass) else "step",
            **{key: row[key] for key in _OF_ROW if key in row},
            "seconds": seconds_of(row, setup, place),
            "setup": setup,
            "group": group,
            "alternatives": alternatives_of(row, models, shared, place),
        }
        used.add(row.get("model"))
        yield build(Measurement, made, place)
    if unused := models.keys() - used:
        raise ConfigError(f"{where}: no row has the models {sorted(unused)}: delete them")
