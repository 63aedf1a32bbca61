"""Block plan: the engine's own blocks and windows, laid over a model's segments.

Blocks, phases and due steps come from `zenflow.rule`, the code that the engine runs: what is
simulated can't drift from what is done.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from sim.timing.changed_uploads import is_still
from sim.timing.costs import StepCosts, is_split
from sim.timing.division import Division
from sim.timing.host_memory import HostMemory, host_memory
from zenflow.config import ZenFlowConfig
from zenflow.host_state import GradientLink, column_bytes
from zenflow.rule.blocks import BlockShape, partition
from zenflow.rule.calendar import WindowCalendar
from zenflow.rule.sizes import ring_bytes


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """One block of the engine, with its place in the model."""

    index: int
    shape: BlockShape
    segment: int
    """Index of the block's segment, in the order of forward."""
    elements: float
    """Deferred elements of one device's part."""


@dataclass(frozen=True, slots=True)
class SegmentShare:
    """Number of elements of a segment by owner, of one device's part."""

    matrices: int
    """Number of split matrices."""
    columns: int
    """Number of columns of the split matrices, which no division lessens."""
    split: float
    """Number of elements of split matrices that the device measures."""
    deferred: float
    """Number of elements that the host owns."""
    important: float
    """Number of elements of important columns."""
    resident: float
    """Number of elements of parameters that are not split."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One split matrix with columns that the host owns."""

    segment: int
    elements: float
    blocks: list[int]
    """Indices of its blocks that defer any column."""


class BlockPlan:
    """All blocks of a model under a configuration.

    Blocks and windows are those of one process; of each block a device has its part.

    Attributes:
        config: The update rule's settings.
        blocks: In backward order.
        shares: Of every segment, in the order of forward.
        ring: Bytes of the ring through which released gradients leave a GPU.
        depth: Largest number of a column's gradients that wait on the host.
        pool: Bytes of the rooms in which all but the first ones wait.
        drive: Extents of the host's states on a drive; None in memory.

    Examples:
        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> from sim.models.workload import Workload
        >>> from sim.timing.costs import costs_of
        >>> costs = costs_of(Workload.of_config(*find_model("gpt2")), find_machine("hgx-h100", 1))
        >>> plan = BlockPlan(costs, ZenFlowConfig(topk_ratio=0.1))
        >>> owned = sum(share.deferred for share in plan.shares) / costs.num_params
        >>> round(owned, 2)  # share of elements that the host owns
        0.9
    """

    def __init__(
        self,
        costs: StepCosts,
        config: ZenFlowConfig,
        division: Division | None = None,
        *,
        on_drive: bool = False,
    ) -> None:
        """Cut the model's matrices into blocks.

        Args:
            costs: Of one step of the model.
            config: The update rule's settings.
            division: Parts of the devices; None is one device's whole.
            on_drive: Whether the host's states are on a drive.

        Raises:
            ConfigError: States on a drive that the engine does not put there.
        """
        division = division or Division()
        self.config = config
        shapes: list[tuple[int, int]] = []
        homes: list[int] = []
        for index, segment in enumerate(costs.segments):
            matrices = [m for m in segment.matrices if is_split(m[0] * m[1], config)]
            shapes += matrices
            homes += [index] * len(matrices)
        cut = blocks_of(tuple(shapes), config)
        self.blocks = [
            PlannedBlock(i, s, homes[s.matrix], s.deferred_elements / division.host)
            for i, s in enumerate(cut)
        ]
        split, deferred, columns = Counter[int](), Counter[int](), Counter[int]()
        for block in self.blocks:
            split[block.segment] += block.shape.num_columns * block.shape.num_rows
            deferred[block.segment] += block.shape.deferred_elements
            columns[block.segment] += block.shape.num_columns
        of_segment = Counter(homes)
        self.shares = [
            SegmentShare(
                matrices=of_segment[index],
                columns=columns[index],
                split=split[index] / division.device,
                deferred=deferred[index] / division.host,
                important=(split[index] - deferred[index]) / division.device,
                resident=(segment.numel - split[index]) / division.device,
            )
            for index, segment in enumerate(costs.segments)
        ]
        self.ring = ring_of(cut, config.gradient_link, costs.dtype_bytes, division.host)
        self._is_still = is_still(config, costs.dtype_bytes)
        self._matrices = _matrices_of(self.blocks, division.device)
        self._moved = [0.0] * len(costs.segments)
        for matrix in self._matrices:
            self._moved[matrix.segment] += matrix.elements
        memory = host_memory_of(tuple(shapes), config, costs.dtype_bytes, on_drive=on_drive)
        elements = costs.num_params, costs.num_params - memory.deferred
        memory = memory.divided(division.host)
        self.drive = memory.drive
        self.depth = memory.depth_on(costs.hardware, *elements)
        self.pool = memory.pool(self.depth)

    @property
    def important(self) -> float:
        """Elements of important columns."""
        return sum(share.important for share in self.shares)

    @property
    def resident(self) -> float:
        """Elements of parameters that the device updates whole."""
        return sum(share.resident for share in self.shares)

    def calendar(self) -> WindowCalendar:
        """Return the engine's calendar over these blocks."""
        return WindowCalendar(self.config, [block.shape for block in self.blocks])

    def moved(self, calendar: WindowCalendar, step: int) -> list[float]:
        """Return the elements of each segment's matrices that fresh steps move in this step.

        A matrix is passed over as a whole where any of its blocks lands later than in this step.
        """
        if not self.config.is_exact or self._is_still:
            return [0.0] * len(self.shares)
        if self.config.overlap_step and not calendar.is_warm_up(step):
            return self._moved
        moved = [0.0] * len(self.shares)
        for matrix in self._matrices:
            if any(calendar.next_landing(block) > step for block in matrix.blocks):
                moved[matrix.segment] += matrix.elements
        return moved


@dataclass(frozen=True, slots=True)
class Structure:
    """Shapes and settings that decide blocks, windows and queues: a schedule but for its seconds.

    Equal structures have equal plans, however fast their machines are.
    """

    segments: tuple[tuple[tuple[tuple[int, int], ...], int], ...]
    """Shapes of each segment's matrices, and the number of its other elements."""
    config: ZenFlowConfig
    """Settings without selections that recur, and with as many gradients in queues as there is
    room for. Configurations that differ in these alone have one schedule."""
    dtype_bytes: int
    accumulation: int
    intake_factor: float
    is_cpu: bool
    """Whether a CPU plays the device."""
    are_launched: bool
    """Whether the host's launches are a lane of their own."""
    releases: bool
    """Whether gradients leave during backward."""
    costs: StepCosts = field(compare=False)
    """Costs of one of the machines."""


def structure_of(costs: StepCosts, config: ZenFlowConfig, *, releases: bool = True) -> Structure:
    """Return the structure of a step's schedule under a configuration."""
    segments = tuple((segment.matrices, segment.vectors) for segment in costs.segments)
    shapes = [m for matrices, _ in segments for m in matrices if is_split(m[0] * m[1], config)]
    memory = host_memory_of(tuple(shapes), config, costs.dtype_bytes)
    elements = costs.num_params, costs.num_params - memory.deferred
    depth = memory.depth_on(costs.hardware, *elements)
    return Structure(
        segments=segments,
        config=replace(laid_out(config), queue_depth=depth),
        dtype_bytes=costs.dtype_bytes,
        accumulation=costs.accumulation,
        intake_factor=costs.intake_factor,
        is_cpu=costs.hardware.device.is_cpu,
        are_launched=costs.are_launched,
        releases=releases,
        costs=costs,
    )


@functools.lru_cache(maxsize=256)
def laid_out(config: ZenFlowConfig) -> ZenFlowConfig:
    """Return the settings that blocks and windows follow from, and the rest as by default."""
    return replace(config, select_strategy="step", select_interval=0, queue_depth=None)


def host_memory_of(
    shapes: tuple[tuple[int, int], ...],
    config: ZenFlowConfig,
    dtype_bytes: int,
    *,
    on_drive: bool = False,
) -> HostMemory:
    """Return an engine's memory on the host for split matrices of these shapes."""
    return replace(_host_memory(shapes, laid_out(config), dtype_bytes, on_drive), config=config)


@functools.lru_cache(maxsize=256)
def _host_memory(
    shapes: tuple[tuple[int, int], ...],
    config: ZenFlowConfig,
    dtype_bytes: int,
    on_drive: bool,
) -> HostMemory:
    return host_memory(blocks_of(shapes, config), config, dtype_bytes, on_drive=on_drive)


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


def _matrices_of(blocks: Iterable[PlannedBlock], parts: int) -> list[_Matrix]:
    members: defaultdict[int, list[PlannedBlock]] = defaultdict(list)
    for block in blocks:
        members[block.shape.matrix].append(block)
    made = [
        _Matrix(
            segment=own[0].segment,
            elements=sum(b.shape.num_columns * b.shape.num_rows for b in own) / parts,
            blocks=[block.index for block in own if block.elements],
        )
        for own in members.values()
    ]
    return [matrix for matrix in made if matrix.blocks]


def ring_of(
    blocks: Iterable[BlockShape], link: GradientLink, dtype_bytes: int, parts: int = 1
) -> int:
    """Return the bytes of the ring through which these blocks' gradients leave a GPU.

    Args:
        blocks: Of the model.
        link: Format of the gradients there.
        dtype_bytes: Bytes of an element of the model.
        parts: Number of devices that share each matrix's rows.
    """
    columns: Counter[tuple[int, int]] = Counter()
    for block in blocks:
        columns[block.matrix, block.num_rows] += block.num_deferred
    return ring_bytes(
        (count, column_bytes(link, -(-rows // parts), dtype_bytes))
        for (_, rows), count in columns.items()
    )
