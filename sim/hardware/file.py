"""Profile files: a `HardwareProfile` as JSON, what ``zenflow calibrate`` writes and others read.

Every quantity keeps its value, kind, source and sigma, bit for bit. A file has all keys of its
schema and no others, so that a misspelt one can't pass for a default. A file of an older schema is
read with an estimate for each quantity that it lacks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sim.hardware.components import (
    COMPACT_CODING,
    CORE_UPDATE,
    DEEPSPEED_SHARE,
    PAGE_BANDWIDTH,
)
from sim.hardware.profile import HardwareProfile
from sim.hardware.quantity import Quantity
from zenflow.config import raise_violations, unknown_name
from zenflow.errors import ConfigError, naming_file

SCHEMA_VERSION = 9
"""Version of the files that this code writes. Files of older versions are read, too."""
KERNEL_IS_DRAM = Quantity(
    value=1.0, kind="measured", source="part of dram, which the engine's kernel has measured"
)
"""Share of ``host.dram`` that the engine's kernel reaches, in profiles of `zenflow calibrate`."""
_ADDED: Mapping[int, Mapping[str, Mapping[str, Any]]] = {
    2: {"host": {"core_update": asdict(CORE_UPDATE)}},
    3: {"device": {"sustained_share": None, "attention_backward_efficiency": None}},
    4: {"device": {"compiled_launch": None}, "host": {"deepspeed_share": asdict(DEEPSPEED_SHARE)}},
    5: {"host": {"adam_share": asdict(KERNEL_IS_DRAM)}},
    6: {
        "device": {"float32_efficiency": None, "cache": None},
        "overheads": {"column_update": None},
    },
    7: {
        "device": {
            "native_attention_efficiency": None,
            "native_attention_backward_efficiency": None,
            "attention_tokens": None,
        }
    },
    8: {"device": {"collective_share": None}, "host": {"page_bandwidth": asdict(PAGE_BANDWIDTH)}},
    9: {"host": {"compact_coding": asdict(COMPACT_CODING)}},
}
"""Quantities that each version has and the one before had not, with their stand-ins."""
_ADDED_FIELDS: Mapping[int, Mapping[str, Any]] = {4: {"num_hosts": 1, "network": None}}
"""Fields of the profile itself that each version has and the one before had not."""

_REMEDY = "measure again with `zenflow calibrate`, or take the quantity from its data sheet"


def write_profile(profile: HardwareProfile, path: str | os.PathLike[str]) -> None:
    """Write a profile; an earlier file of that name stays whole until this one is complete.

    Raises:
        ConfigError: The metadata would not come back from JSON as it is.
        OSError: The file can't be written.

    See `read_profile`.
    """
    path = Path(path)
    content = content_of(profile)
    _check_metadata(content["metadata"])
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming_file(path, temporary):
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_profile(path: str | os.PathLike[str]) -> HardwareProfile:
    """Return the profile that a file holds.

    Raises:
        ConfigError: The file can't be read, has another schema, or breaks rules; all are listed.

    Examples:
        >>> import tempfile
        >>> from sim.hardware.catalog import find_machine
        >>> machine = find_machine("hgx-h100")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_profile(machine, f"{folder}/machine.json")
        ...     read_profile(f"{folder}/machine.json") == machine
        True
    """
    path = Path(path)
    return profile_of(_parse(path), str(path))


def content_of(profile: HardwareProfile) -> dict[str, Any]:
    """Return a profile as JSON values, for a file of its own or a part of another."""
    return {"schema_version": SCHEMA_VERSION, **asdict(profile)}


def profile_of(content: Mapping[str, Any], place: str) -> HardwareProfile:
    """Return the profile that JSON values stand for.

    Raises:
        ConfigError: It has another schema, or breaks rules; the message names place and rules.
    """
    fields = dict(content)
    version = fields.pop("schema_version", None)
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise ConfigError(
            f"{place}: schema_version must be {SCHEMA_VERSION}, got {version!r}: write the "
            "profile again with this version of zenflow"
        )
    for later in range(version + 1, SCHEMA_VERSION + 1):
        fields = {**_ADDED_FIELDS.get(later, {}), **fields}
        for part, quantities in _ADDED.get(later, {}).items():
            if isinstance(fields.get(part), Mapping):
                fields[part] = {**quantities, **fields[part]}
    reader = _Reader()
    found = reader.fields_of(fields, HardwareProfile, "")
    raise_violations(place, reader.violations)
    try:
        return HardwareProfile(**found)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _check_metadata(metadata: Any) -> None:
    try:
        returned = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metadata must be JSON-ready: {error}") from error
    if returned != metadata:
        raise ConfigError(
            "metadata must come back from JSON as it is: use string keys, and lists for tuples"
        )


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the profile {path} can't be read: {error}") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise ConfigError(
            f"the profile {path} is not JSON: {error}; write one with `zenflow calibrate`"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"the profile {path} must hold an object, got {content!r:.80}")
    return content


class _Reader:
    """Turns a file's objects into records, by their fields' types, and notes what breaks rules.

    Attributes:
        violations: Key, value and remedy of each.
    """

    def __init__(self) -> None:
        self.violations: list[str] = []

    def fields_of(self, content: Mapping[str, Any], record: type, prefix: str) -> dict[str, Any]:
        """Return a record's fields, and note keys that are missing or unknown."""
        types = get_type_hints(record)
        for key in content:
            if key not in types:
                self.violations.append(f"{prefix}{unknown_name(key, types)}")
        for key in types:
            if key not in content:
                self.violations.append(
                    f"{prefix}{key} is missing: add it, as null if that is what the machine has"
                    if NoneType in get_args(types[key])
                    else f"{prefix}{key} is missing: {_REMEDY}"
                )
        return {
            key: self._value(content[key], types[key], f"{prefix}{key}")
            for key in types
            if key in content
        }

    def _value(self, value: Any, wanted: Any, key: str) -> Any:
        if NoneType in get_args(wanted):
            if value is None:
                return None
            wanted = get_args(wanted)[0]
        if is_dataclass(wanted) and isinstance(wanted, type):
            return self._record(value, wanted, key)
        if get_origin(wanted) is Mapping:
            return self._mapping(value, get_args(wanted)[1], key)
        return self._plain(value, wanted, key)

    def _record(self, value: Any, wanted: type, key: str) -> Any:
        if not isinstance(value, Mapping):
            return self._refuse(key, value, "an object: " + ", ".join(get_type_hints(wanted)))
        before = len(self.violations)
        found = self.fields_of(value, wanted, f"{key}.")
        # With a violation noted it is never used, and making it would only fail once more.
        return wanted(**found) if len(self.violations) == before else None

    def _mapping(self, value: Any, wanted: Any, key: str) -> Any:
        if not isinstance(value, Mapping):
            return self._refuse(key, value, "an object")
        if wanted is Any:
            return value
        return {name: self._value(own, wanted, f"{key}.{name}") for name, own in value.items()}

    def _plain(self, value: Any, wanted: Any, key: str) -> Any:
        if get_origin(wanted) is Literal:
            if value not in get_args(wanted):
                return self._refuse(key, value, f"one of {', '.join(get_args(wanted))}")
        elif wanted is float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and value > 0):
                return self._refuse(key, value, f"a positive finite number: {_REMEDY}")
        elif not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            return self._refuse(key, value, f"of type {wanted.__name__}")
        return value

    def _refuse(self, key: str, value: Any, rule: str) -> None:
        self.violations.append(f"{key}, which is {value!r:.60}, must be {rule}")
