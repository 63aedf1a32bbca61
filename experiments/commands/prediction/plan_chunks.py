"""The words of ``zenflow plan`` where it found that a loss in chunks is better."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sim.planning.chunks import AS_LIKELY

if TYPE_CHECKING:
    from sim.planning.options import Option
    from sim.planning.plan import Plan


def chunks(plan: Plan, chosen: Option) -> Iterator[str]:
    """Yield the reason for a loss in chunks, and the plan without it."""
    before = plan.without_chunks
    if before is None:
        return
    work = before.need.workload
    count = work.batch_size * work.accumulation
    chance = "" if before.chance is None else f", it fits with a chance of {before.chance:.0%}"
    yield (
        f"Logits come in chunks (--chunked-loss), never whole, {_reason(chosen, before)}. Without "
        f"that: {before.label} with {count} x {work.sequence} tokens to a step: "
        f"{before.tokens_per_second:,.0f} tokens/s{chance}. Losses differ by rounding. No GPU has "
        "run it."
    )


def _reason(chosen: Option, before: Option) -> str:
    times = chosen.tokens_per_second / before.tokens_per_second
    if chosen.fits and not before.fits:
        return "so that the step is likely to fit"
    if chosen.need.workload.sequence > before.need.workload.sequence:
        return "so that sequences stay as long as asked for"
    if times > 1:
        return f"to be {times:.2g} times as fast"
    return "to be nearer to AdamW" if chosen.fits else "to be likelier to fit"


def likeliest(plan: Plan) -> str:
    """Return the words for what is shown where nothing is likely to fit."""
    if plan.without_chunks is None:
        return "the likeliest to fit"
    return f"one as likely as any, to {100 * AS_LIKELY:.0f} points,"
