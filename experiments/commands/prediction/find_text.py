"""The words of ``zenflow sweep --find``: the cheapest point, and a riskier one that is cheaper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sim.memory.chance import LIKELY

if TYPE_CHECKING:
    from experiments.sweeps.grid import Sweep
    from experiments.sweeps.search import Cheapest, FoundPoint
    from sim.planning.options import Option


def find_text(sweep: Sweep, column: str, rate: float, found: Cheapest) -> Iterator[str]:
    """Yield the lines of an answer.

    Args:
        sweep: The grid.
        column: What was to be least.
        rate: Tokens per second that were asked for.
        found: The answer.
    """
    wanted = f"{rate:,.0f} tokens/s"
    if found.found is None:
        best = found.fastest
        fastest = "" if best is None else f": the fastest has {best.tokens_per_second:,.0f}"
        yield f"No point reaches {wanted} with a setting that is likely to fit{fastest}."
    else:
        yield f"Least {column} for {wanted}: {found.found.cost:g}"
        yield f"  {_point(sweep, found.found)}"
    if found.riskier is not None:
        cheaper = "Riskier" if found.found is None else "Cheaper, but riskier"
        yield f"{cheaper} (chance to fit below {LIKELY:.0%}): {found.riskier.cost:g}"
        yield f"  {_point(sweep, found.riskier)}"
    yield (
        f"{found.looked_at} of {sweep.num_points} points were planned; nothing was measured. "
        "`zenflow plan` with a point's values says more, and what to run."
    )


def found_record(sweep: Sweep, column: str, rate: float, found: Cheapest) -> dict[str, Any]:
    """Return an answer as JSON values, with the arguments of `find_text`."""

    def point(one: FoundPoint | None) -> dict[str, Any] | None:
        if one is None:
            return None
        return {
            "point": sweep.values(one.point),
            "cost": one.cost,
            "option": one.option.to_dict(),
        }

    return {
        "column": column,
        "tokens_per_second": rate,
        "found": point(found.found),
        "riskier": point(found.riskier),
        "fastest": found.fastest and found.fastest.to_dict(),
        "points_looked_at": found.looked_at,
        "num_points": sweep.num_points,
    }


def _point(sweep: Sweep, found: FoundPoint) -> str:
    values = sweep.values(found.point)
    point = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{point}: {setting_text(found.option)}"


def setting_text(option: Option) -> str:
    """Return a setting with what is predicted of it, and how likely it fits."""
    work, devices = option.need.workload, option.need.num_devices
    count = work.batch_size * work.accumulation
    where = f" on {devices} devices" if devices > 1 else ""
    fit = "" if option.chance is None else f", fits with a chance of {option.chance:.0%}"
    label = option.label
    if work.loss == "chunks" and "chunked loss" not in option.changes:
        label += ", chunked loss"
    return (
        f"{label}{where}, {count} x {work.sequence} tokens to a step: "
        f"{option.tokens_per_second:,.0f} tokens/s, {option.step_seconds:.4g} s a step{fit}"
    )
