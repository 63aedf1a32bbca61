"""Passes: seconds of each part of a step on the device, and of its launches on the host."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from sim.traced.windows import Window
from sim.traced.work import Kind, Work
from zenflow.trace.intervals import Interval, length, merge, subtract


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds of one part of a step, from the end of the part before to its own.

    Examples:
        >>> forward = PassTimes(wall=1.0, products=0.6, attention=0.1, other=0.2)
        >>> round(forward.idle, 1)  # seconds in which the device waited for launches
        0.1
    """

    wall: float = 0.0
    """Seconds in all, collectives that nothing hides left out."""
    products: float = 0.0
    """Seconds in which matrix products ran."""
    attention: float = 0.0
    """Seconds in which attention's kernels ran."""
    other: float = 0.0
    """Seconds in which nothing but other kernels ran."""
    host: float = 0.0
    """Seconds in which the host launched it, at most ``wall``; 0 where it is the device."""

    @property
    def busy(self) -> float:
        """Seconds in which the device worked."""
        return self.products + self.attention + self.other

    @property
    def idle(self) -> float:
        """Seconds in which the device did not work."""
        return self.wall - self.busy

    def __add__(self, more: PassTimes) -> PassTimes:
        """Return the sum of two parts' times."""
        return PassTimes(**{n: getattr(self, n) + getattr(more, n) for n in _NAMES})

    def __mul__(self, times: float) -> PassTimes:
        """Return the times of so many parts."""
        return PassTimes(**{name: getattr(self, name) * times for name in _NAMES})


_NAMES = [item.name for item in fields(PassTimes)]


def pass_times(
    windows: Sequence[Window],
    work: Iterable[Work],
    blocked: Iterable[Interval],
    *,
    is_cpu: bool = False,
) -> Iterator[tuple[Window, PassTimes]]:
    """Yield each window with its times on the device.

    A window ends on the device when its last kernel does, and not before the host has launched it:
    so the walls of all windows add up to the time from the first one's end to the last one's.

    Args:
        windows: Of all steps, in order and without gaps.
        work: What ran on the device.
        blocked: When the host waited, from and to.
        is_cpu: Whether the host is the device.
    """
    starts = [window.start for window in windows]

    def home(moment: float) -> int | None:
        index = bisect.bisect_right(starts, moment) - 1
        return index if index >= 0 and moment < windows[index].end else None

    members: list[list[Work]] = [[] for _ in windows]
    for piece in work:
        if (index := home(piece.launched)) is not None:
            members[index].append(piece)
    waits = merge(blocked)
    now = windows[0].start
    for window, own in zip(windows, members, strict=True):
        end = max([now, window.end, *(piece.end for piece in own)])
        launching = subtract([(window.start, window.end)], waits)
        host = 0.0 if is_cpu else length(launching)
        yield window, _times(own, now, end, host)
        now = end


def _times(own: Sequence[Work], start: float, end: float, host: float) -> PassTimes:
    def ran(*kinds: Kind) -> float:
        spans = ((max(start, piece.start), piece.end) for piece in own if piece.kind in kinds)
        return length(merge(span for span in spans if span[0] < span[1]))

    products, both = ran("products"), ran("products", "attention")
    busy = ran("products", "attention", "other", "copy")
    alone = ran("products", "attention", "other", "copy", "collective") - busy
    wall = end - start - alone
    return PassTimes(
        wall=wall,
        products=products,
        attention=both - products,
        other=busy - both,
        host=min(wall, host),
    )
