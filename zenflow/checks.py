"""Checks of values that settings hold."""

from __future__ import annotations

import math
from numbers import Real
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Return whether the value is a finite number >= 0 (true and false are none)."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]
