"""Types of settings that come from a file, where JSON and TOML allow anything. No torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and (isinstance(value, Integral) or float(value).is_integer())


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))


_KINDS: Mapping[Any, tuple[Callable[[Any], bool], Callable[[Any], Any], str]] = {
    bool: (lambda value: isinstance(value, bool), bool, "true or false"),
    int: (_is_whole, int, "a whole number"),
    float: (_is_number, lambda value: value, "a number"),
    str: (lambda value: isinstance(value, str), str, "text in quotes"),
    tuple: (_is_pair, tuple, "two numbers"),
    Mapping: (lambda value: isinstance(value, Mapping), lambda value: value, "a table"),
}
"""By type: whether a value is one, what becomes of it, and what to call it."""


def typed(kind: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return values as a dataclass has them, and what is wrong with those that can't be.

    A list becomes a tuple, and 1e3 a whole number where one is asked for.

    Args:
        kind: The dataclass whose annotations say what its fields are.
        values: Some of its fields.
    """
    made: dict[str, Any] = {}
    broken = []
    for name, value in values.items():
        own, may_be_none = _fields(kind)[name]
        fits, convert, words = _KINDS[own]
        if value is None and may_be_none:
            made[name] = None
        elif fits(value):
            made[name] = convert(value)
        else:
            broken.append(f"{name} must be {words}, but is {value!r}")
    return made, broken


@functools.cache
def _fields(kind: type) -> Mapping[str, tuple[Any, bool]]:
    """Return each field's plain type, and whether it may be None."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        parts: Sequence[Any] = get_args(hint) if type(None) in get_args(hint) else (hint,)
        (own,) = (part for part in parts if part is not type(None))
        found[name] = (getattr(own, "__origin__", own), len(parts) > 1)
    return found
