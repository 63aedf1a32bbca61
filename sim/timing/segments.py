"""Segments: the parameters of a model that travel together, and the seconds of their passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

SEGMENT_FLOOR = 1 << 14
"""Least number of parameters of a segment: smaller buckets of the engine travel together."""
SEGMENTS_AT_LEAST = 32
"""Number of segments that a model with fewer layers is cut into, where it is large enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Parameters that finish together in backward: a layer, or a bucket of a small model.

    See `sim.timing.costs.costs_of`.
    """

    name: str
    forward: float
    """Seconds of forward on the device, one micro-batch."""
    backward: float
    """Seconds of backward, with what is recomputed."""
    matrices: tuple[tuple[int, int], ...]
    """Shapes (O, I) of parameters with at least two dimensions, in order of registration."""
    vectors: int = 0
    """Number of elements of all other parameters."""
    num_vectors: int = 0
    """Number of all other parameters."""
    launching: tuple[float, float] = (0.0, 0.0)
    """Seconds in which the host launches forward and backward: no pass is shorter. 0 where it is
    not known."""
    leaving: float = 0.0
    """Bytes of one micro-batch's activations that wait on the host for its backward."""
    layer: str = ""
    """Name of the layer that it is a piece of; empty where it is a whole one."""
    numel: int = field(init=False, repr=False, compare=False)
    """Number of elements of all parameters."""

    def __post_init__(self) -> None:
        """Count elements once, as they are asked for often."""
        matrices = sum([rows * columns for rows, columns in self.matrices])
        object.__setattr__(self, "numel", matrices + self.vectors)

    @property
    def num_parameters(self) -> int:
        """Number of parameter tensors."""
        return len(self.matrices) + self.num_vectors


def delayed(segments: Sequence[Segment], seconds: float) -> tuple[Segment, ...]:
    """Return a micro-batch's segments behind seconds of the host, for which the device waits."""
    first, *others = segments
    launching = first.launching[0] + seconds, first.launching[1]
    return (replace(first, forward=first.forward + seconds, launching=launching), *others)


def cut(segments: Sequence[Segment]) -> list[Segment]:
    """Cut the layers of a small model finer, as the engine's buckets do.

    A model of 32 layers or more goes layer by layer; one of fewer is cut so that copies of about
    1/32 of it follow one another, no smaller than `SEGMENT_FLOOR`. A layer's time is shared out
    by elements, which is how its products' FLOP are.
    """
    total = sum(segment.numel for segment in segments)
    enough = max(SEGMENT_FLOOR, total // max(SEGMENTS_AT_LEAST, len(segments)))
    pieces: list[Segment] = []
    for segment in segments:
        pieces += _cut(segment, enough)
    return pieces


def _cut(segment: Segment, enough: int) -> list[Segment]:
    """Cut one layer into runs of matrices with at least this many elements, from its end."""
    runs: list[list[tuple[int, int]]] = []
    filled = enough
    for matrix in reversed(segment.matrices):
        if filled >= enough:
            runs.insert(0, [])
            filled = 0
        runs[0].insert(0, matrix)
        filled += matrix[0] * matrix[1]
    if len(runs) > 1 and sum(r * c for r, c in runs[0]) < enough:
        runs[1] = runs[0] + runs[1]
        runs = runs[1:]
    if len(runs) <= 1:
        return [segment]
    elements = [sum(r * c for r, c in run) for run in runs]
    return [
        replace(
            segment,
            name=f"{segment.name}.{index}",
            layer=segment.name,
            forward=segment.forward * size / sum(elements),
            backward=segment.backward * size / sum(elements),
            matrices=tuple(run),
            leaving=segment.leaving * size / sum(elements),
            launching=_share(segment.launching, size / sum(elements)),
            vectors=segment.vectors if index == len(runs) - 1 else 0,
            num_vectors=segment.num_vectors if index == len(runs) - 1 else 0,
        )
        for index, (run, size) in enumerate(zip(runs, elements, strict=True))
    ]


def _share(launching: tuple[float, float], part: float) -> tuple[float, float]:
    return launching[0] * part, launching[1] * part
