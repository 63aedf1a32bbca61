"""Corrections for late weights: how far AdamW's momentum carries them.

A gradient that is AdamW's t-th moves the weights in that step and in all later ones. As long as
second moment and rate stay, its motion in the i-th of these steps, i from 0, is

    (1 - beta1) beta1^i / (1 - beta1^(t + i))

in units of rate times gradient over root of the second moment. The denominator is the bias
correction of that step. `fresh_share` and `upload_lead` sum such motions up.

Late weights serve several forward passes, and each would ideally see the weights of its own step.
The mean over these passes is a compromise that answers gradients too soon: the first passes see
what comes later, and the motion of a gradient grows ever more slowly. So both functions aim at
AdamW's weights of some steps before, which `delay` gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate


def delay(beta1: float, num_forwards: int) -> float:
    """Return by how many steps forwards are to be behind AdamW's weights on average.

    With m = beta1 / (1 - beta1), the steps that momentum remembers, the delay is
    3/2 m (n^2 - 1) / (3 m + n + 2)^2. One forward needs none, and neither does AdamW without
    momentum. The formula is a fit. The study `stability` shows what noise it leaves.

    Args:
        beta1: Decay of the first moment.
        num_forwards: Number of forwards between two landings, n.

    >>> [round(delay(0.9, n), 2) for n in (1, 4, 16)]
    [0.0, 0.19, 1.7]
    """
    memory = beta1 / (1.0 - beta1)
    return 1.5 * memory * (num_forwards**2 - 1) / (3.0 * memory + num_forwards + 2) ** 2


def fresh_share(beta1: float, num_forwards: int, late: float, count: int) -> float:
    """Return the rule's `share`: a gradient's mean motion over the forwards before its upload.

    Args:
        beta1: Decay of the first moment.
        num_forwards: Number of forwards before an update with this gradient in it lands.
        late: Number of steps by which forwards are to be behind, that of S forwards.
        count: Number of AdamW's steps, the gradient's own included, t.

    Returns:
        Motion in units of rate times gradient over root of the second moment; 0 for no forward.

    >>> fresh_share(0.5, 2, 0.0, 1000)  # the mean of 0.5 and 0.75
    0.625
    """
    return _share(beta1, num_forwards, late, min(count, _settled(beta1)))


def upload_lead(beta1: float, lag: int, num_forwards: int, late: float, count: int) -> float:
    """Return the rule's `lead`: how far an upload runs ahead, in units of the last displacement.

    An upload lands `lag` steps after its window's end. Its forwards would ideally see the weights
    of lag, lag + 1, ... steps later.

    Args:
        beta1: Decay of the first moment.
        lag: Number of steps from the upload's start to its landing.
        num_forwards: Number of forwards until the next landing.
        late: Number of steps by which these forwards are to be behind.
        count: Number of AdamW's steps that are in the upload, t.

    >>> upload_lead(0.5, 1, 2, 0.0, 1000)  # the mean of 0.5 and 0.75
    0.625
    """
    return _lead(beta1, lag, num_forwards, late, min(count, _settled(beta1)))


@lru_cache
def _settled(beta1: float) -> int:
    """Return a count from which on the bias correction changes no bit."""
    return 1 if beta1 == 0.0 else math.ceil(-54.0 / math.log2(beta1))


@lru_cache
def _share(beta1: float, num_forwards: int, late: float, count: int) -> float:
    if not num_forwards:
        return 0.0
    steps = range(num_forwards)
    moved = [0.0, *accumulate(beta1**i / (1.0 - beta1 ** (count + i)) for i in steps)]
    seen = [_between(moved, later - late) for later in range(1, num_forwards + 1)]
    return (1.0 - beta1) * sum(seen) / num_forwards


@lru_cache
def _lead(beta1: float, lag: int, num_forwards: int, late: float, count: int) -> float:
    steps = range(1, lag + num_forwards)
    last = 1.0 - beta1**count
    ahead = [0.0, *accumulate(beta1**i * last / (1.0 - beta1 ** (count + i)) for i in steps)]
    # Steps back in time are displacements, about as long as the last one.
    places = (lag + later - late for later in range(num_forwards))
    return sum(_between(ahead, place) + min(place, 0.0) for place in places) / num_forwards


def _between(sums: Sequence[float], place: float) -> float:
    """Return the sum of so many terms, of the last one a part; 0 for a negative number."""
    whole = max(0, math.floor(place))
    part = max(0.0, place - whole)
    return sums[whole] if part == 0.0 else (1.0 - part) * sums[whole] + part * sums[whole + 1]
