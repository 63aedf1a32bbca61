"""Chunks: a loss whose logits are never whole, where it makes a step fit or faster.

Such a loss takes as long as one of whole logits, but less of the device. Losses differ by
rounding, so that whole logits stay where chunks bring little.
"""

from __future__ import annotations

from dataclasses import replace

from sim.models.activations import Activations
from sim.models.workload import Workload
from sim.planning.choice import Choice, Chooser
from sim.planning.options import Option
from sim.planning.rules import BASELINES
from zenflow.errors import ConfigError

FASTER = 1.05
"""Speed-up that chunks must bring where whole logits fit too."""
AS_LIKELY = 0.03
"""Difference of chances to fit that counts as none.

The spread behind them is known to some 8 % from 86 published outcomes. That moves a chance of
87 % by two points."""
_SMALL = 0.02
"""Share of a device's memory of which chunks must save more to be tried."""


def in_chunks(workload: Workload) -> Workload:
    """Return a workload with a loss in chunks.

    Raises:
        ConfigError: `zenflow train` has no such loss for it.
    """
    if workload.against_chunks is not None:
        raise ConfigError(f"{workload.name} {workload.against_chunks}: leave out --chunked-loss")
    return replace(workload, loss="chunks")


def with_chunks(chooser: Chooser, choice: Choice) -> tuple[Chooser, Choice] | None:
    """Return a better choice with a loss in chunks, and its chooser; None if there is none.

    Args:
        chooser: Chooser whose workload has the loss of whole logits.
        choice: Its choice.
    """
    before = choice.shown
    # A step of one short sequence takes less with whole logits: where not even that fits, no
    # step in chunks does.
    if before is None or not _may_help(chooser):
        return None
    chunked = chooser.chunked(baselines=before.strategy.name in BASELINES)
    if choice.recommended is not None and not _promises(chunked, before):
        return None
    found = [chunked.choose()]
    if found[0].recommended is None:
        found.insert(0, chunked.as_likely_as((before.chance or 0.0) - AS_LIKELY))
    return next(((chunked, one) for one in found if _is_better(one.shown, before)), None)


def _may_help(chooser: Chooser) -> bool:
    """Whether chunks are open for a workload, and save a share of the device worth a search."""
    work = chooser.workload
    if not loss_is_ours(work):
        return False
    saved = _loss_bytes(work) - _loss_bytes(replace(work, loss="chunks"))
    return saved > _SMALL * chooser.hardware.device.memory.value


def loss_is_ours(work: Workload) -> bool:
    """Whether the loss may come in chunks: not asked for, another kernel's, or as traced."""
    is_plain = work.loss == "tokens" and work.kernels == "eager" and work.traced is None
    return is_plain and work.against_chunks is None


def _loss_bytes(work: Workload) -> float:
    """Return the bytes that the loss needs where the step is one micro-batch."""
    whole = replace(work, batch_size=work.batch_size * work.accumulation, accumulation=1)
    counts = Activations(whole)
    return counts.kept_bytes()[-1] + counts.loss_bytes()


def _promises(chunked: Chooser, before: Option) -> bool:
    """Whether the first step of which a setting fits in chunks may be worth more than before."""
    for work in chunked.works:
        searches = [chunked.search(count, work) for count in chunked.planners]
        best = max((search.most_worth for search in searches), default=0.0)
        if best > 0.0:
            return best > FASTER * before.worth or work.sequence > before.need.workload.sequence
    return False


def _is_better(after: Option | None, before: Option) -> bool:
    """Whether an option in chunks is worth their rounding."""
    if after is None:
        return False
    if after.fits != before.fits:
        return after.fits
    gained = (after.chance or 0.0) - (before.chance or 0.0)
    if not after.fits and abs(gained) >= AS_LIKELY:
        return gained > 0
    longer = after.need.workload.sequence > before.need.workload.sequence
    return longer or after.worth > FASTER * before.worth
