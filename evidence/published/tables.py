"""Tables of published runs: TOML in which a row says only how it differs from its neighbours.

A table with ``rows`` has the keys that they share, and a row has its own. A row may have rows too.
A key of an inner table replaces the outer one's, but for ``config``, which is laid over it.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from sim.hardware.cells import refuse_unknown
from zenflow.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parents[1] / "data"

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class Entry:
    """Row of a group, with the keys that it inherits."""

    fields: Mapping[str, Any]
    where: str
    """File, group and label, for errors."""


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a file of tables.

    Raises:
        ConfigError: The file is not TOML, or says one key twice.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path.name} is not TOML: {error}") from error


def read_index(folder: Path, *others: str) -> dict[str, Any]:
    """Return a folder's ``index.toml``, whose ``files`` has the order of all its other files.

    Args:
        folder: It has the index and the files.
        others: Keys of the index beside ``files``.

    Raises:
        ConfigError: A key is missing or unknown, a file is not listed, or is not there.
    """
    index = read_file(folder / "index.toml")
    refuse_unknown(index, ("files", *others), "index.toml")
    if missing := [key for key in ("files", *others) if key not in index]:
        raise ConfigError(f"index.toml lacks {', '.join(missing)}")
    there = {path.stem for path in folder.glob("*.toml")} - {"index"}
    if there != set(index["files"]):
        differ = sorted(there ^ set(index["files"]))
        raise ConfigError(
            f"index.toml must list the files of {folder.name}, each once; these are only there or "
            f"only listed: {', '.join(differ)}"
        )
    return index


def refuse_twice(names: Iterable[tuple[str, str]], where: str) -> None:
    """Refuse two rows of one label and source.

    Raises:
        ConfigError: There are such rows.
    """
    twice = [name for name, number in Counter(names).items() if number > 1]
    if twice:
        raise ConfigError(f"{where}: two rows have the label and source {twice[0]}: rename one")


def groups_of(content: Mapping[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the groups of a file, with their names.

    Raises:
        ConfigError: A key of the file is no table.
    """
    for name, table in content.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {name} is outside of all groups: move it into a table")
        yield name, table


def entries(table: Mapping[str, Any], where: str) -> Iterator[Entry]:
    """Yield the rows of a group in order.

    Args:
        table: Keys that all rows share, and ``rows``.
        where: File and group, for errors.

    Raises:
        ConfigError: There is a table without a row, or a row without a label.
    """
    yield from _inner({"rows": [], **table}, {}, where)


def _inner(table: Mapping[str, Any], outer: Mapping[str, Any], where: str) -> Iterator[Entry]:
    found = {**outer, **{key: value for key, value in table.items() if key != "rows"}}
    if "config" in outer and "config" in table:
        found["config"] = {**outer["config"], **table["config"]}
    if "rows" not in table:
        if "label" not in found:
            raise ConfigError(f"{where}: a row lacks label, its name in tables: {dict(table)}")
        yield Entry(found, f"{where}, {found['label']!r}")
        return
    rows = table["rows"]
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise ConfigError(f"{where}: rows must be a list of tables, at least one")
    for row in rows:
        yield from _inner(row, found, where)


def build(
    make: type[_Record], found: Mapping[str, Any], where: str, *, beside: Collection[str] = ()
) -> _Record:
    """Return a dataclass from a table of its fields.

    Args:
        make: The dataclass.
        found: Values by name.
        where: The table's name, for errors.
        beside: Keys of the table that are no fields.

    Raises:
        ConfigError: A field is missing, unknown, or of another type.
    """
    hints = _hints(make)  # type: ignore[arg-type]  # mypy has it that classes have no hash
    known = {item.name: item for item in fields(make)}  # type: ignore[arg-type]
    refuse_unknown(found, (*known, *beside), where)
    made = {}
    for name, item in known.items():
        if name in found:
            made[name] = _checked(found[name], hints[name], f"{where}: {name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{where} lacks {name}: say it of the row, or of its group")
    return make(**made)


@functools.cache
def _hints(make: type) -> dict[str, Any]:
    return get_type_hints(make)


def _checked(value: Any, hint: Any, what: str) -> Any:
    """Return a value as a field has it, with a tuple for a list."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if not any(_is(value, kind) for kind in kinds):
        raise ConfigError(f"{what} must be {_named(hint)}, got {value!r}")
    return tuple(value) if isinstance(value, list) else value


def _named(hint: Any) -> str:
    """Return a type in words."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _is(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind)
    if origin is tuple:
        each = get_args(kind)[0]
        return isinstance(value, list | tuple) and all(_is(item, each) for item in value)
    if origin is not None:  # Mapping[str, Any]
        return isinstance(value, origin)
    if kind is str:
        return isinstance(value, str) and bool(value)
    if kind is float:  # which an int and a bool are to a type checker too
        return isinstance(value, int | float)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
