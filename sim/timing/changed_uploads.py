"""Uploads of changed weights: their bytes on the link, and the host's time to tell them.

Which weights change goes by the learning rate over their size, which no model's shapes tell. So
a share is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from zenflow.config import ZenFlowConfig
from zenflow.host_state import GROUP, MARKED_BYTES, HostState, mark_bytes

CHANGED_AT = 6e-5
"""Learning rate, in root mean squares of the weights, that the assumed shares are of."""
_CHANGED_IN_A_STEP, _POWER = 0.019, 0.7
"""Share of bfloat16 weights that a window of one step changes at this rate, and the power of the
window's length that it grows by. In an open loop SmolLM2-135M changed 1.9, 5.3 and 13% of its
weights in windows of 1, 4 and 16 steps; the record 2026-11-27_changed_uploads_amd-epyc has 4.4%
in windows of 4, at 5e-5."""
MARKING_STEPS: Mapping[HostState, float] = {"float32": 2.0, "compact": 1.1}
"""Time in which a pass finds the upload before and marks changes, in AdamW steps of an element, by
the format of the state. Measured on one core of an AMD EPYC (Zen 4) with AVX-512, from its cache
(`evidence.benchmarks.host_update`)."""


def sends_changes(config: ZenFlowConfig, dtype_bytes: int, depth: int) -> bool:
    """Whether uploads are taken to have changed weights alone.

    Args:
        config: The update rule's settings.
        dtype_bytes: Bytes of an element of the model.
        depth: Largest number of a column's gradients that wait: all of a window's have to.
    """
    return is_still(config, dtype_bytes) and depth >= config.update_interval


def is_still(config: ZenFlowConfig, dtype_bytes: int) -> bool:
    """Whether the device is taken to make no fresh steps."""
    return config.uploads_changes and dtype_bytes == MARKED_BYTES


def changed_share(update_interval: int) -> float:
    """Return the share of weights that a window of so many steps is taken to change.

    >>> [round(changed_share(interval), 3) for interval in (1, 4, 16)]
    [0.019, 0.05, 0.132]
    """
    return min(1.0, _CHANGED_IN_A_STEP * math.pow(update_interval, _POWER))


def uploaded_bytes(config: ZenFlowConfig, dtype_bytes: int, depth: int) -> float:
    """Return the bytes of a weight in an upload; arguments as in `sends_changes`."""
    if not sends_changes(config, dtype_bytes, depth):
        return dtype_bytes
    marks = mark_bytes(GROUP) / GROUP
    return marks + dtype_bytes * changed_share(config.update_interval)
