"""The records of a tuned run's decisions file, and each one's line.

A line is a JSON object with ``n`` (0, 1, 2 and so on), ``kind`` and the record's fields. A number
that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args, get_type_hints

from zenflow.config import unknown_name
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

FORMAT = 2
"""Version of the files that this code writes, and the only one that it reads."""

Deciders: TypeAlias = Literal["twin", "zen-auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Settings and circumstances of a run: enough to start it again.

    See `autotune.decisions.file.DecisionLog`.
    """

    format: int = FORMAT
    settings: Mapping[str, Any]
    """Every setting of the run, JSON-ready."""
    knobs: Knobs
    """Knobs in force from the first step on."""
    largest_interval: int | None
    """Largest S that the controller may choose: blocks are cut for it."""
    hardware: Mapping[str, Any]
    """Facts about the machine, JSON-ready."""
    versions: Mapping[str, Any]
    """Versions of Python, torch and this package."""
    commit: str | None
    """Commit of the source, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRecord:
    """Measurements of the controller over some steps with one setting."""

    step: int
    """Last of the measured steps."""
    window: int
    """Number of windows of the run before this one."""
    knobs: Knobs
    """Knobs in force during these steps."""
    step_seconds: float
    """Measured seconds of a step."""
    stall_seconds: float
    """Measured stall of a step."""
    predicted_step_seconds: float | None
    """Predicted seconds of a step; None without a prediction."""
    goodput: float
    """Tokens per second times statistical efficiency."""
    rho: float
    """Share of the gradient's energy in deferred columns."""
    constants: Mapping[str, float]
    """Multipliers of the twin by name, as refitted on this window."""
    search_seconds: float
    """CPU seconds that the search has taken since the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A change of knobs, and why."""

    step: int
    """Step after which the new knobs hold."""
    window: int
    """Number of windows measured so far."""
    by: Deciders
    """Name of the controller that decided."""
    old: Knobs
    """Knobs in force until this decision."""
    new: Knobs
    """Knobs from the next step on."""
    predicted_step_seconds: float | None
    """Predicted seconds of a step at the new knobs."""
    measured_step_seconds: float | None
    """Measured seconds of a step at the old knobs."""
    gain: float | None
    """Predicted gain, relative to the old knobs' goodput."""
    error: float | None
    """Standard error of the gain."""
    rho: float | None
    """Share of the gradient's energy in deferred columns."""
    reason: str
    """Reason of the change, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last line of a run that took all its steps."""

    step: int
    """Number of steps taken."""
    num_decisions: int
    """Number of decisions in the file."""
    search_seconds: float
    """CPU seconds that the search has taken."""
    run_seconds: float
    """Seconds of all steps."""


Record: TypeAlias = Header | WindowRecord | Decision | End

KINDS: Mapping[str, type[Record]] = {
    "header": Header,
    "window": WindowRecord,
    "decision": Decision,
    "end": End,
}


def line_of(n: int, record: Record) -> str:
    """Return the record as the file's n-th line, from 0, with its line end."""
    kind = next(name for name, own in KINDS.items() if isinstance(record, own))
    content = {field.name: _plain(getattr(record, field.name)) for field in fields(record)}
    return json.dumps({"n": n, "kind": kind, **content}, allow_nan=False) + "\n"


def record_of(n: int, line: str) -> Record:
    """Return the record that ``line_of(n, record)`` wrote.

    Raises:
        ConfigError: The line is not JSON, has another number, or is no such record.
    """
    try:
        content = json.loads(line, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"must be an object, but is {content!r:.60}")
    number = content.pop("n", None)
    if number != n or isinstance(number, bool):
        raise ConfigError(f"n must be {n}, but is {number!r}: lines were lost, doubled or moved")
    kind = content.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"kind {unknown_name(kind, KINDS)}")
    if kind == "header" and content.get("format") != FORMAT:
        raise ConfigError(
            f"format must be {FORMAT}, but is {content.get('format')!r}: another version of "
            "zenflow wrote the file; read it with that one"
        )
    return _made(kind, content)


def _made(kind: str, content: Mapping[str, Any]) -> Record:
    """Return the record of this kind with exactly these fields."""
    record = KINDS[kind]
    types = get_type_hints(record)
    for key in content:
        if key not in types:
            raise ConfigError(f"field {unknown_name(key, types)}")
    missing = [key for key in types if key not in content]
    if missing:
        raise ConfigError(f"the {kind} lacks {', '.join(missing)}")
    return record(**{key: _read(key, content[key], types[key]) for key in types})


def _read(key: str, value: Any, wanted: Any) -> Any:
    """Return a field's value from its JSON, by the field's type."""
    if not _FITS[wanted](value):
        raise ConfigError(f"{key} can't be {value!r:.60}")
    if wanted is Knobs:
        try:
            return Knobs.from_dict(value)
        except (ConfigError, TypeError) as error:  # TypeError: a text where a number belongs
            raise ConfigError(f"{key}: {error}") from error
    if wanted == Mapping[str, float]:
        return {name: _number(item) for name, item in value.items()}
    if wanted is float:
        return _number(value)
    return value


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # false for nan too


def _is_number_or_null(value: object) -> bool:
    return value is None or _is_number(value)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


_FITS: Mapping[Any, Callable[[Any], bool]] = {
    int: _is_count,
    int | None: lambda value: value is None or _is_count(value),
    float: _is_number_or_null,
    float | None: _is_number_or_null,
    str: lambda value: isinstance(value, str),
    str | None: lambda value: value is None or isinstance(value, str),
    Deciders: lambda value: value in get_args(Deciders),
    Knobs: _is_mapping,
    Mapping[str, Any]: _is_mapping,
    Mapping[str, float]: lambda value: (
        _is_mapping(value) and all(map(_is_number_or_null, value.values()))
    ),
}
"""Check of a JSON value, by the type of its field."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key comes twice")
    return made


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _plain(value: Any) -> Any:
    if isinstance(value, Knobs):
        return value.to_dict()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
