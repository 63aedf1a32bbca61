"""Committed records: their folder, the newest one of a name; and percentiles."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

from zenflow.errors import ConfigError
from zenflow.provenance import cpu_name

RESULTS = Path(__file__).resolve().parents[2] / "evidence" / "results"
"""Folder of committed records."""


def results_folder(name: str) -> Path:
    """Return where a record of today, made on this CPU, is committed."""
    cpu = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    return RESULTS / f"{time.strftime('%Y-%m-%d')}_{name}_{cpu}"


def newest(results: Path, name: str, file: str) -> Path | None:
    """Return the newest record of this name that holds a file; None if there is none."""
    return max((path.parent for path in results.glob(f"*_{name}_*/{file}")), default=None)


def newest_record(name: str, file: str) -> Path:
    """Return the folder of the newest committed record of this name that holds a file.

    Raises:
        ConfigError: This installation has none, since records come with a clone only.
    """
    found = newest(RESULTS, name, file)
    if found is None:
        raise ConfigError(
            f"{RESULTS} must have a record *_{name}_*/{file}, and has none: install from a clone "
            'of the repository, with pip install -e "."'
        )
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of all values don't exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
