"""Fewer bars for a page that stays small, without a second or a byte lost.

Bars shorter than a resolution are merged with others of their row that begin in the same interval
of that length. A merged bar keeps how many it stands for, the seconds in which they ran and their
bytes, and the page draws it as what it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from experiments.report.trace_view import Bar, TraceView

MOST_ROWS = 8
"""Largest depth of calls inside calls in one lane; deeper ones are left out, and counted."""
_FINEST = 1e-9
"""Seconds; finer times mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTrace:
    """Part of a trace that is drawn."""

    lanes: Sequence[Sequence[Bar]]
    """Spans in the order of the view's lanes, each in order of starts."""
    resolution: float
    """Seconds; bars shorter than this are merged. 0: none are."""
    num_hidden: int
    """Bars that lie too deep to be drawn."""

    @property
    def num_bars(self) -> int:
        """Bars in all lanes."""
        return sum(map(len, self.lanes))


def decimate(view: TraceView, most: int) -> DrawnTrace:
    """Return about ``most`` bars at most, with the finest resolution that allows it.

    The resolution doubles from a start, so it is at most twice what would do.
    """
    lanes = [[bar for bar in lane.bars if bar.row < MOST_ROWS] for lane in view.lanes]
    total = sum(map(len, lanes))
    drawn, resolution = lanes, 0.0
    # Once all lies in one interval, no coarser resolution makes it fewer.
    while sum(map(len, drawn)) > most and resolution <= view.seconds:
        # Spans without length take no time at all, so a start of 0 would not double.
        resolution = 2 * resolution or max(view.seconds / most, _FINEST)
        drawn = [_merged(bars, resolution) for bars in lanes]
    return DrawnTrace(lanes=drawn, resolution=resolution, num_hidden=view.num_spans - total)


def _merged(bars: Iterable[Bar], resolution: float) -> list[Bar]:
    found = []
    groups: dict[tuple[int, bool, int], list[Bar]] = defaultdict(list)
    for bar in bars:
        if bar.end - bar.start >= resolution:
            found.append(bar)
        else:
            groups[bar.row, bar.is_stall, int(bar.start / resolution)].append(bar)
    found += [_together(group) for group in groups.values()]
    return sorted(found, key=lambda bar: (bar.start, -bar.end))


def _together(group: Sequence[Bar]) -> Bar:
    by_name: dict[str, float] = defaultdict(float)
    for bar in group:
        by_name[bar.name] += bar.busy_seconds
    return replace(
        group[0],
        end=max(bar.end for bar in group),
        name=max(by_name, key=lambda name: by_name[name]),
        num_bytes=sum(bar.num_bytes for bar in group),
        busy_seconds=sum(by_name.values()),
        count=len(group),
    )
