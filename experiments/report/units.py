"""Numbers as the page shows them: few digits, with a unit that suits their size."""

from __future__ import annotations

import math
from collections.abc import Sequence

Scales = Sequence[tuple[float, str]]
TIMES: Scales = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
SIZES: Scales = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
MISSING = "\u2013"


def scale_of(value: float, scales: Scales) -> tuple[float, str]:
    """Return the largest unit that the value reaches, the smallest if it reaches none."""
    return next((scale for scale in scales if abs(value) >= scale[0]), scales[-1])


def digits(value: float | None, most: int = 3) -> str:
    """Return a number with so many significant digits, whole ones in full up to seven places.

    >>> digits(1234567.8), digits(0.012345), digits(2.0), digits(1e9), digits(None)
    ('1,234,568', '0.0123', '2', '1.00e+09', '\u2013')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    size = math.floor(math.log10(abs(value))) if value else 0
    if not -4 <= size < 7:
        return f"{value:.{most - 1}e}"
    text = f"{value:,.{max(0, most - 1 - size)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def time(seconds: float | None, most: int = 4) -> str:
    """Return a time, as in "12.5 ms"."""
    return _scaled(seconds, TIMES, most) if seconds != 0 else "0 s"


def size(num_bytes: float | None, most: int = 3) -> str:
    """Return bytes, as in "3 MB"."""
    return _scaled(num_bytes, SIZES, most) if num_bytes != 0 else "0 B"


def share(part: float | None, places: int = 1) -> str:
    """Return a part of one in per cent."""
    return MISSING if part is None else f"{part:.{places}%}"


def plural(count: int, word: str) -> str:
    """Return a count of things, as in "2 rows"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def cell(value: str | float | None) -> str:
    """Return a table's cell, which a script can read back as a number where it is one."""
    return f"{value:.6g}" if isinstance(value, float) else str("" if value is None else value)


def _scaled(value: float | None, scales: Scales, most: int) -> str:
    if value is None:
        return MISSING
    factor, unit = scale_of(value, scales)
    return f"{digits(value / factor, most)} {unit}"
