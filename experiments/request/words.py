"""Words to values: parsers of what an axis or a flag may be given.

Each raises ``ConfigError`` at a word that is no value of its own; the message has what is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from experiments.training.settings.sizes import MODEL_SIZES
from sim.models.recomputation import BY_OPERATION, Recomputation
from zenflow.errors import ConfigError, unknown_name

Value = str | int | float | bool | None
GIB = float(1 << 30)


def float_in(word: str) -> float:
    """Return the number that a word says; NaN if it says none."""
    try:
        return float(word)
    except ValueError:
        return math.nan


def number(word: str) -> float:
    """Return a positive number."""
    value = float_in(word)
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"values must be positive numbers, got {word!r}")
    return value


def count(word: str) -> int:
    """Return a whole number of at least 1."""
    value = float_in(word)
    if not (value >= 1 and value.is_integer()):
        raise ConfigError(f"values must be whole numbers of at least 1, got {word!r}")
    return int(value)


_AMOUNT = re.compile(
    r"(?P<whole>[1-9]\d{0,2}(?:,\d{3})+|\d+(?:_\d+)*)?(?P<rest>\.\d+)?(?P<power>e\+?\d+)?"
    r"(?P<unit>[kmbt]?)"
)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def amount(word: str) -> float:
    """Return a number of things: 300M, 1.5B, 2e9, 1,500,000 or 1_500_000.

    A comma stands before three digits only: whoever writes 1,5B means 1.5 billion, not 15.

    >>> [amount(word) for word in ("300M", "1.5k", "2e3", "1,500")]
    [300000000.0, 1500.0, 2000.0, 1500.0]
    """
    found = _AMOUNT.fullmatch(word.strip().lower())
    value = math.nan
    if found is not None and (found["whole"] or found["rest"]):
        text = re.sub("[_,]", "", found["whole"] or "0")
        value = float(f"{text}{found['rest'] or ''}{found['power'] or ''}") * _UNITS[found["unit"]]
    if math.isfinite(value) and value >= 1:
        return value
    remedy = "300M or 2e9"
    if "," in word:
        remedy = (
            "1.5B or 1,500,000,000: a comma stands before exactly three digits, a point before"
        )
        remedy += " decimals"
    raise ConfigError(f"must be a number of at least 1, as in {remedy}; got {word!r}")


def switch(word: str, what: str = "yes or no") -> bool:
    """Return yes or no; ``what`` says in an error what else the word might have been."""
    switches = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
    if word.casefold() not in switches:
        raise ConfigError(f"values must be {what}, got {word!r}")
    return switches[word.casefold()]


def recomputation(word: str) -> Recomputation:
    """Return the recomputation: yes or no, a share of the layers (1/2, 20/32, 0.5), or op.

    All layers are True, and none is False.
    """
    if word == BY_OPERATION:
        return word
    found = re.fullmatch(r"(\d+\.?\d*)(?:/([1-9]\d*))?", word)
    if found is None:
        return switch(word, "yes, no, op, or a share of the layers, as in 1/2 or 20/32")
    share = float(found[1]) / int(found[2] or 1)
    if share > 1:
        raise ConfigError(
            f"values must be shares of the layers, to 1, got {word!r}: every second one is 1/2"
        )
    return share if 0 < share < 1 else bool(share)


def batch(word: str) -> tuple[int, int]:
    """Return the sequences of a micro-batch and the tokens of each, as 4x1024 says them."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word)
    if found is None:
        raise ConfigError(f"{word!r} is not two numbers of at least 1, as in 4x1024")
    return int(found[1]), int(found[2])


def choice(known: Iterable[str]) -> Callable[[str], str]:
    """Return the parser of one of these names."""
    names = tuple(known)

    def parse(word: str) -> str:
        if word not in names:
            raise ConfigError(unknown_name(word, names))
        return word

    return parse


def part(kind: str, *others: str) -> Callable[[str], str]:
    """Return the parser of a part's name, as the table spells it, or of other words."""

    def parse(word: str) -> str:
        from sim.hardware import catalog

        return word if word in others else str(getattr(catalog, f"find_{kind}")(word).name)

    return parse


def machine(word: str) -> str:
    """Return the name of a machine in the table, or a profile's JSON file."""
    from sim.hardware.file import read_profile

    if word.endswith(".json"):
        read_profile(word)
        return word
    return part("machine")(word)


def model(word: str) -> str:
    """Return a model: a size of `zenflow train`, or what `find_model` takes."""
    from sim.models.table import find_model

    if word not in MODEL_SIZES:
        find_model(word)
    return word
