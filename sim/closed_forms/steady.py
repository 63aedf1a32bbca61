"""Closed forms: a steady-state step of many machines at once, where the step has a formula.

They hold where nothing slows anything else down (links and DRAM are not full) and, for the engine,
where the host keeps up: what is left are sums and maxima over a model's segments.
`Steady.applies` says for which machines that is so; the others are for `sim.simulate`. Tested
equal to it.

Formulas, with segments in the order of backward, p the time at which backward passes one and c
what its copy takes: a lane that serves them in turn ends segment l at max over j <= l of
(p_j + c_j + ... + c_l).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sim.closed_forms.engine import EXACT, EngineTimes
from sim.closed_forms.parts import Array
from sim.closed_forms.step import Axes, Steady, StepTimes
from sim.closed_forms.systems import SYSTEM_FORMULAS, on_device
from sim.simulate import Strategy, selects_every
from sim.timing.costs import StepCosts
from zenflow.config import unknown_name
from zenflow.errors import ConfigError

AXES = ("forward", "backward", "d2h", "h2d", "duplex", "dram", "host", "steps")
"""Quantities that may differ from machine to machine: seconds of one micro-batch, bytes/s, and
AdamW steps of an element, per second, on the host."""

_CHUNK = 512
"""Number of machines at a time: their arrays stay in a core's caches."""


class ClosedForm:
    """The formula of one strategy for one model; machines are given to `solve`.

    Examples:
        A step on two machines, whose links to the host differ:

        >>> from sim.hardware.catalog import find_machine
        >>> from sim.models.table import find_model
        >>> from sim.models.workload import Workload
        >>> from sim.timing.costs import costs_of
        >>> workload = Workload.of_config(*find_model("gpt2"), batch_size=8)
        >>> costs = costs_of(workload, find_machine("hgx-h100", 1))
        >>> form = ClosedForm(costs, Strategy.of("published_zero_offload"))
        >>> found = form.solve(d2h=np.array([10e9, 50e9]))
        >>> found.step_seconds.round(3).tolist(), found.applies.tolist()
        ([0.073, 0.06], [True, True])
    """

    def __init__(self, costs: StepCosts, strategy: Strategy) -> None:
        """Prepare what no machine changes.

        Raises:
            ConfigError: The strategy has no formula.
        """
        if not has_closed_form(costs, strategy):
            raise ConfigError(
                f"{strategy.name} has no closed form for {costs.hardware.total_devices} devices: "
                "simulate it"
            )
        config = strategy.config
        self._engine = None if config is None else EngineTimes(costs, config)
        self._times = self._engine or StepTimes(costs)
        self._strategy = strategy
        seconds = np.array([segment.backward for segment in costs.segments[::-1]])
        self._share = seconds / seconds.sum()

    def solve(self, *, tolerance: float = 0.0, **values: Array | float) -> Steady:
        """Return the steady state of every machine.

        Args:
            tolerance: Relative error of the step to accept: where copies of both directions slow
                one another down, their last ones are known within bounds only.
            values: For any of `AXES` an array with one value for each machine, or one for all; the
                others are as the costs have them. ``backward`` may also be (N, L), the seconds of
                each segment in the order of backward.

        Raises:
            ConfigError: An axis is unknown, or a value is not positive.
        """
        axes = self._axes(values)
        count = len(axes["forward"])
        parts = [
            self._solve({name: array[at : at + _CHUNK] for name, array in axes.items()}, tolerance)
            for at in range(0, count, _CHUNK)
        ]
        return Steady(
            np.concatenate([part.step_seconds for part in parts]),
            np.concatenate([part.stall_seconds for part in parts]),
            np.concatenate([part.selection_seconds for part in parts]),
            np.concatenate([part.applies for part in parts]),
        )

    def _solve(self, axes: Axes, tolerance: float) -> Steady:
        if self._engine is None:
            return SYSTEM_FORMULAS[self._strategy.name](self._times, axes)
        config = self._strategy.config
        assert config is not None
        if config.topk_ratio == 1:
            return on_device(self._engine, axes)
        if not config.overlap_step:
            return self._engine.in_turn(axes)
        # Bounds: nothing disturbs what is under way, and everything that may does.
        most = self._engine.overlapped(_crowded(axes) if tolerance else axes, is_least=False)
        if not most.applies.any():  # so that nobody asks for the times
            return most
        least = self._engine.overlapped(axes, is_least=True)
        close = most.step_seconds <= least.step_seconds * max(1 + tolerance, EXACT)
        middle = (most.step_seconds - least.step_seconds) / 2
        selection = (most.selection_seconds + least.selection_seconds) / 2
        return Steady(
            least.step_seconds + middle,
            least.stall_seconds + middle,
            selection,
            most.applies & close,
        )

    def _axes(self, values: Mapping[str, Array | float]) -> Axes:
        for name in values:
            if name not in AXES:
                raise ConfigError(f"axis {unknown_name(name, AXES)}")
        values = dict(values)
        split = np.asarray(values.get("backward", 0.0), float)
        if split.ndim == 2:
            values["backward"] = split.sum(axis=1)
        given = {
            "forward": self._times.costs.forward_seconds,
            "backward": self._times.costs.backward_seconds,
            **{name: getattr(self._times.rates, name) for name in AXES[2:]},
            **values,
        }
        arrays = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(v, float)) for v in given.values())
        )
        found = dict(zip(given, arrays, strict=True))
        for name, array in found.items():
            if not (np.isfinite(array).all() and (array > 0).all()):
                raise ConfigError(f"{name} must be positive for every machine: leave others out")
        share = self._share
        if split.ndim == 2:
            share = split / split.sum(axis=1, keepdims=True)
        found["share"] = np.broadcast_to(share, (len(found["forward"]), len(self._share)))
        return found


def _crowded(axes: Axes) -> Axes:
    """Return the axes with what each direction has at least while the other is busy too."""
    down, up, both = axes["d2h"], axes["h2d"], axes["duplex"]
    return {
        **axes,
        "d2h": np.minimum(down, np.maximum(both / 2, both - up)),
        "h2d": np.minimum(up, np.maximum(both / 2, both - down)),
    }


def has_closed_form(costs: StepCosts, strategy: Strategy) -> bool:
    """Whether a strategy has a formula on the machine of these costs.

    Not with activations on the host, with collectives, on a CPU in the device's role (whose parts
    share cores), in keep mode, for windows of several steps without overlap, or for selections of
    blocks whose windows end in turn and whose updates land several steps later.
    """
    hardware = costs.hardware
    if hardware.total_devices > 1 or hardware.device.is_cpu:
        return False
    if any(segment.leaving for segment in costs.segments):
        return False
    if strategy.config is None:
        return strategy.name in SYSTEM_FORMULAS and not strategy.options
    config = strategy.config
    in_turn = not config.overlap_step and config.update_interval > 1
    # Blocks that end in turn and land late would wait for one another's updates.
    entangled = selects_every(config) > 0 and config.rolling and config.effective_lag() > 1
    return strategy.releases and not in_turn and not entangled
