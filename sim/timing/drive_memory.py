"""AdamW's states on a drive: extents and buffers, from an engine's blocks alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.host_state import tensor_bytes
from zenflow.rule.blocks import BlockShape
from zenflow.rule.sizes import (
    EXTENT_ELEMENTS,
    NUM_BUFFERS,
    extent_rows,
    tensor_ends,
    whole_sectors,
)

PLACES = 2
"""Number of places of an extent: one of the last checkpoint, and one that training writes."""


def check_on_drive(config: ZenFlowConfig) -> None:
    """Refuse settings whose states the engine does not put on a drive.

    Raises:
        ConfigError: A setting breaks its rule.
    """
    if config.topk_ratio not in (0, 1):
        raise ConfigError(
            f"topk_ratio={config.topk_ratio:g} lets columns change owner, which states on a drive "
            "can't: give topk_ratio 0, or leave state_on_drive out"
        )
    if not config.is_exact:
        raise ConfigError(
            f'update_rule="{config.update_rule}" passes over all states in every window: use '
            '"exact", or leave state_on_drive out'
        )


@dataclass(frozen=True, slots=True)
class StatesOnDrive:
    """Extents of an engine's states: the pieces that are read and written as one."""

    num_extents: int
    elements: int
    """Number of elements of all extents."""
    num_bytes: int
    """Bytes of one place of all extents."""
    largest: int
    """Bytes of a place of the largest extent."""

    @classmethod
    def of(cls, blocks: Sequence[BlockShape], config: ZenFlowConfig) -> StatesOnDrive:
        """Return the extents of these blocks.

        Raises:
            ConfigError: The engine does not put states of these settings on a drive.
        """
        check_on_drive(config)
        sizes = [
            whole_sectors(
                tensor_ends(
                    tensor_bytes(
                        config.host_state, last - first, block.num_rows, config.second_moment
                    )
                )[-1]
            )
            for block in blocks
            for first, last in extent_rows(0, block.num_deferred, block.num_rows, EXTENT_ELEMENTS)
        ]
        elements = sum(block.deferred_elements for block in blocks)
        return cls(len(sizes), elements, sum(sizes), max(sizes, default=0))

    @property
    def num_buffers(self) -> int:
        """Number of extents that host memory holds at a time."""
        return min(NUM_BUFFERS, self.num_extents)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers through which extents pass."""
        return self.num_buffers * self.largest

    @property
    def file_bytes(self) -> int:
        """Bytes of the drive that all extents take."""
        return PLACES * self.num_bytes
