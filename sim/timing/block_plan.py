"""Block plan: the engine's own blocks and windows, laid over a model's segments.

Blocks, phases and due steps come from `zenflow.rule`, the code that the engine runs: what is
simulated can't drift from what is done.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sim.timing.costs import StepCosts, is_split
from zenflow.config import ZenFlowConfig
from zenflow.rule.blocks import BlockShape, partition
from zenflow.rule.calendar import WindowCalendar
from zenflow.step.ring_size import ring_bytes


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """One block and where it belongs."""

    index: int
    shape: BlockShape
    segment: int
    """Index of its segment, in the order of forward."""
    elements: int
    """Deferred elements."""


@dataclass(frozen=True, slots=True)
class SegmentShare:
    """Who owns a segment's elements."""

    matrices: int
    """Number of split matrices."""
    split: int
    """Number of elements of split matrices."""
    deferred: int
    """Number of elements that the host owns."""
    important: int
    """Number of elements of important columns."""
    resident: int
    """Number of elements of parameters that stay on the device whole."""


class BlockPlan:
    """All blocks of a model under a configuration.

    Attributes:
        blocks: In backward order.
        shares: Of every segment, in the order of forward.
        ring: Bytes of the ring through which released gradients leave a GPU.
    """

    def __init__(self, costs: StepCosts, config: ZenFlowConfig) -> None:
        """Cut the model's matrices into blocks."""
        self.config = config
        shapes: list[tuple[int, int]] = []
        homes: list[int] = []
        for index, segment in enumerate(costs.segments):
            matrices = [m for m in segment.matrices if is_split(m[0] * m[1], config)]
            shapes += matrices
            homes += [index] * len(matrices)
        cut = blocks_of(tuple(shapes), config)
        self.blocks = [
            PlannedBlock(i, s, homes[s.matrix], s.deferred_elements) for i, s in enumerate(cut)
        ]
        split, deferred = Counter[int](), Counter[int]()
        for block in self.blocks:
            split[block.segment] += block.shape.num_columns * block.shape.num_rows
            deferred[block.segment] += block.elements
        of_segment = Counter(homes)
        self.shares = [
            SegmentShare(
                matrices=of_segment[index],
                split=split[index],
                deferred=deferred[index],
                important=split[index] - deferred[index],
                resident=segment.numel - split[index],
            )
            for index, segment in enumerate(costs.segments)
        ]
        self.ring = ring_of(cut, costs.dtype_bytes)

    @property
    def on_device(self) -> int:
        """Elements that the device updates at every step."""
        return sum(share.important + share.resident for share in self.shares)

    def calendar(self) -> WindowCalendar:
        """Return the engine's calendar over these blocks."""
        return WindowCalendar(self.config, [block.shape for block in self.blocks])


def blocks_of(
    shapes: tuple[tuple[int, int], ...], config: ZenFlowConfig
) -> tuple[BlockShape, ...]:
    """Return the blocks that split matrices of these shapes are cut into, in backward order."""
    return _blocks_of(shapes, config.topk_ratio, config.update_interval, config.block_elements)


@functools.lru_cache(maxsize=256)  # a search asks for the same ones again and again
def _blocks_of(
    shapes: tuple[tuple[int, int], ...],
    topk_ratio: float,
    update_interval: int,
    block_elements: int | None,
) -> tuple[BlockShape, ...]:
    return tuple(
        partition(
            shapes,
            topk_ratio=topk_ratio,
            update_interval=update_interval,
            block_elements=block_elements,
        )
    )


def ring_of(blocks: Iterable[BlockShape], dtype_bytes: int) -> int:
    """Return the bytes of the ring through which these blocks' gradients leave a GPU."""
    columns: Counter[tuple[int, int]] = Counter()
    for block in blocks:
        columns[block.matrix, block.num_rows] += block.num_deferred
    return ring_bytes((count, rows * dtype_bytes) for (_, rows), count in columns.items())


def takes_last_in(config: ZenFlowConfig, lag: int) -> bool:
    """Whether a window's update takes its last gradient in itself."""
    return config.deferred_moments == "step" or lag <= 1


def window_bytes(config: ZenFlowConfig, dtype_bytes: int) -> tuple[int, int]:
    """Return the DRAM bytes per element of a whole window: of its intake, and of its update."""
    window, is_fused = config.update_interval, takes_last_in(config, config.effective_lag())
    taken = range(window - is_fused)
    intake = sum(intake_bytes(config, dtype_bytes, is_first=index == 0) for index in taken)
    return intake, update_bytes(config, dtype_bytes, count=window, is_fused=is_fused)


def intake_bytes(config: ZenFlowConfig, dtype_bytes: int, *, is_first: bool) -> int:
    """Return the DRAM bytes per element by which a gradient in mid-window is taken in.

    Moments of every step: the gradient is read, both moments read and written. A window's sum: it
    is written first, then read and written.
    """
    if config.deferred_moments == "step":
        return dtype_bytes + 16
    return dtype_bytes + (4 if is_first else 8)


def update_bytes(config: ZenFlowConfig, dtype_bytes: int, *, count: int, is_fused: bool) -> int:
    """Return the DRAM bytes per element of a window's update over ``count`` gradients.

    Master and moments are read and written, the weight for upload is written; the last gradient
    is read where the update takes it in itself, the sum where there is one.
    """
    last = dtype_bytes if is_fused else 0
    has_sum = config.deferred_moments == "window" and count > is_fused
    return 24 + dtype_bytes + last + (4 if has_sum else 0)
