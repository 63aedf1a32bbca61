"""Fewer bars for a page that stays small, without a second or a byte lost.

Bars shorter than a resolution are merged with others of their row that begin in the same interval
of that length. A merged block keeps how many bars it stands for, the seconds in which they ran
and their bytes, and the page draws it as what it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.report.trace_view import Bar, TraceView

MOST_ROWS = 8
"""Of calls inside calls in one lane; deeper ones are left out, and counted."""

_FINEST = 1e-9
"""Seconds; the page counts nanoseconds."""


@dataclass(frozen=True, slots=True)
class Block:
    """A bar, or several short ones in its place."""

    start: float
    end: float
    name: str
    """Of the bars that took most of the time."""
    step: int
    num_bytes: int
    row: int
    is_stall: bool
    count: int
    """Bars in it; 1 for a bar as it was."""
    busy_seconds: float
    """The bars' own seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTrace:
    """What is drawn of a trace."""

    lanes: Sequence[Sequence[Block]]
    """In the order of the view's lanes, each in order of starts."""
    resolution: float
    """Seconds; bars shorter than this are merged. 0: none are."""
    num_hidden: int
    """Bars that lie too deep to be drawn."""

    @property
    def num_blocks(self) -> int:
        """Blocks in all lanes."""
        return sum(map(len, self.lanes))


def decimate(view: TraceView, most: int) -> DrawnTrace:
    """Return about ``most`` blocks at most, with the finest resolution that allows it.

    The resolution doubles from a start, so it is at most twice what would do.
    """
    lanes = [[bar for bar in lane.bars if bar.row < MOST_ROWS] for lane in view.lanes]
    total = sum(map(len, lanes))
    hidden = view.num_spans - total
    if total <= most:
        drawn = [[_alone(bar) for bar in bars] for bars in lanes]
        return DrawnTrace(lanes=drawn, resolution=0.0, num_hidden=hidden)
    resolution = max(view.seconds / most, _FINEST)  # spans without length take no time at all
    while True:
        drawn = [_merged(bars, resolution) for bars in lanes]
        # Once all lies in one interval, no coarser resolution makes it fewer.
        if sum(map(len, drawn)) <= most or resolution > view.seconds:
            return DrawnTrace(lanes=drawn, resolution=resolution, num_hidden=hidden)
        resolution *= 2


def _merged(bars: Iterable[Bar], resolution: float) -> list[Block]:
    blocks = []
    groups: dict[tuple[int, bool, int], list[Bar]] = defaultdict(list)
    for bar in bars:
        if bar.seconds >= resolution:
            blocks.append(_alone(bar))
        else:
            groups[bar.row, bar.is_stall, int(bar.start / resolution)].append(bar)
    blocks += [_together(group) for group in groups.values()]
    return sorted(blocks, key=lambda block: (block.start, -block.end))


def _alone(bar: Bar) -> Block:
    return Block(
        bar.start, bar.end, bar.name, bar.step, bar.num_bytes, bar.row, bar.is_stall, 1,
        bar.seconds,
    )  # fmt: skip


def _together(group: Sequence[Bar]) -> Block:
    if len(group) == 1:
        return _alone(group[0])
    by_name: dict[str, float] = defaultdict(float)
    for bar in group:
        by_name[bar.name] += bar.seconds
    return Block(
        start=min(bar.start for bar in group),
        end=max(bar.end for bar in group),
        name=max(by_name, key=lambda name: by_name[name]),
        step=group[0].step,
        num_bytes=sum(bar.num_bytes for bar in group),
        row=group[0].row,
        is_stall=group[0].is_stall,
        count=len(group),
        busy_seconds=sum(bar.seconds for bar in group),
    )
