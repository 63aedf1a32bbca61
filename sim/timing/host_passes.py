"""Host passes over a column's gradients: bytes of memory, and arithmetic.

One pass over an element's state reads and writes master and both moments and reads every gradient
that it applies; the last pass of a window writes the weight for upload, too. Each gradient is one
AdamW step under the exact rule; under the published one a window's gradients are added up, and
their mean is one. Compact state is decoded and encoded once in a pass besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sim.timing.changed_uploads import MARKING_STEPS, sends_changes
from zenflow.config import ZenFlowConfig
from zenflow.host_state import GROUP, HostState, SecondMoment, gradient_bytes, state_bytes
from zenflow.rule.sizes import AUTOMATIC_DEPTH

DECODING_STEPS = 0.5
"""Time in which a gradient of eight bits is decoded, in AdamW steps of an element.

Measured on one core of an AMD EPYC (Zen 4), from its cache: 0.53 with AVX-512, and 0.37 with AVX2
(records of `evidence.benchmarks.host_update`). One ratio stands for every host. Decoding has
neither roots nor divisions, so cores that are slow at these have a smaller one.
"""


STEP_SHARE: Mapping[SecondMoment, float] = {"element": 1.0, "factored": 0.55}
"""Time of a step's arithmetic, in AdamW steps of an element: without second moments there is
neither root nor division. Measured as `DECODING_STEPS` is, with AVX-512."""


@dataclass(frozen=True, slots=True)
class HostPass:
    """Work of the host on one element or on many.

    Examples:
        >>> replayed(waiting=2, size=2) * 1000  # two gradients, of a thousand elements
        HostPass(num_bytes=28000.0, steps=2000.0, elements=1000)
    """

    num_bytes: float = 0
    """Bytes of DRAM that are moved."""
    steps: float = 0
    """Arithmetic, in AdamW steps of an element."""
    elements: float = 0
    """Number of elements whose state is read and written."""

    def __add__(self, other: HostPass) -> HostPass:
        """Return the sum of two passes."""
        return HostPass(
            self.num_bytes + other.num_bytes,
            self.steps + other.steps,
            self.elements + other.elements,
        )

    def __mul__(self, count: float) -> HostPass:
        """Return the pass over so many elements."""
        return HostPass(self.num_bytes * count, self.steps * count, self.elements * count)


def replayed(
    waiting: int,
    size: float,
    host_state: HostState = "float32",
    second_moment: SecondMoment = "element",
) -> HostPass:
    """Return the pass that applies gradients that wait, of so many bytes, without an upload.

    Moves and AdamW steps alone: the time to decode and encode compact state is not in them.
    """
    moved = _moved_bytes(host_state, second_moment)
    return HostPass(moved + waiting * size, waiting * STEP_SHARE[second_moment], 1)


def replayed_by(
    config: ZenFlowConfig, dtype_bytes: int, waiting: int, *, coding: float
) -> HostPass:
    """Return the pass of a configuration that applies the gradients that wait.

    Args:
        config: The update rule's settings.
        dtype_bytes: Bytes of an element of the model.
        waiting: Number of gradients that have not been applied yet.
        coding: Time in which compact state is coded, in AdamW steps: `Host.compact_coding`.
    """
    size = gradient_bytes(config.gradient_link, dtype_bytes)
    decoding = DECODING_STEPS * waiting if config.rounds_gradients else 0
    coded = coding if config.is_compact else 0
    taken = replayed(waiting, size, config.host_state, config.second_moment)
    return taken + HostPass(steps=decoding + coded)


def _moved_bytes(host_state: HostState, second_moment: SecondMoment) -> float:
    """Return the bytes of an element's master and moments, read and written."""
    return 2 * state_bytes(host_state, 1, GROUP, second_moment) / GROUP


def added(dtype_bytes: int, *, is_first: bool) -> HostPass:
    """Return the pass that adds a gradient to its window's sum, which the first one starts."""
    return HostPass(dtype_bytes + (4 if is_first else 8))


def ended(
    config: ZenFlowConfig, dtype_bytes: int, *, waiting: int, is_direct: bool, coding: float
) -> HostPass:
    """Return the pass that ends a window; arguments are as in `replayed_by`.

    The published rule may read the window's only gradient (`is_direct`), and not a sum.
    """
    if config.is_exact:
        marks = sends_changes(config, dtype_bytes, waiting)
        marking = MARKING_STEPS[config.host_state] if marks else 0
        replay = replayed_by(config, dtype_bytes, waiting, coding=coding)
        return replay + HostPass(dtype_bytes, marking)
    read = dtype_bytes if is_direct else 4
    return HostPass(_moved_bytes("float32", "element") + read + dtype_bytes, 1, 1)


def is_direct(config: ZenFlowConfig, lag: int, count: int) -> bool:
    """Whether the published rule updates from the window's only gradient, in staging."""
    return not config.is_exact and count == 1 and lag <= 1


def window_passes(
    config: ZenFlowConfig, dtype_bytes: int, depth: int, *, coding: float
) -> tuple[HostPass, HostPass]:
    """Return the work of a whole window for an element: before its end, and at its end.

    At most `depth` gradients wait; other arguments are as in `replayed_by`.
    """
    window = config.update_interval
    direct = is_direct(config, config.effective_lag(), window)
    before = HostPass()
    if config.is_exact:
        for _ in range((window - 1) // depth):
            before += replayed_by(config, dtype_bytes, depth, coding=coding)
        waiting = 1 + (window - 1) % depth
        end = ended(config, dtype_bytes, waiting=waiting, is_direct=False, coding=coding)
        return before, end
    for index in range(0 if direct else window):
        before += added(dtype_bytes, is_first=index == 0)
    return before, ended(config, dtype_bytes, waiting=1, is_direct=direct, coding=coding)


def window_bytes(
    config: ZenFlowConfig, dtype_bytes: int, depth: int | None = None
) -> tuple[float, float]:
    """Return the DRAM bytes per element of a whole window: before its end, and at its end.

    Args:
        config: The update rule's settings.
        dtype_bytes: Bytes of an element of the model.
        depth: Largest number of gradients that wait; None is what the engine chooses where there
            is memory for it.
    """
    if depth is None:
        wanted = config.queue_depth or AUTOMATIC_DEPTH
        depth = min(wanted, config.update_interval)
    before, at_end = window_passes(config, dtype_bytes, depth, coding=0.0)
    return before.num_bytes, at_end.num_bytes
