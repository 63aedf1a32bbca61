"""Columns: the results of many points, an array for each figure, and one point's as a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

OK, NO_ROOM, INVALID, FAILED = "ok", "does not fit", "invalid", "failed"
"""A point's status: predicted; too little memory; values that don't go together; its worker
died."""

RESULTS: Mapping[str, str] = {
    "status": "ok, does not fit, invalid or failed; only ok rows have times",
    "reason": "why there is no prediction",
    "step_seconds": "mean steady-state step",
    "stall_seconds": "of it the device waits",
    "stall_share": "stall_seconds / step_seconds",
    "selection_seconds": "part of both: selections of columns, spread over all steps",
    "tokens_per_second": "over all devices",
    "d2h_bytes": "to the host in a step, one device",
    "h2d_bytes": "to the device in a step, one device",
    "device_bytes": "memory of one device at its fullest",
    "host_bytes": "memory of one host for its devices",
    "staleness_steps": "largest age of a gradient when it lands; empty for other systems",
    "num_params": "of the model",
    "num_devices": "that train together",
    "num_hosts": "that have these devices",
    "device_name": "of the machine",
    "host_name": "of the machine",
    "link_name": "of the machine",
}
"""Columns of a table behind its axes; seconds and bytes."""
TEXTS = ("status", "reason", "device_name", "host_name", "link_name")
"""Columns of results that are no numbers."""
_COUNTS = ("staleness_steps", "num_params", "num_devices", "num_hosts")

_DIGITS = 12
"""Significant ones: a time's last digits depend on who simulates it."""
_POWERS = np.array([float(f"1e{exponent}") for exponent in range(300)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Results of N points; what a point has not is NaN, or an empty text."""

    points: NDArray[np.int64]
    """Indices of the points, (N,)."""
    columns: Mapping[str, NDArray[Any]]
    """Array of each name of `RESULTS`, (N,): texts as objects, the rest as float64."""

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.points)

    @classmethod
    def of(cls, points: Sequence[int] | NDArray[Any], values: Mapping[str, Any]) -> Batch:
        """Return a batch from arrays, or from one value for all points; the rest is missing."""
        columns = {}
        for name in RESULTS:
            value = values.get(name)
            if name in TEXTS:
                columns[name] = np.full(len(points), value or "", dtype=object)
            else:
                number = np.nan if value is None else value
                columns[name] = np.full(len(points), number, dtype=np.float64)
        return cls(points=np.asarray(points, dtype=np.int64), columns=columns)

    @classmethod
    def of_rows(cls, rows: Mapping[int, Row]) -> Batch:
        """Return the batch of points' rows, by index."""
        columns: dict[str, NDArray[Any]] = {}
        for name in RESULTS:
            values = [row.get(name) for row in rows.values()]
            if name in TEXTS:
                columns[name] = np.array([value or "" for value in values], dtype=object)
            else:
                numbers = [np.nan if value is None else value for value in values]
                columns[name] = np.array(numbers, dtype=np.float64)
        return cls(points=np.array(list(rows), dtype=np.int64), columns=columns)

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """Return all of these as one."""
        if not batches:
            return cls.of_rows({})
        return cls(
            points=np.concatenate([batch.points for batch in batches]),
            columns={
                name: np.concatenate([batch.columns[name] for batch in batches])
                for name in RESULTS
            },
        )

    def where(self, chosen: NDArray[Any]) -> Batch:
        """Return the points of a mask, or in the order of an array of places."""
        own = {name: column[chosen] for name, column in self.columns.items()}
        return Batch(points=self.points[chosen], columns=own)

    def sorted(self) -> Batch:
        """Return the table in the order of the grid."""
        return self.where(np.argsort(self.points, kind="stable"))

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Yield every point's row, which has what is known alone."""
        for place, point in enumerate(self.points.tolist()):
            row: Row = {}
            for name, column in self.columns.items():
                value = column[place]
                if name in TEXTS:
                    row |= {name: value} if value else {}
                elif not np.isnan(value):
                    row[name] = int(value) if name in _COUNTS else float(value)
            yield point, row

    def frame(self) -> pd.DataFrame:
        """Return the columns as a table."""
        import pandas as pd

        return pd.DataFrame(dict(self.columns))


def rounded(values: Any) -> NDArray[np.float64]:
    """Return numbers with as many significant digits as tables have."""
    numbers = np.atleast_1d(np.asarray(values, dtype=np.float64))
    usual = np.isfinite(numbers) & (numbers != 0)
    size = np.floor(np.log10(np.abs(np.where(usual, numbers, 1.0)))).astype(int)
    shift = _DIGITS - 1 - size
    power = _POWERS[np.minimum(np.abs(shift), len(_POWERS) - 1)]
    up = np.round(numbers * power) / power
    down = np.round(numbers / power) * power
    return np.where(usual, np.where(shift >= 0, up, down), numbers)
