"""Reading: collects the findings about a DeepSpeed configuration, to tell all of them at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zenflow.checks import is_number
from zenflow.deepspeed.keys import LEAST_AND_MOST, SECTIONS, is_comment, known_names
from zenflow.errors import unknown_name


@dataclass(slots=True)
class Reading:
    """Findings about a DeepSpeed configuration: refused and unused keys, notes.

    Readers take keys out of a section with ``pop``; ``sort`` files the keys that are left.
    """

    refused: list[tuple[str, str]] = field(default_factory=list)
    """Names of keys, and messages that say what is wrong: rule, value and remedy."""

    unused: list[str] = field(default_factory=list)
    """Names of keys that have no effect and change no result."""

    notes: list[str] = field(default_factory=list)
    """Messages about keys that are followed in another way, which may change results a little."""

    auto: list[str] = field(default_factory=list)
    """Names of keys that are left to the program."""

    def section(self, value: object, name: str) -> dict[str, Any]:
        """Return a copy of a section to take keys from, without comments; null is empty."""
        if value is None:
            return {}
        if isinstance(value, Mapping):
            return {key: own for key, own in value.items() if not is_comment(str(key))}
        self.correct(name, f"must be an object, got {value!r}: give keys and values")
        return {}

    def correct(self, name: str, words: str) -> None:
        """Note a key with an invalid value; the words follow the key's name in the message."""
        self.refused.append((name, f"{name} {words}"))

    def refuse(self, name: str, remedy: str) -> None:
        """Note a key that would change results."""
        self.correct(name, f"would change results and can't be honoured: {remedy}")

    def is_auto(self, value: object, name: str) -> bool:
        """Return whether the value is left to the program, and note it."""
        if value == "auto":
            self.auto.append(name)
        return value == "auto"

    def count(self, value: object, name: str) -> int | None:
        """Return a whole number of at least 1; None for one that is "auto" or refused."""
        if self.is_auto(value, name):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.correct(name, f"must be an integer >= 1 or 'auto', got {value!r}")
            return None
        return value

    def number(self, value: object, name: str) -> float | None:
        """Return a number of at least 0; None for one that is absent, "auto" or refused."""
        if value is None or self.is_auto(value, name):
            return None
        if not is_number(value):
            self.correct(name, f"must be a number >= 0, got {value!r}")
            return None
        return float(value)

    def sort(self, rest: Mapping[str, Any], prefix: str) -> None:
        """File the keys of a section that nobody has taken.

        Args:
            rest: Keys that are left of the section.
            prefix: Its name with a dot, or nothing for the top level.
        """
        known = SECTIONS[prefix]
        for key, value in rest.items():
            name = f"{prefix}{key}"
            least, most = LEAST_AND_MOST.get(name, (-math.inf, math.inf))
            if key in known.unused and _is_between(value, least, most):
                self.unused.append(name)
            elif key in known.unused:
                bounds = f"{least:g} to {most:g}" if most < math.inf else f"{least:g} on"
                self.correct(
                    name, f"must be a number from {bounds}, as DeepSpeed checks, got {value!r}"
                )
            elif key not in known.refused:
                self.refused.append((name, f"{prefix}{unknown_name(key, known_names(prefix))}"))
            elif is_on(value):
                self.refuse(name, known.refused[key])


def _is_between(value: object, least: float, most: float) -> bool:
    """Return whether a value lies between bounds; without bounds, or as "auto", it always does."""
    if least == -math.inf or value in ("auto", None):
        return True
    return is_number(value) and least <= value <= most


def is_on(value: object) -> bool:
    """Return whether a feature is switched on: by ``enabled``, or by being there at all."""
    return bool(value.get("enabled", value) if isinstance(value, Mapping) else value)
