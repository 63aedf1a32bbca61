"""Instead: other systems to name where the engine waits, rounds, or does not surely fit.

Adapters train another thing than the weights, and AdamW in 8 bits rounds its moments. Both may be
the better buy on a small machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sim.models.workload import Workload
from sim.planning.grid import fewer_tokens
from sim.planning.options import Option, Planner
from sim.planning.rules import rounds
from sim.simulate import Strategy

WAITS = 0.25
"""Share of a step from which on a device is said to wait."""
_FASTER = 1.05
"""Speed-up from which AdamW in 8 bits is named beside a setting that fits."""
_IN_8_BITS = (
    Strategy.of("adamw_8bit"),
    Strategy.of("adamw_8bit", paged=True),
    Strategy.of("adamw_8bit", paged=True, in_backward=True),
)
"""Ways of AdamW in 8 bits, the one that asks for most memory of the device first."""
_ADAPTERS = ("lora", "qlora")
"""Systems that train adapters, the one that rounds no weights first."""


def instead(
    planner: Planner, workload: Workload, shown: Option | None, *, recomputes: bool
) -> Iterator[Option]:
    """Yield other systems that are likely to fit one device, and are worth a thought.

    Args:
        planner: Planner of one device.
        workload: Step as asked for; shorter steps are tried where that does not fit.
        shown: Option that the plan shows; None if nothing may fit.
        recomputes: Whether checkpointing may be changed.
    """
    in_8_bits = _fitting(planner, workload, *_IN_8_BITS, recomputes=recomputes)
    if in_8_bits is not None and (shown is None or _is_worth(in_8_bits, shown)):
        yield in_8_bits
    if shown is not None and not _is_poor(shown, workload):
        return
    found = (
        _fitting(planner, workload, Strategy.of(name), recomputes=recomputes) for name in _ADAPTERS
    )
    adapters = [option for option in found if option is not None]
    if adapters:
        yield max(adapters, key=lambda option: option.tokens)  # of equals the first


def _is_worth(option: Option, shown: Option) -> bool:
    """Whether AdamW in 8 bits is worth a thought beside the engine's setting."""
    faster = option.tokens_per_second > _FASTER * shown.tokens_per_second
    return faster or not shown.fits


def _is_poor(shown: Option, workload: Workload) -> bool:
    """Whether a setting leaves something to wish for beside a larger machine."""
    config, done = shown.strategy.config, shown.prediction
    assert config is not None
    assert done is not None
    return (
        not shown.fits
        or rounds(config)
        or done.stall_fraction >= WAITS
        or shown.need.workload.tokens_per_step < workload.tokens_per_step
    )


def _fitting(
    planner: Planner, workload: Workload, *strategies: Strategy, recomputes: bool
) -> Option | None:
    """Return the first strategy with the most tokens to a step that are likely to fit."""
    for work in (workload, *fewer_tokens(workload)):
        for strategy in strategies:
            if strategy.options.get("in_backward") and work.accumulation > 1:
                continue
            option = planner.fitted(work, strategy, recomputes=recomputes)
            if option.fits:
                given = (f"{name}={value}" for name, value in strategy.options.items())
                return replace(option, changes=(*given, *option.changes))
    return None
