"""Ways: the choice under each way in which devices can share a model, and the better one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim.fitting.left_out import left_out_of
from sim.fitting.uncertainty import Interval, interval_of
from sim.hardware.profile import HardwareProfile
from sim.planning.beside import Beside
from sim.planning.choice import Choice, Chooser
from sim.planning.chunks import with_chunks
from sim.planning.improvements import Improvement
from sim.planning.options import Option, Planner
from sim.planning.rules import EXACT

_HALF = 0.5
"""Share of compact state's speed that float32 state must have on a larger host to be named."""
FASTER = 1.05
"""Speed-up that sharding must bring where whole weights fit too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to share a model, with the choice under it. See `way_of`."""

    parallel: str
    """Name of the way, one of `sim.timing.division.PARALLELS`."""
    chooser: Chooser
    """Chooser that made the choice."""
    choice: Choice
    """Setting to use, or the likeliest one."""
    whole: Beside
    """Surroundings of the choice of whole logits."""
    without_compact: tuple[Improvement, ...] | None = None
    """Changes with which float32 state on the host would fit; None unless compact state was
    tried because nothing else fits."""
    without_chunks: Option | None = None
    """Option with whole logits; None unless a loss in chunks was found to be better."""

    @property
    def beside(self) -> Beside:
        """Surroundings of the choice."""
        return Beside(self.chooser, self.choice)

    @property
    def one(self) -> Planner:
        """Planner of a single device."""
        return self.chooser.planners[1]

    @property
    def is_plain(self) -> bool:
        """Whether all devices take all tokens, and none of them offloads."""
        chosen, work = self.choice.recommended, self.chooser.workload
        return (
            chosen is not None
            and chosen.strategy.name == "on_device"
            and chosen.need.num_devices == self.chooser.hardware.total_devices
            and chosen.need.workload.tokens_per_step == work.tokens_per_step
        )

    @property
    def exact(self) -> Option | None:
        """Fastest option whose rule is AdamW exactly; None if it is chosen, or none fits."""
        chosen, search = self.choice.recommended, self.choice.search
        if search is None or chosen is None or chosen.strategy.name in EXACT:
            return None
        return search.best(names=EXACT)

    def tight(self, sure: Option | None) -> Option | None:
        """Return the riskier option behind the one that is shown.

        Args:
            sure: Recommended option; one whose layers visit the device counts by its worth.
        """
        found = self.chooser.riskier(self.choice)
        if found is None or sure is None or sure is self.choice.recommended:
            return found
        return found if found.worth > FASTER * sure.worth else None

    def interval(self, draws: int) -> Interval | None:
        """Return an interval of the choice's tokens per second; None if there is no choice.

        The simulated step is scaled as its estimate moves from draw to draw: on several devices
        simulating each draw takes a hundred times as long.

        Args:
            draws: Number of draws of the machine's quantities; 0 makes no interval.
        """
        option, search = self.choice.shown, self.choice.search
        if option is None or search is None or not draws:
            return None
        usual = search.estimate(option)

        def tokens_per_second(drawn: HardwareProfile) -> float:
            return option.tokens_per_second * usual / search.estimate(option, drawn)

        machine = search.planner.hardware
        term = left_out_of(machine, search.workload)
        return interval_of(machine, tokens_per_second, count=draws, left_out=term)


def way_of(
    parallel: str,
    chooser: Chooser,
    presets: Sequence[str],
    *,
    may_compact: bool,
    may_chunk: bool,
) -> Way:
    """Return the choice under a way to share a model.

    Args:
        parallel: Name of the way.
        chooser: Chooser for that way.
        presets: Presets to choose from.
        may_compact: Whether compact state may be taken where nothing fits with float32.
        may_chunk: Whether logits may come in chunks where that makes a step fit or faster.
    """
    choice, without_compact = chooser.choose(), None
    if choice.shown is None and may_compact and "zenflow" in presets:
        compact = chooser.compact()
        found = compact.choose()
        if found.shown is not None:
            bought = Beside(chooser, choice).improvements(presets, parallel)
            least = _HALF * found.shown.tokens_per_second
            without_compact = tuple(item for item in bought if item.tokens_per_second >= least)
            chooser, choice = compact, found
    whole = Beside(chooser, choice)
    better = with_chunks(chooser, choice) if may_chunk else None
    without_chunks = None if better is None else choice.shown
    chooser, choice = better or (chooser, choice)
    return Way(
        parallel=parallel,
        chooser=chooser,
        choice=choice,
        whole=whole,
        without_compact=without_compact,
        without_chunks=without_chunks,
    )


def better_of(way: Callable[[str], Way]) -> tuple[Way, Way | None]:
    """Return the better way to share a model, and the other one if it was looked at.

    Weights stay whole unless sharding makes a step fit, takes longer sequences, or is `FASTER`. It
    is not looked at where every device trains without offloading.

    Args:
        way: Makes the choice under a way of this name.
    """
    whole = way("ddp")
    if whole.chooser.hardware.total_devices == 1 or whole.is_plain:
        return whole, None
    sharded = way("fsdp")
    is_better = _is_better(sharded.choice, whole.choice)
    return (sharded, whole) if is_better else (whole, sharded)


def _is_better(after: Choice, before: Choice) -> bool:
    """Whether a choice is worth sharded weights."""
    new, old = after.shown, before.shown
    if new is None or old is None:
        return new is not None
    if new.fits != old.fits:
        return new.fits
    if not new.fits:
        return (new.chance or 0.0) > (old.chance or 0.0)
    longer = new.need.workload.sequence - old.need.workload.sequence
    return longer > 0 or (longer == 0 and new.worth > FASTER * old.worth)
