"""Cost of fresh steps on the device: passes over memory, by bytes of each element.

Under the exact rule the device moves deferred weights by each gradient at once, as
`zenflow.step.fresh.steps` does, on the compute stream. Weights that land are moved by the gradient
that came since, on the stream that brings them. The product of gradient and factors is a float32
temporary. It is counted as traffic of device memory: no quantity of a profile says what a cache
keeps.
"""

from __future__ import annotations

from zenflow.config import ZenFlowConfig

_TEMPORARY_BYTES = 8
"""Bytes of a float32 that is written and read."""


def moved_bytes(dtype_bytes: int) -> int:
    """Return the bytes of moving an element: gradient and weight read, temporary, weight written.

    >>> moved_bytes(2)
    14
    """
    return 3 * dtype_bytes + _TEMPORARY_BYTES


def measured_bytes(config: ZenFlowConfig, dtype_bytes: int) -> int:
    """Return the bytes of measuring an element's row; columns are measured under either rule.

    With factored second moments the gradient is divided by their roots besides, whole.
    """
    divided = 2 * dtype_bytes + _TEMPORARY_BYTES if config.is_factored else 0
    return dtype_bytes + divided if config.is_exact else 0


def late_bytes(config: ZenFlowConfig, dtype_bytes: int, *, is_packed: bool, is_cpu: bool) -> int:
    """Return the bytes of moving an element that lands by the gradient that came since.

    Args:
        config: The update rule's settings.
        dtype_bytes: Bytes of an element of the model.
        is_packed: Whether its gradients lie packed in a ring; else they are gathered.
        is_cpu: Whether a CPU's lane does it, which works on a copy.
    """
    if not (config.is_exact and config.overlap_step):
        return 0
    more = (0 if is_packed else 2) + (2 if is_cpu else 0)
    return moved_bytes(dtype_bytes) + more * dtype_bytes
