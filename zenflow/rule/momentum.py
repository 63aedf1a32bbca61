"""How far AdamW's momentum carries the weights: what late updates are corrected by.

One gradient g moves AdamW's weights in every later step, by (1 - beta1) beta1^i of what a steady g
would in the i-th, if the second moment stays as it is. Summed up:

- By momentum alone, j steps move the weights beta1 + ... + beta1^j times as far as the last step.
- Within j steps a gradient has done 1 - beta1^j of all that it ever does, and 1 - beta1 of it in
  the first.

Late weights are used in several forwards, each of which wants the weights of its own step. The
means over these forwards are what is right for all of them together.
"""

from __future__ import annotations

from functools import lru_cache


def steps_ahead(beta1: float, num_steps: int) -> float:
    """Return how far momentum alone goes in so many steps, in units of the last step.

    >>> steps_ahead(0.5, 2)
    0.75
    """
    return beta1 * (1.0 - beta1**num_steps) / (1.0 - beta1)


@lru_cache
def upload_lead(beta1: float, lag: int, num_forwards: int) -> float:
    """Return by how many of its last steps uploaded weights run ahead of the master.

    An upload that lands `lag` steps after it was made is used in forwards that want the weights of
    lag, lag + 1, ... steps later.

    Args:
        beta1: Decay of the first moment.
        lag: Number of steps from the upload's start to its landing.
        num_forwards: Number of forwards until the next landing.

    >>> upload_lead(0.5, 1, 2)  # the mean of 0.5 and 0.75
    0.625
    """
    ahead = [steps_ahead(beta1, lag + place) for place in range(num_forwards)]
    return sum(ahead) / len(ahead) if ahead else 0.0


@lru_cache
def fresh_share(beta1: float, num_forwards: int) -> float:
    """Return how far a gradient moves the weights on average over the forwards that follow it.

    In units of what it does in its own step: the mean of (1 - beta1^j) / (1 - beta1).

    Args:
        beta1: Decay of the first moment.
        num_forwards: Number of forwards before an update with this gradient in it lands.

    >>> fresh_share(0.5, 2)  # the mean of 1 and 1.5
    1.25
    """
    done = [1.0 + steps_ahead(beta1, later) for later in range(num_forwards)]
    return sum(done) / len(done) if done else 0.0
