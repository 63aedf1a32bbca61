"""Corrections for late weights: how far AdamW's momentum carries them.

A gradient g moves AdamW's weights in all later steps. In the i-th of them, i from 0, it does
(1 - beta1) beta1^i of a steady g's motion, if the second moment stays as it is. Summed up:

- By momentum alone, j steps move the weights beta1 + ... + beta1^j times as far as the last step.
- Within j steps a gradient makes 1 - beta1^j of its whole motion, and 1 - beta1 of it in the first
step.

Late weights serve several forward passes. Ideally each would see the weights of its own step; the
mean over these passes is the compromise.
"""

from __future__ import annotations

from functools import lru_cache


def steps_ahead(beta1: float, num_steps: int) -> float:
    """Return the motion by momentum alone in so many steps, in units of the last displacement.

    >>> steps_ahead(0.5, 2)
    0.75
    """
    return beta1 * (1.0 - beta1**num_steps) / (1.0 - beta1)


@lru_cache
def upload_lead(beta1: float, lag: int, num_forwards: int) -> float:
    """Return the rule's `lead`: how far an upload runs ahead, in units of the last displacement.

    An upload lands `lag` steps after its window's end. Its forward passes would ideally see the
    weights of lag, lag + 1, ... steps later.

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
    """Return the rule's `share`: a gradient's mean motion over the forwards before its upload.

    The unit is the gradient's motion in its own step: the mean of (1 - beta1^j) / (1 - beta1) over
    j = 1 .. num_forwards, and 0 for no forward.

    Args:
        beta1: Decay of the first moment.
        num_forwards: Number of forwards before an update with this gradient in it lands.

    >>> fresh_share(0.5, 2)  # the mean of 1 and 1.5
    1.25
    """
    done = [1.0 + steps_ahead(beta1, later) for later in range(num_forwards)]
    return sum(done) / len(done) if done else 0.0
