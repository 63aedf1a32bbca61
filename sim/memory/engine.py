"""Memory of the engine, from shapes and a configuration alone: its `MemoryPlan` and more.

Equal to the byte to what `zenflow.surface.memory_plan` says of a running engine; temporaries
within a step are here besides. Blocks and phases are the engine's own code.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.hardware.profile import HardwareProfile
from sim.timing.block_plan import blocks_of, host_memory_of, laid_out
from sim.timing.costs import is_split
from sim.timing.division import Division
from sim.timing.host_memory import HostMemory, groups_rows, largest
from zenflow.config import ZenFlowConfig
from zenflow.host_state import GradientLink, column_bytes, gradient_bytes
from zenflow.report import MemoryPlan
from zenflow.rule.sizes import (
    BANK_ELEMENTS,
    COLUMN_BYTES,
    FRESH_COLUMN_BYTES,
    FRESH_ROW_BYTES,
    GATHERED_BYTES,
    GATHERED_COPIES,
    SAVED_COLUMN_BYTES,
    ring_bytes,
)

Shape = tuple[int, ...]

_FLOAT, _INDEX = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of one engine, by purpose. See `engine_memory`."""

    host: HostMemory
    """Memory of the host."""
    depth: int
    """Largest number of a column's gradients that wait on the host."""
    device_state: int
    """Bytes of moments and masters of important columns and of whole parameters."""
    column_vectors: int
    """Bytes of what the device keeps for each column and row of split parameters."""
    saved_vectors: int
    """Bytes of owners, step counts and moving averages of columns and rows in a checkpoint."""
    packed: int
    """Bytes of packed gradients on a device without a ring: the largest matrix's, twice."""
    block: int
    """Number of deferred elements of the largest block."""
    split: int
    """Number of elements of split parameters that the device has."""
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
    gathered: int = 0
    """Bytes in which uploads of several hosts become whole columns, under DDP."""

    @property
    def deferred(self) -> int:
        """Number of elements that the host owns."""
        return self.host.deferred

    @property
    def num_params(self) -> int:
        """Elements of all parameters."""
        return self.split + self.resident

    @property
    def pool(self) -> int:
        """Pinned bytes in which gradients wait on the host, beside staging."""
        return self.host.pool(self.depth)

    @property
    def ring(self) -> int:
        """Bytes of the ring through which released gradients leave a GPU."""
        return _ring(self.host.matrices, self.host.config.gradient_link, self.dtype_bytes)

    @property
    def uploads(self) -> int:
        """Bytes of all upload buffers."""
        return self.host.upload_buffer * self.host.num_uploads

    @property
    def sent(self) -> float:
        """Bytes of a step's deferred gradients on the link."""
        return self.deferred * gradient_bytes(self.host.config.gradient_link, self.dtype_bytes)

    @property
    def training_weights(self) -> int:
        """Bytes of training's weights under `eval()`, beside the memory of gradients."""
        return self.host.training_weights(self.depth)

    @property
    def bank_temporaries(self) -> int:
        """Bytes that the update of the largest bank takes for a while."""
        return 3 * _FLOAT * self.bank

    @property
    def float_gradients(self) -> int:
        """Bytes of the float32 gradients of whole tensors, where theirs are not float32."""
        return self.resident * (_FLOAT if self.dtype_bytes < _FLOAT else 0)

    def divided(self, division: Division) -> EngineMemory:
        """Return one device's part, where several divide the work.

        What is kept for each column and row is the same on all of them.

        Raises:
            ConfigError: As `HostMemory.divided`.
        """
        if division.host == division.device == 1:
            return self
        parts: dict[str, int] = {
            name: -(-getattr(self, name) // division.device)
            for name in (
                "device_state",
                "split",
                "important",
                "resident",
                "bucket",
                "bank",
            )
        }
        parts |= {name: -(-getattr(self, name) // division.host) for name in ("packed", "block")}
        host = self.host.divided(division.host)
        if division.host > division.device:
            whole = min(GATHERED_BYTES, host.upload_buffer * division.host)
            parts["gathered"] = GATHERED_COPIES * whole
        return replace(self, host=host, **parts)

    def on(self, hardware: HardwareProfile, reserve: float = 0.0) -> EngineMemory:
        """Return the need with as many waiting gradients as a machine's host has room for.

        Args:
            hardware: The machine.
            reserve: Bytes of the host that have to stay free.
        """
        num_own = self.important + self.resident
        return replace(self, depth=self.host.depth_on(hardware, self.num_params, num_own, reserve))

    def most_depth(self, hardware: HardwareProfile, reserve: float = 0.0) -> int:
        """Return the largest depth up to the usual one that a machine's host has room for.

        Args:
            hardware: The machine.
            reserve: Bytes of the host that have to stay free.
        """
        num_own = self.important + self.resident
        return self.host.most_depth(hardware, self.num_params, num_own, reserve)

    def plan(self, *, has_ring: bool) -> MemoryPlan:
        """Return the engine's own plan.

        Args:
            has_ring: Whether gradients leave through a ring: in release mode on a GPU.
        """
        host = self.host
        pinned = host.staging + self.pool + self.uploads
        return MemoryPlan(
            num_params=self.num_params,
            split_params=self.split,
            model_bytes=self.num_params * self.dtype_bytes,
            host_bytes=host.state
            + host.buffers
            + host.sums
            + host.steps
            + pinned
            + self.training_weights,
            pinned_bytes=pinned,
            queue_depth=self.depth,
            device_extra_bytes=self.device_state + self.column_vectors,
            device_ring_bytes=(self.ring if has_ring else self.packed) + self.gathered,
            device_step_bytes=self.important * self.dtype_bytes
            + self.float_gradients
            + self.bank_temporaries,
            buffer_bytes=host.buffers,
            drive_bytes=0 if host.drive is None else host.drive.file_bytes,
        )


@functools.lru_cache(maxsize=256)  # asked for at several moments of each setting's step
def _ring(matrices: tuple[tuple[int, int], ...], link: GradientLink, dtype_bytes: int) -> int:
    return ring_bytes((count, column_bytes(link, rows, dtype_bytes)) for count, rows in matrices)


def can_divide(
    shapes: Sequence[Shape], config: ZenFlowConfig, dtype_bytes: int, division: Division
) -> bool:
    """Whether devices may share the host's state as a division says; arguments as elsewhere.

    Groups of rows with a common exponent can't be cut, and uploads of changed weights are for one.
    """
    if config.uploads_changes and division.host > 1:
        return False
    if not groups_rows(config):
        return True
    return engine_memory(shapes, config, dtype_bytes).host.cut_rows(division.host) is None


def engine_memory(
    shapes: Sequence[Shape], config: ZenFlowConfig, dtype_bytes: int, *, on_drive: bool = False
) -> EngineMemory:
    """Return an engine's memory for parameters of these shapes, in order of registration.

    As many gradients wait as the engine chooses where it has memory for them; `EngineMemory.on`
    says how many on a machine.

    Args:
        shapes: Of each trainable parameter, tied ones once.
        config: The update rule's settings; the window length is fixed.
        dtype_bytes: Bytes of an element of the model.
        on_drive: Whether the host's states are on a drive.

    Raises:
        ConfigError: The engine does not put states of these settings on a drive.

    Examples:
        Elements of one square matrix, of which at most a tenth of the columns are the device's:

        >>> need = engine_memory([(1024, 1024)], ZenFlowConfig(topk_ratio=0.1), dtype_bytes=2)
        >>> need.important, need.deferred
        (98304, 950272)
    """
    found = _engine_memory(tuple(shapes), laid_out(config), dtype_bytes, on_drive)
    host = replace(found.host, config=config)
    return replace(found, host=host, depth=host.depth(math.inf))


@functools.lru_cache(maxsize=256)  # a search asks for the same one again and again
def _engine_memory(
    shapes: tuple[Shape, ...],
    config: ZenFlowConfig,
    dtype_bytes: int,
    on_drive: bool,
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
    link = config.gradient_link
    packed = [
        own * column_bytes(link, rows, dtype_bytes)
        for (rows, _), own in zip(split, columns, strict=True)
    ]
    host = host_memory_of(tuple(split), config, dtype_bytes, on_drive=on_drive)
    deferred = host.deferred
    num_split = sum(rows * width for rows, width in split)
    resident = sum(sizes) - num_split
    num_residents = len(shapes) - len(split)
    important_columns = sum(width for _, width in split) - sum(columns)
    own_master = _FLOAT if dtype_bytes < _FLOAT else 0
    vectors = COLUMN_BYTES * sum(width for _, width in split)
    if config.is_exact:
        vectors += sum(FRESH_ROW_BYTES * r + FRESH_COLUMN_BYTES * c for r, c in split)
    if (
        config.is_factored
    ):  # factors of quotients are apart from shares, and those of rows are ones
        vectors += _FLOAT * (sum(c for _, c in split) + max((r for r, _ in split), default=0))
    saved = SAVED_COLUMN_BYTES * sum(width for _, width in split) + _FLOAT * num_residents
    saved += _FLOAT * sum(rows for rows, _ in split) if config.is_exact else 0
    return EngineMemory(
        host=host,
        depth=host.depth(math.inf),
        device_state=(2 if config.is_factored else 3) * _FLOAT * (num_split - deferred)
        + _INDEX * important_columns
        + (2 * _FLOAT + own_master) * resident
        + _FLOAT * num_residents,
        column_vectors=vectors,
        saved_vectors=saved,
        packed=2 * max(packed, default=0),
        block=max((block.deferred_elements for block in blocks), default=0),
        split=num_split,
        important=num_split - deferred,
        resident=resident,
        bucket=largest((b.bucket, b.num_columns * b.num_rows) for b in blocks),
        bank=_largest_bank(split, columns),
        dtype_bytes=dtype_bytes,
    )


def _largest_bank(split: Sequence[tuple[int, int]], deferred: Sequence[int]) -> int:
    """Return the elements of the largest bank, of columns of one length."""
    open_banks: Counter[int] = Counter()
    largest = 0
    for (rows, width), own in zip(split, deferred, strict=True):
        more = (width - own) * rows
        filled = open_banks[rows]
        open_banks[rows] = more if filled + more > BANK_ELEMENTS else filled + more
        largest = max(largest, open_banks[rows])
    return largest
