"""Intake: the host's work on each step's gradients, block by block, under either rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence

from sim.timing.block_plan import BlockPlan, PlannedBlock
from sim.timing.costs import StepCosts
from sim.timing.host_passes import HostPass, added, ended, is_direct, replayed_by
from zenflow.host_state import gradient_bytes
from zenflow.rule.calendar import WindowCalendar

NOTHING = HostPass()


class AbstractIntake(ABC):
    """Gradients that wait on the host for their windows' ends, and the work they cause.

    Attributes:
        name: Name of the spans of work that is not a window's end.
        takes_due: Whether that work has gradients of blocks whose windows end in its step.
    """

    name: str
    takes_due: bool

    def __init__(self, plan: BlockPlan, costs: StepCosts) -> None:
        """Start with nothing."""
        self._config = plan.config
        self._size = costs.dtype_bytes
        self._num_segments = len(costs.segments)
        self._blocks = [block for block in plan.blocks if block.elements]

    def stage(self, segment: int) -> HostPass:
        """Find room for the next gradients of a segment; return what has to be done first."""
        del segment
        return NOTHING

    @abstractmethod
    def take_in(self, calendar: WindowCalendar, step: int) -> list[HostPass]:
        """Take a step's gradients in; return each segment's work, windows that end aside."""

    @abstractmethod
    def end(self, block: PlannedBlock, lag: int) -> HostPass:
        """Return the work that ends a block's window, whose last gradient has been taken in."""

    @abstractmethod
    def holds_staging(self, block: PlannedBlock, lag: int) -> bool:
        """Whether the end of a block's window, under way, keeps the next gradient waiting."""


class ExactIntake(AbstractIntake):
    """Gradients queue until as many wait as may, or the window ends.

    The first of a block waits in its own staging, further ones in rooms that all blocks share. A
    block that finds no room has what waits applied. Rooms are counted as if they left no gaps, and
    as free once what reads them is queued: the copies of the blocks that are applied themselves
    wait for that in any case.
    """

    name = "adam"
    takes_due = False

    def __init__(self, plan: BlockPlan, costs: StepCosts) -> None:
        """Start with nothing."""
        super().__init__(plan, costs)
        self._depth = plan.depth
        self._free = float(plan.pool)
        self._waiting = [0] * len(plan.blocks)
        counts = range(plan.depth + 1)
        self._gradient = gradient_bytes(plan.config.gradient_link, self._size)
        sizes, coding = (plan.config, self._size), costs.hardware.host.compact_coding.value
        self._costs = [replayed_by(*sizes, count, coding=coding) for count in counts]
        self._ends = [
            ended(*sizes, waiting=count, is_direct=False, coding=coding) for count in counts
        ]
        self._members: defaultdict[int, list[PlannedBlock]] = defaultdict(list)
        for block in self._blocks:
            self._members[block.segment].append(block)

    def stage(self, segment: int) -> HostPass:
        """Give the gradients that are not the first ones of their queues a room each."""
        needed = NOTHING
        if self._depth == 1:
            return needed
        for block in self._members[segment]:
            waiting = self._waiting[block.index]
            if not waiting:
                continue
            size = block.elements * self._gradient
            if size > self._free:
                needed += self._costs[waiting] * block.elements
                self._clear(block)
            else:
                self._free -= size
        return needed

    def take_in(self, calendar: WindowCalendar, step: int) -> list[HostPass]:
        """Let the gradients queue, and apply those of full queues."""
        waiting, next_due, depth = self._waiting, calendar.next_due, self._depth
        full = [0.0] * self._num_segments
        for block in self._blocks:
            index = block.index
            waiting[index] += 1
            if waiting[index] >= depth and next_due[index] != step:
                full[block.segment] += block.elements
                self._clear(block)
        cost = self._costs[depth]
        return [cost * elements if elements else NOTHING for elements in full]

    def end(self, block: PlannedBlock, lag: int) -> HostPass:
        """Return the pass over what waits, and the upload."""
        del lag
        waiting = self._waiting[block.index]
        self._clear(block)
        return self._ends[waiting] * block.elements

    def _clear(self, block: PlannedBlock) -> None:
        self._free += (self._waiting[block.index] - 1) * block.elements * self._gradient
        self._waiting[block.index] = 0

    def holds_staging(self, block: PlannedBlock, lag: int) -> bool:
        """Whether the end of a window holds staging: always, as it reads the block's own."""
        del block, lag
        return True


class PublishedIntake(AbstractIntake):
    """Gradients are added to their windows' sums, but for the only ones of their windows."""

    name = "accumulate"
    takes_due = True

    def __init__(self, plan: BlockPlan, costs: StepCosts) -> None:
        """Start with nothing."""
        super().__init__(plan, costs)
        self._counts = [0] * len(plan.blocks)
        first, later = (added(self._size, is_first=is_first) for is_first in (True, False))
        self._first = first.num_bytes * costs.intake_factor
        self._later = later.num_bytes * costs.intake_factor

    def take_in(self, calendar: WindowCalendar, step: int) -> list[HostPass]:
        """Add the gradients to their sums."""
        counts, next_due, lag = self._counts, calendar.next_due, calendar.lag(step)
        work = [0.0] * self._num_segments
        for block in self._blocks:
            index = block.index
            counts[index] += 1
            is_first = counts[index] == 1
            if not (is_first and lag <= 1 and next_due[index] == step):
                work[block.segment] += block.elements * (self._first if is_first else self._later)
        return [HostPass(num_bytes) for num_bytes in work]

    def end(self, block: PlannedBlock, lag: int) -> HostPass:
        """Return the AdamW step on the window's mean."""
        direct = self.holds_staging(block, lag)
        self._counts[block.index] = 0
        cost = ended(self._config, self._size, waiting=1, is_direct=direct, coding=0.0)
        return cost * block.elements

    def holds_staging(self, block: PlannedBlock, lag: int) -> bool:
        """Whether a window's end reads the staged gradient: where it is the only one."""
        return is_direct(self._config, lag, self._counts[block.index])


def intake_of(plan: BlockPlan, costs: StepCosts) -> AbstractIntake:
    """Return the intake of the plan's update rule."""
    return ExactIntake(plan, costs) if plan.config.is_exact else PublishedIntake(plan, costs)


def total(passes: Iterable[HostPass]) -> HostPass:
    """Return the sum of host passes."""
    found = NOTHING
    for own in passes:
        found += own
    return found


def by_segment(blocks: Sequence[PlannedBlock]) -> defaultdict[int, list[PlannedBlock]]:
    """Return the blocks of each segment."""
    found: defaultdict[int, list[PlannedBlock]] = defaultdict(list)
    for block in blocks:
        found[block.segment].append(block)
    return found
