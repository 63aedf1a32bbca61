"""Cells of the hardware tables: quantities in human units, read into SI.

A cell of ``sim/data/*.toml`` is ``{value, unit, kind, source}`` and, where its source states one,
``sigma``. The unit is checked against what the field holds, so that a slip such as GB for GB/s, or
a quantity without its source, is an error instead of a number.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from importlib import resources
from typing import Any, TypeVar

from sim.hardware.quantity import Quantity
from zenflow.config import unknown_name
from zenflow.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Entry = Mapping[str, Any]
_Record = TypeVar("_Record")

UNITS: Mapping[str, tuple[str, float, float]] = {
    "B": ("bytes", 1, 1),
    "GB": ("bytes", 1e9, 1),
    "TB": ("bytes", 1e12, 1),
    "MiB": ("bytes", 2**20, 1),
    "GiB": ("bytes", 2**30, 1),
    "GB/s": ("bytes/s", 1e9, 1),
    "TB/s": ("bytes/s", 1e12, 1),
    "GFLOP": ("FLOP", 1e9, 1),
    "GFLOP/s": ("FLOP/s", 1e9, 1),
    "TFLOP/s": ("FLOP/s", 1e12, 1),
    "s": ("seconds", 1, 1),
    "ms": ("seconds", 1, 1e3),
    "us": ("seconds", 1, 1e6),
    "ratio": ("ratio", 1, 1),
    "%": ("ratio", 1, 100),
    "tokens": ("tokens", 1, 1),
    "B/param": ("bytes/parameter", 1, 1),
    "Gparam/s": ("parameters/s", 1e9, 1),
}
"""Dimension of each unit, and the multiplier and divisor that take it to SI.

Two numbers, because a division by 1e6 rounds once where a product with 1e-6 rounds twice."""

_FIELDS = {
    "bytes": "memory bytes memory_per_socket most_memory_per_socket capacity cache",
    "bytes/s": "bandwidth d2h h2d dram read write limit",
    "FLOP/s": "flops",
    "FLOP": "flop",
    "seconds": "launch latency time host_task copy bucket step select",
    "ratio": "efficiency factor share duplex pageable numa_hop core_sharing coding",
    "tokens": "tokens",
    "bytes/parameter": "update_bytes",
    "parameters/s": "device_update column_update core_update",
}
_DIMENSIONS = {name: dimension for dimension, names in _FIELDS.items() for name in names.split()}

_REQUIRED = ("value", "unit", "kind", "source")


@functools.cache
def read_table(name: str) -> dict[str, Entry]:
    """Return the entries of ``sim/data/NAME.toml`` as the file has them.

    Raises:
        ConfigError: The file is not TOML.
    """
    text = resources.files("sim").joinpath("data", f"{name}.toml").read_text(encoding="utf-8")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"sim/data/{name}.toml is not TOML: {error}") from error


def quantity_of(cell: Any, field_name: str, where: str) -> Quantity:
    """Return a cell's quantity in SI units.

    Args:
        cell: The table's cell.
        field_name: Name of the quantity's field: decides which units may stand there.
        where: The entry's name, for errors.

    Raises:
        ConfigError: A key is missing or unknown, the unit is unknown or measures something else,
            or the value is no positive number.

    Examples:
        >>> cell = {"value": 25, "unit": "GB/s", "kind": "spec", "source": "data sheet"}
        >>> quantity_of(cell, "d2h", "mine").value
        25000000000.0
    """
    place = f"{where}, {field_name}"
    if not isinstance(cell, Mapping):
        raise ConfigError(f"{place}: a cell is a table of {', '.join(_REQUIRED)}, got {cell!r}")
    missing = [key for key in _REQUIRED if cell.get(key) in (None, "")]
    if missing:
        raise ConfigError(
            f"{place}: the cell lacks {' and '.join(missing)}: state each quantity's"
        )
    refuse_unknown(cell, (*_REQUIRED, "sigma"), place)
    multiplier, divisor = _scale(cell["unit"], dimension_of(field_name), place)
    value = cell["value"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{place}: value must be a number, got {value!r}")
    try:
        return Quantity(
            value=value * multiplier / divisor,
            kind=cell["kind"],
            source=cell["source"],
            sigma=cell.get("sigma"),
        )
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def dimension_of(field_name: str) -> str:
    """Return the dimension of a field of the table, by its name or its name's last word.

    Raises:
        ConfigError: Nothing says so.
    """
    for name in (field_name, field_name.rsplit("_", 1)[-1]):
        if name in _DIMENSIONS:
            return _DIMENSIONS[name]
    raise ConfigError(f"nothing says what {field_name} measures: add it to sim/hardware/cells.py")


def _scale(unit: str, dimension: str, place: str) -> tuple[float, float]:
    if unit not in UNITS:
        raise ConfigError(f"{place}: unit {unknown_name(unit, UNITS)}")
    measured, multiplier, divisor = UNITS[unit]
    if measured != dimension:
        fitting = ", ".join(name for name, (what, _, _) in UNITS.items() if what == dimension)
        raise ConfigError(
            f"{place}: {unit} measures {measured}, but this quantity is {dimension}: "
            f"write it in {fitting}"
        )
    return multiplier, divisor


def refuse_unknown(entry: Entry, known: Iterable[str], where: str) -> None:
    """Refuse keys that mean nothing.

    Raises:
        ConfigError: There is one; the nearest known key is named.
    """
    unknown = [f"key {unknown_name(key, known)}" for key in entry if key not in known]
    if unknown:
        raise ConfigError(f"{where}: {'; '.join(unknown)}")


def record_of(
    make: type[_Record], entry: Entry, where: str, *, beside: Iterable[str] = (), **made: Any
) -> _Record:
    """Return a record of `sim.hardware.profile` from its entry.

    Args:
        make: The record's class.
        entry: Its cells, by field; ``flops`` has one for each dtype.
        where: The entry's name, for errors.
        beside: Keys of the entry that are not fields of the record.
        made: Fields that are no cells.

    Raises:
        ConfigError: A cell is missing, unknown or wrong.
    """
    named = {item.name: item for item in fields(make) if item.name not in made}  # type: ignore[arg-type]
    refuse_unknown(entry, (*named, *beside), where)
    for name, item in named.items():
        if name in entry:
            made[name] = _cells_of(entry[name], name, where)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{where} lacks {name}: add its cell, estimated if nothing is known")
    return make(**made)


def _cells_of(cell: Any, name: str, where: str) -> Quantity | dict[str, Quantity]:
    if name != "flops":
        return quantity_of(cell, name, where)
    return {dtype: quantity_of(own, name, f"{where}, {dtype}") for dtype, own in cell.items()}
