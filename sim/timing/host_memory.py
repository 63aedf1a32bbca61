"""The engine's memory on the host, from its blocks alone, and how many gradients wait there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from sim.hardware.profile import HardwareProfile
from sim.timing.drive_memory import StatesOnDrive
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.host_state import GROUP, MARKED_BYTES, column_bytes, mark_bytes, state_bytes
from zenflow.rule.blocks import BlockShape
from zenflow.rule.calendar import WindowCalendar
from zenflow.rule.sizes import packed_into, pool_bytes, queue_depth

PROCESS_BYTES = 2e9
"""Bytes of the host for each device's interpreter, libraries and data loader. Estimated."""

# As in zenflow.columns.host_rows and zenflow.step.engine, which load torch.
_ALIGNMENT = 64
_SPARE_SHARE = 0.5
_FLOAT, _INDEX = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of one engine on the host, in bytes unless said otherwise."""

    config: ZenFlowConfig
    """Settings of the update rule."""
    deferred: int
    """Number of elements that the host owns."""
    matrices: tuple[tuple[int, int], ...]
    """Number of columns that the host owns, and of their rows, of each split matrix."""
    staging: int
    """Pinned bytes of one step's gradients."""
    upload_buffer: int
    """Bytes of one upload buffer, as asked for: the largest boundary step that lands later."""
    num_uploads: int
    """Number of upload buffers."""
    dtype_bytes: int
    """Bytes of an element of the model."""
    drive: StatesOnDrive | None = None
    """Extents of the states, where these are on a drive; None in memory."""
    columns: int = field(init=False, repr=False, compare=False)
    """Number of columns that the host owns."""
    state: int = field(init=False, repr=False, compare=False)
    """Bytes of masters and moments in memory."""

    def __post_init__(self) -> None:
        """Count columns and their state once, as plans ask for them thousands of times."""
        columns: dict[int, int] = {}
        for count, rows in self.matrices:
            columns[rows] = columns.get(rows, 0) + count
        kind, second = self.config.host_state, self.config.second_moment
        state = [state_bytes(kind, count, rows, second) for rows, count in columns.items()]
        object.__setattr__(self, "columns", sum(columns.values()))
        object.__setattr__(self, "state", 0 if self.drive is not None else sum(state))

    @property
    def buffers(self) -> int:
        """Bytes of the buffers through which states of a drive pass."""
        return 0 if self.drive is None else self.drive.buffer_bytes

    @property
    def steps(self) -> int:
        """Bytes of Adam's step counts, one for each column."""
        return _INDEX * self.columns

    @property
    def sums(self) -> int:
        """Bytes of the published rule's sums: two, or one without overlap."""
        config = self.config
        if config.is_exact or config.update_interval == 1:
            return 0
        return _FLOAT * self.deferred * (2 if config.overlap_step else 1)

    def divided(self, parts: int) -> HostMemory:
        """Return one device's part, where several share the deferred elements evenly.

        A column has a step count on each of them, as its rows may be divided.

        Raises:
            ConfigError: Rows that share an exponent would be divided, or states on a drive.
        """
        config = self.config
        if self.drive is not None and parts > 1:
            raise ConfigError(
                "states on a drive are of one process: take one device, or leave state_on_drive "
                "out"
            )
        if config.uploads_changes and parts > 1:
            raise ConfigError(
                f"uploads='changed' is for one process, but {parts} devices share the host's "
                "state: take one device, or leave uploads out"
            )
        if groups_rows(config) and (rows := self.cut_rows(parts)) is not None:
            name = "host_state='compact'" if config.is_compact else "gradient_link='e4m3'"
            raise ConfigError(
                f"{name} needs a multiple of {GROUP} rows of a matrix on each of {parts} devices, "
                f"but {rows:,} rows are {-(-rows // parts):,} on a device: leave it out, or use "
                "another number of devices"
            )
        deferred, staging, upload = (
            -(-size // parts) for size in (self.deferred, self.staging, self.upload_buffer)
        )
        matrices = tuple((count, -(-rows // parts)) for count, rows in self.matrices)
        return replace(
            self, deferred=deferred, matrices=matrices, staging=staging, upload_buffer=upload
        )

    def cut_rows(self, parts: int) -> int | None:
        """Return the rows of the first matrix that so many parts would cut within a group of 64.

        None if there is no such matrix.
        """
        each = {rows: -(-rows // parts) for _, rows in self.matrices}
        return next((rows for rows, own in each.items() if own < rows and own % GROUP), None)

    def pool(self, depth: int) -> int:
        """Return the pinned bytes in which gradients queue beside staging."""
        return pool_bytes(self.staging, depth) if self.config.is_exact else 0

    def training_weights(self, depth: int) -> int:
        """Return the bytes of training's weights under `eval()` that gradients leave no room for.

        In all other memory that they need gradients wait at other times.
        """
        if not self.config.rounds_gradients:
            return 0
        sizes = [_aligned(count * rows * self.dtype_bytes) for count, rows in self.matrices]
        return packed_into(sizes, [_aligned(self.staging), _aligned(self.pool(depth))])[1]

    def depth(self, spare_bytes: float) -> int:
        """Return the number of a column's gradients that may wait, as the engine decides it.

        Args:
            spare_bytes: Host memory that may be used for them.
        """
        if not self.config.is_exact:
            return 1
        spare = spare_bytes / self.staging if self.staging else 0.0
        if self.config.is_compact:  # there it is part of the result, which no memory may change
            spare = math.inf
        return queue_depth(self.config.queue_depth, self.config.update_interval, spare)

    def depth_on(
        self, hardware: HardwareProfile, num_params: int, num_own: int, reserve: float = 0.0
    ) -> int:
        """Return the number of a column's gradients that may wait on a machine.

        The engine takes half of what its host state leaves free, at most.

        Args:
            hardware: The machine, whose devices each hold an engine.
            num_params: Number of elements of the model.
            num_own: Number of elements that the device owns.
            reserve: Bytes of the host that have to stay free.
        """
        free = self._free(hardware, num_params, num_own)
        spare = min(_SPARE_SHARE * free, max(0.0, free - reserve))
        return self.depth(spare / hardware.num_devices)

    def most_depth(
        self, hardware: HardwareProfile, num_params: int, num_own: int, reserve: float = 0.0
    ) -> int:
        """Return the largest depth, up to the usual one, that a machine has room for.

        It is for plans of compact state, whose depth the engine takes from its configuration
        alone. Arguments are as in `depth_on`.
        """
        spare = max(0.0, self._free(hardware, num_params, num_own) - reserve)
        pools = spare / hardware.num_devices / self.staging if self.staging else math.inf
        return queue_depth(self.config.queue_depth, self.config.update_interval, pools)

    def _free(self, hardware: HardwareProfile, num_params: int, num_own: int) -> float:
        """Return the bytes of a host that all engines' states leave free."""
        held = self.state + self.buffers + self.sums + self.steps + self.staging
        held += self.upload_buffer * self.num_uploads
        own = float(held) + PROCESS_BYTES
        if hardware.device.is_cpu:  # weights, and what it updates itself, are there as well
            own += self.dtype_bytes * num_params + 3 * _FLOAT * num_own
        return max(0.0, hardware.host.dram_bytes.value - hardware.num_devices * own)


def host_memory(
    blocks: Sequence[BlockShape],
    config: ZenFlowConfig,
    dtype_bytes: int,
    *,
    on_drive: bool = False,
) -> HostMemory:
    """Return the memory on the host of an engine with these blocks, states there or on a drive."""
    columns: Counter[tuple[int, int]] = Counter()
    for block in blocks:
        columns[block.matrix, block.num_rows] += block.num_deferred
    # In order of registration, as the engine lays them out.
    matrices = tuple((count, rows) for (_, rows), count in sorted(columns.items()))
    return HostMemory(
        config=config,
        deferred=sum(block.deferred_elements for block in blocks),
        matrices=matrices,
        staging=_staging(matrices, config, dtype_bytes),
        upload_buffer=_upload_buffer(blocks, config, dtype_bytes),
        num_uploads=config.effective_lag() if config.rolling else 1,
        dtype_bytes=dtype_bytes,
        drive=StatesOnDrive.of(blocks, config) if on_drive else None,
    )


def _staging(matrices: Iterable[tuple[int, int]], config: ZenFlowConfig, dtype_bytes: int) -> int:
    """Return the bytes of one step's gradients; those of eight bits lie side by side."""
    link = config.gradient_link
    sizes = [count * column_bytes(link, rows, dtype_bytes) for count, rows in matrices]
    return sum(sizes if config.rounds_gradients else map(_aligned, sizes))


def groups_rows(config: ZenFlowConfig) -> bool:
    """Whether rows share exponents, by 64, which no division may cut."""
    return config.is_compact or config.rounds_gradients


def _upload_buffer(blocks: Sequence[BlockShape], config: ZenFlowConfig, dtype_bytes: int) -> int:
    """Return the bytes of the largest boundary step whose updates land later."""
    if not config.overlap_step:
        return 0
    sizes = [_aligned(block.deferred_elements * dtype_bytes) for block in blocks]
    if config.uploads_changes and dtype_bytes == MARKED_BYTES:
        marks = [_aligned(block.num_deferred * mark_bytes(block.num_rows)) for block in blocks]
        sizes = list(map(sum, zip(sizes, marks, strict=True)))
    return largest(zip(WindowCalendar(config, blocks).phases(), sizes, strict=True))


def largest(sizes: Iterable[tuple[int, int]]) -> int:
    """Return the largest sum of sizes with the same key; 0 if there are none."""
    sums: Counter[int] = Counter()
    for key, size in sizes:
        sums[key] += size
    return max(sums.values(), default=0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
