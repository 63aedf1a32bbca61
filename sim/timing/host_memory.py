"""The engine's memory on the host, from its blocks alone, and how many gradients wait there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sim.hardware.profile import HardwareProfile
from zenflow.config import ZenFlowConfig
from zenflow.rule.blocks import BlockShape
from zenflow.rule.calendar import WindowCalendar
from zenflow.rule.sizes import pool_bytes, queue_depth

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
    columns: int
    """Number of columns that the host owns."""
    staging: int
    """Pinned bytes of one step's gradients."""
    upload_buffer: int
    """Bytes of one upload buffer, as asked for: the largest boundary step that lands later."""
    num_uploads: int
    """Number of upload buffers."""

    @property
    def state(self) -> int:
        """Bytes of masters and both moments, float32."""
        return 3 * _FLOAT * self.deferred

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
        """
        deferred, staging, upload = (
            -(-size // parts) for size in (self.deferred, self.staging, self.upload_buffer)
        )
        return replace(self, deferred=deferred, staging=staging, upload_buffer=upload)

    def pool(self, depth: int) -> int:
        """Return the pinned bytes in which gradients queue beside staging."""
        return pool_bytes(self.staging, depth) if self.config.is_exact else 0

    def depth(self, spare_bytes: float) -> int:
        """Return the number of a column's gradients that may wait, as the engine decides it.

        Args:
            spare_bytes: Host memory that may be used for them.
        """
        if not self.config.is_exact:
            return 1
        spare = spare_bytes / self.staging if self.staging else 0.0
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
        held = self.state + self.sums + self.steps + self.staging
        held += self.upload_buffer * self.num_uploads
        own = float(held) + PROCESS_BYTES
        if hardware.device.is_cpu:  # weights, and what it updates itself, are there as well
            size = self.staging / self.deferred if self.deferred else 0.0
            own += size * num_params + 3 * _FLOAT * num_own
        count = hardware.num_devices
        free = max(0.0, hardware.host.dram_bytes.value - count * own)
        return self.depth(min(_SPARE_SHARE * free, max(0.0, free - reserve)) / count)


def host_memory(
    blocks: Sequence[BlockShape], config: ZenFlowConfig, dtype_bytes: int
) -> HostMemory:
    """Return the memory on the host of an engine with these blocks."""
    packed: Counter[int] = Counter()
    for block in blocks:
        packed[block.matrix] += block.deferred_elements * dtype_bytes
    return HostMemory(
        config=config,
        deferred=sum(block.deferred_elements for block in blocks),
        columns=sum(block.num_deferred for block in blocks),
        staging=sum(_aligned(size) for size in packed.values()),
        upload_buffer=_upload_buffer(blocks, config, dtype_bytes),
        num_uploads=config.effective_lag() if config.rolling else 1,
    )


def _upload_buffer(blocks: Sequence[BlockShape], config: ZenFlowConfig, dtype_bytes: int) -> int:
    """Return the bytes of the largest boundary step whose updates land later."""
    if not config.overlap_step:
        return 0
    sizes = [_aligned(block.deferred_elements * dtype_bytes) for block in blocks]
    return largest(zip(WindowCalendar(config, blocks).phases(), sizes, strict=True))


def largest(sizes: Iterable[tuple[int, int]]) -> int:
    """Return the largest sum of sizes with the same key; 0 if there are none."""
    sums: Counter[int] = Counter()
    for key, size in sizes:
        sums[key] += size
    return max(sums.values(), default=0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
