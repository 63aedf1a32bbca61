"""AdamW of frameworks on the host: bytes of memory, arithmetic, and pages that are new.

PyTorch's loop and its foreach are passes of torch operations, which move more bytes than a kernel
does, and write temporaries. Memory for these is fresh where it is large: glibc gives blocks above
32 MiB back to the system, so that the kernel zeroes each page again in every step. Bytes are
counted, and ``evidence/benchmarks/host_optimizers.py`` measures them (record
2026-11-27_host-optimizers_amd-epyc). None comes from the time of a training step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sim.timing.costs import StepCosts
from sim.timing.segments import Segment
from zenflow.config import unknown_name
from zenflow.errors import ConfigError

KEPT_BYTES = 1 << 25
"""Largest block that glibc's `malloc` may keep when it is freed (DEFAULT_MMAP_THRESHOLD_MAX)."""
CLIP_BYTES = 12
"""Bytes of an element in float32 whose gradient is clipped: read for the norm, then scaled."""
_FLOAT = 4
"""Bytes of an element whose AdamW moves what `HOST_OPTIMIZERS` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptimizer:
    """An implementation of AdamW on the host, for one element in float32.

    Of a narrower type bytes are fewer in proportion.
    """

    moved: float
    """Bytes of memory, with the lines that are read before a new tensor is written."""
    steps: float = 1.0
    """Arithmetic in 16 bits, in AdamW steps of an element: each torch operation converts."""
    fresh: float = 0.0
    """Bytes of temporaries that may be new in every step."""
    is_listed: bool = False
    """Whether temporaries of all parameters are there at once, so that none is used again."""


HOST_OPTIMIZERS: Mapping[str, HostOptimizer] = {
    "fused": HostOptimizer(moved=28),
    # Decay (8), the first moment (12), the second's decay (8) and sum (12), root (8), division
    # (8), epsilon (8), and the step (16): 80; the root's list is written anew (4).
    "foreach": HostOptimizer(moved=84, steps=2.0, fresh=4, is_listed=True),
    # The same, parameter by parameter; the quotient is a tensor of its own, too.
    "loop": HostOptimizer(moved=88, steps=2.0, fresh=8),
}
"""PyTorch's AdamW on a CPU by name of the implementation; ``loop`` is its default there.

Measured on a core of Zen 4, with memory that is kept: 2.8 to 3.4 times the fused kernel's time,
where the bytes are 3.0 and 3.1 times; in 16 bits 2.0 times. Others found 5.1 on 56 cores of
Sapphire Rapids (pytorch/pytorch #123074) and, with fresh memory, 5.1 to 6.3 on two Xeon 8168
(ZeRO-Offload, arXiv 2101.06840, table 4) and 5 to 7 (DeepSpeed's CPUAdam)."""


def host_optimizer(name: str) -> HostOptimizer:
    """Return an implementation of AdamW on the host.

    Raises:
        ConfigError: There is none of this name.
    """
    if name not in HOST_OPTIMIZERS:
        raise ConfigError(f"optimizer {unknown_name(name, HOST_OPTIMIZERS)}")
    return HOST_OPTIMIZERS[name]


def fresh_bytes(costs: StepCosts, name: str, devices: int, width: int) -> float:
    """Return the bytes of a step's temporaries whose pages are new.

    Args:
        costs: Of one step.
        name: Key of `HOST_OPTIMIZERS`.
        devices: Devices that share each parameter evenly.
        width: Bytes of an element of the parameters that are updated.

    Raises:
        ConfigError: There is no such implementation.
    """
    chosen = host_optimizer(name)
    sizes = [size / devices for segment in costs.segments for size in _sizes(segment)]
    if not chosen.is_listed:
        sizes = [size for size in sizes if size * width > KEPT_BYTES]
    return sum(sizes) * chosen.fresh * width / _FLOAT


def _sizes(segment: Segment) -> list[float]:
    """Return the elements of each parameter of a segment; vectors are one, which is kept."""
    return [*(float(rows * columns) for rows, columns in segment.matrices), segment.vectors]
