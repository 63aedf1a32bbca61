"""Axes and their values from the command line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.request.words import Value, float_in
from experiments.sweeps.axes.kinds import Axis, AxisKind, kind_of
from zenflow.errors import ConfigError

_MOST_VALUES = 100_000
"""Most values of one axis."""
_ROUNDING = 1e-9
"""Share of a step by which a range's end may be missed and still be its last value."""


def parse_axis(text: str) -> Axis:
    """Return the axis of ``name=values``.

    >>> parse_axis("S=1:16:x2").values
    (1, 2, 4, 8, 16)
    >>> parse_axis("dram=50,100:200:50").values
    (50.0, 100.0, 150.0, 200.0)

    Raises:
        ConfigError: There is no such axis or value, or a range makes no sense.
    """
    name, equals, values = text.partition("=")
    name = name.strip()
    if not equals or not values.strip():
        raise ConfigError(
            f"--vary takes an axis and its values, got {text!r}: write --vary S=1,2,4 or "
            "--vary dram=50:400:x2"
        )
    kind = kind_of(name)
    found: list[Value] = []
    for word in (word.strip() for word in values.split(",")):
        try:
            found += _range(word, kind) if _is_range(word) else [kind.parse(word)]
        except ConfigError as error:
            raise ConfigError(f"--vary {text}: {error}") from None
        if len(found) > _MOST_VALUES:
            raise ConfigError(f"--vary {text}: more than {_MOST_VALUES} values")
    return Axis(name=name, values=tuple(dict.fromkeys(found)))


def parse_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """Return all axes, each once.

    Raises:
        ConfigError: One is wrong, or two vary the same thing.
    """
    axes = tuple(parse_axis(text) for text in texts)
    seen: dict[tuple[str, str], str] = {}
    for axis in axes:
        place = (axis.kind.place, axis.kind.target)
        if place in seen:
            raise ConfigError(f"{seen[place]} and {axis.name} vary the same: give one --vary")
        seen[place] = axis.name
    if {"gpu", "machine"} <= {axis.name for axis in axes}:
        raise ConfigError("gpu and machine both say what the machine is: vary one of them")
    return axes


def _is_range(word: str) -> bool:
    """Whether a word is a range; a path of Windows has a colon too, and is none."""
    parts = word.split(":")
    return len(parts) > 1 and parts[0][:1] in "0123456789.-+"


def _range(word: str, kind: AxisKind) -> list[Value]:
    """Return the values of ``lo:hi:step`` or ``lo:hi:xN``, ends included where they are met."""
    parts = word.split(":")
    if len(parts) != 3:
        raise ConfigError(f"ranges are lo:hi:step or lo:hi:xN, got {word!r}")
    is_factor = parts[2].startswith("x")
    low, high, by = (_finite(part, word) for part in (*parts[:2], parts[2].removeprefix("x")))
    if low > high or (by <= 1 or low <= 0 if is_factor else by <= 0):
        raise ConfigError(
            f"range {word!r} never ends or never begins: lo must be at most hi, and the step "
            "positive, or a factor above 1 on a positive lo"
        )
    steps = math.log(high / low) / math.log(by) if is_factor else (high - low) / by
    if steps > _MOST_VALUES:
        raise ConfigError(f"range {word!r} has more than {_MOST_VALUES} values")
    numbers = [
        low * by**step if is_factor else low + by * step
        for step in range(int(steps * (1 + _ROUNDING) + _ROUNDING) + 1)
    ]
    # Exact where they can be: 0.1 + 2 * 0.1 is meant to be 0.3.
    numbers = [float(f"{min(number, high):.12g}") for number in numbers]
    if is_factor and low.is_integer() and isinstance(kind.parse(f"{low:.12g}"), int):
        numbers = [float(round(number)) for number in numbers]
    return [kind.parse(f"{number:.12g}") for number in numbers]


def _finite(part: str, word: str) -> float:
    value = float_in(part)
    if not math.isfinite(value):
        raise ConfigError(f"range {word!r} needs numbers, got {part!r}")
    return value
