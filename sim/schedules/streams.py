"""Streams: which layers of a model visit the device, and how many at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sim.schedules.schedule import refuse_below_1
from sim.timing.segments import Segment
from zenflow.errors import ConfigError
from zenflow.rule.sizes import LEAST_SLOTS, STREAMED_ELEMENTS, spread


class HasElements(Protocol):
    """Part of a model that knows its size."""

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """How a model's layers visit the device, as the arguments of `zenflow.stream_weights` say.

    Raises:
        ConfigError: A number breaks its rule.
    """

    resident_layers: int = 0
    """Number of layers that stay on the device, evenly spread over the depth."""
    slots: int = 3
    """Largest number of visiting layers on the device."""

    def __post_init__(self) -> None:
        """Check both numbers."""
        if self.resident_layers < 0:
            raise ConfigError(f"resident_layers must be 0 or more, got {self.resident_layers}")
        refuse_below_1("slots", self.slots)
        if self.slots < LEAST_SLOTS:
            raise ConfigError(
                f"slots must be at least {LEAST_SLOTS}, got {self.slots}: one layer computes "
                "while the next one comes"
            )

    def visiting(self, segments: Sequence[HasElements]) -> list[int]:
        """Return the segments whose weights visit the device, in the order of forward.

        Args:
            segments: Segments, or layers, of a whole model.

        Raises:
            ConfigError: There are fewer layers than are to stay.
        """
        layers = layers_of(segments)
        count = len(layers)
        if self.resident_layers > count:
            raise ConfigError(
                f"resident_layers must be at most {count}, the number of layers, got "
                f"{self.resident_layers}"
            )
        stay = spread(count, self.resident_layers)
        return [layer for rank, layer in enumerate(layers) if rank not in stay]


def layers_of(segments: Sequence[HasElements]) -> list[int]:
    """Return the segments that are a model's layers: those of the size with most parameters."""
    sizes = Counter(segment.numel for segment in segments)
    usual = max(sizes, key=lambda size: sizes[size] * size)
    return [index for index, segment in enumerate(segments) if segment.numel == usual]


def streamed_elements(segment: Segment) -> int:
    """Return the number of a layer's weights that visit the device."""
    sizes = [rows * columns for rows, columns in segment.matrices]
    return sum(size for size in sizes if size >= STREAMED_ELEMENTS)
