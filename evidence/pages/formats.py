"""Forms in which templates print what they looked up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

_WORDS = ("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def one(rows: Iterable[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any]:
    """Return the one row that has these values."""
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows have {wanted}, not one")
    return found[0]


def percent(share: float, digits: int = 0) -> str:
    """Return a share in per cent."""
    return f"{share:.{digits}%}"


def beside(shares: float | Sequence[float], digits: int = 2) -> str:
    """Return by how many per cent numbers are above or below others, a side said once."""
    listed = shares if isinstance(shares, Sequence) else [shares]
    texts = [f"{abs(share):.{digits}%}" for share in listed]
    sides = ["below" if share < 0 else "above" for share in listed]
    if len(set(sides)) == 1:
        return f"{enumerated(texts)} {sides[0]}"
    return enumerated([f"{text} {side}" for text, side in zip(texts, sides, strict=True)])


def span(shares: Iterable[float], digits: int = 2) -> str:
    """Return between which per cents numbers are above or below others."""
    ends = sorted(shares, key=abs)
    if min(ends) < 0 <= max(ends):
        return f"{beside(min(ends), digits)} to {beside(max(ends), digits)}"
    return f"{abs(ends[0]):.{digits}%} to {beside(ends[-1], digits)}"


def enumerated(texts: Sequence[str]) -> str:
    """Return texts with commas, and an ``and`` before the last."""
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def word(count: int | str) -> str:
    """Return a small number as a word."""
    return _WORDS[int(count)] if 0 < int(count) < len(_WORDS) else str(count)


def number(value: float, form: str = "") -> str:
    """Return a number in a form of Python's."""
    return format(value, form)


FILTERS = {
    "beside": beside,
    "enumerated": enumerated,
    "mean": fmean,
    "median": median,
    "number": number,
    "one": one,
    "percent": percent,
    "span": span,
    "word": word,
}
