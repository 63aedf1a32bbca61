"""What the engine allocates, from shapes and a configuration alone: its `MemoryPlan` and more.

Says to the byte what `zenflow.surface.memory_plan` says of a running engine, and what comes and
goes within a step besides. Blocks and phases are the engine's own code.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sim.memory.parts import rounded
from sim.timing.block_plan import blocks_of, ring_of
from sim.timing.costs import is_split
from zenflow.config import ZenFlowConfig
from zenflow.report import MemoryPlan
from zenflow.rule.blocks import BlockShape
from zenflow.rule.calendar import WindowCalendar

Shape = tuple[int, ...]

# As in zenflow.columns.host_rows and zenflow.columns.device_rows, which load torch.
_ALIGNMENT = 64
_BANK_ELEMENTS = 1 << 24
_FLOAT, _INDEX = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of one engine, by what they are for."""

    host_state: int
    """Bytes of masters and both moments of deferred elements, float32."""
    accumulators: int
    """Bytes of windows' sums."""
    steps: int
    """Bytes of Adam's step counts, one for each deferred column."""
    staging: int
    """Pinned bytes of the last step's gradients."""
    upload_buffer: int
    """Bytes of one upload buffer, as asked for: see `sim.memory.parts.rounded`."""
    num_uploads: int
    """Number of upload buffers."""
    device_state: int
    """Bytes of moments and masters of important columns and of whole parameters."""
    column_vectors: int
    """Bytes of scores, energies, ownership and indices of split parameters' columns."""
    packed: int
    """Bytes of packed gradients on a device without a ring: the largest matrix's, twice."""
    ring: int
    """Bytes of the ring through which released gradients leave a GPU."""
    block: int
    """Number of deferred elements of the largest block."""
    deferred: int
    """Number of elements that the host owns."""
    important: int
    """Number of elements of important columns."""
    resident: int
    """Number of elements of parameters that are not split."""
    bucket: int
    """Number of elements of the largest bucket: what is copied together."""
    bank: int
    """Number of elements of the largest bank: important columns that are updated together."""
    dtype_bytes: int
    """Bytes of an element of the model."""

    @property
    def num_params(self) -> int:
        """Elements of all parameters."""
        return self.deferred + self.important + self.resident

    @property
    def uploads(self) -> int:
        """Bytes of all upload buffers, as asked for."""
        return self.upload_buffer * self.num_uploads

    @property
    def rounding(self) -> int:
        """Bytes that torch's pinned allocator adds to the upload buffers on a GPU."""
        return (rounded(self.upload_buffer) - self.upload_buffer) * self.num_uploads

    def plan(self, *, has_ring: bool) -> MemoryPlan:
        """Return the engine's own plan, which leaves the rounding out.

        Args:
            has_ring: Whether gradients leave through a ring: in release mode on a GPU.
        """
        pinned = self.staging + self.uploads
        return MemoryPlan(
            num_params=self.num_params,
            split_params=self.deferred + self.important,
            model_bytes=self.num_params * self.dtype_bytes,
            host_bytes=self.host_state + self.accumulators + self.steps + pinned,
            pinned_bytes=pinned,
            device_extra_bytes=self.device_state + self.column_vectors,
            device_ring_bytes=self.ring if has_ring else self.packed,
        )


def engine_memory(
    shapes: Sequence[Shape], config: ZenFlowConfig, dtype_bytes: int
) -> EngineMemory:
    """Return what an engine takes for parameters of these shapes, in order of registration.

    Args:
        shapes: Of each trainable parameter, tied ones once.
        config: The update rule's settings; the window length is fixed.
        dtype_bytes: Bytes of an element of the model.
    """
    return _engine_memory(tuple(shapes), config, dtype_bytes)


@functools.lru_cache(maxsize=256)  # a search asks for the same one again and again
def _engine_memory(
    shapes: tuple[Shape, ...], config: ZenFlowConfig, dtype_bytes: int
) -> EngineMemory:
    sizes = [math.prod(shape) for shape in shapes]
    split = [
        (shape[0], size // shape[0])
        for shape, size in zip(shapes, sizes, strict=True)
        if len(shape) > 1 and is_split(size, config)
    ]
    blocks = blocks_of(tuple(split), config)
    columns = [0] * len(split)
    for block in blocks:
        columns[block.matrix] += block.num_deferred
    packed = [rows * own * dtype_bytes for (rows, _), own in zip(split, columns, strict=True)]
    deferred = sum(block.deferred_elements for block in blocks)
    num_split = sum(rows * width for rows, width in split)
    resident = sum(sizes) - num_split
    num_residents = len(shapes) - len(split)
    important_columns = sum(width for _, width in split) - sum(columns)
    own_master = _FLOAT if dtype_bytes < _FLOAT else 0
    lag = config.effective_lag()
    return EngineMemory(
        host_state=3 * _FLOAT * deferred,
        accumulators=_FLOAT * deferred * num_accumulators(config),
        steps=_INDEX * sum(columns),
        staging=sum(_aligned(size) for size in packed),
        upload_buffer=_upload_buffer(blocks, config, dtype_bytes),
        num_uploads=lag if config.rolling else 1,
        device_state=3 * _FLOAT * (num_split - deferred)
        + _INDEX * important_columns
        + (2 * _FLOAT + own_master) * resident
        + _FLOAT * num_residents,
        column_vectors=(2 * _FLOAT + 1 + _INDEX) * sum(width for _, width in split),
        packed=2 * max(packed, default=0),
        ring=ring_of(blocks, dtype_bytes),
        block=max((block.deferred_elements for block in blocks), default=0),
        deferred=deferred,
        important=num_split - deferred,
        resident=resident,
        bucket=_largest((b.bucket, b.num_columns * b.num_rows) for b in blocks),
        bank=_largest_bank(split, columns),
        dtype_bytes=dtype_bytes,
    )


def num_accumulators(config: ZenFlowConfig) -> int:
    """Return how many sums of a window's gradients each block has, with a fixed window length.

    As `zenflow.surface.arguments.num_accumulators_for`, which says why, without a controller.
    """
    if config.deferred_moments == "step":
        return 0
    if config.update_interval == 1:
        return 0 if config.effective_lag() <= 1 else 2
    return 1 if not config.overlap_step or config.lag == 1 else 2


def _upload_buffer(blocks: Sequence[BlockShape], config: ZenFlowConfig, dtype_bytes: int) -> int:
    """Return the bytes of the largest boundary step whose updates land later."""
    if not config.overlap_step:
        return 0
    sizes = [_aligned(block.deferred_elements * dtype_bytes) for block in blocks]
    return _largest(zip(WindowCalendar(config, blocks).phases(), sizes, strict=True))


def _largest(sizes: Iterable[tuple[int, int]]) -> int:
    """Return the largest sum of sizes with the same key; 0 if there are none."""
    sums: Counter[int] = Counter()
    for key, size in sizes:
        sums[key] += size
    return max(sums.values(), default=0)


def _largest_bank(split: Sequence[tuple[int, int]], deferred: Sequence[int]) -> int:
    """Return the elements of the largest bank, of columns of one length."""
    open_banks: Counter[int] = Counter()
    largest = 0
    for (rows, width), own in zip(split, deferred, strict=True):
        more = (width - own) * rows
        filled = open_banks[rows]
        open_banks[rows] = more if filled + more > _BANK_ELEMENTS else filled + more
        largest = max(largest, open_banks[rows])
    return largest


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
