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

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.closed_forms.parts import (
    Array,
    HostTasks,
    Jobs,
    Released,
    RingJobs,
    WindowPhase,
    served,
    windows_of,
)
from sim.machine import Rates
from sim.simulate import Strategy, selects_every
from sim.timing.block_plan import structure_of
from sim.timing.costs import StepCosts
from sim.timing.fresh_steps import late_bytes, measured_bytes, moved_bytes
from zenflow.config import ZenFlowConfig, unknown_name
from zenflow.errors import ConfigError

AXES = ("forward", "backward", "d2h", "h2d", "duplex", "dram", "host", "steps")
"""What may differ from machine to machine: seconds of one micro-batch, bytes/s, and AdamW steps of
an element, per second, on the host."""

_EXACT = 1 + 1e-9
"""Factor that rounding may make."""
_CHUNK = 512
"""Number of machines at a time: their arrays stay in a core's caches."""


@dataclass(frozen=True, slots=True)
class Steady:
    """Step time and stall of each machine, seconds, and whether the formula holds for it."""

    step_seconds: Array
    """Seconds of a step on each machine."""
    stall_seconds: Array
    """Seconds of a step in which the device waits."""
    selection_seconds: Array
    """Part of both that is selections of columns, spread over the steps between."""
    applies: NDArray[np.bool_]
    """Whether the formula holds."""


class ClosedForm:
    """The formula of one strategy for one model; machines are given to `solve`."""

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
        self._costs = costs
        self._strategy = strategy
        self._rates = Rates.of(costs.hardware)
        backwards = costs.segments[::-1]
        self._backward = np.array([segment.backward for segment in backwards])
        self._elements = np.array([float(segment.numel) for segment in backwards])
        if strategy.config is not None:
            self._interval = selects_every(strategy.config)
            self._adds = not strategy.config.is_exact
            config = strategy.config
            windows = windows_of(structure_of(costs, config))
            self._plan, self._phases, self._moved = windows.plan, windows.phases, windows.moved
            shares = self._plan.shares[::-1]
            self._grads = np.array([float(s.deferred * costs.dtype_bytes) for s in shares])
            overheads = costs.hardware.overheads
            copy = overheads.copy.value + costs.hardware.link.latency.value
            self._ring = RingJobs.of(self._grads, copy, self._plan.ring)
            late = late_bytes(config, costs.dtype_bytes, is_packed=True, is_cpu=False)
            late_seconds = late / costs.dtype_bytes / costs.elementwise_bandwidth
            self._unpack_rate = 1.0 / (1.0 / self._scatter_rate + late_seconds)
            self._uploads = [Jobs.of(p.uploads, copy, self._unpack_rate) for p in self._phases]

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

    def _solve(self, axes: dict[str, Array], tolerance: float) -> Steady:
        if self._strategy.config is None:
            return _SYSTEM_FORMULAS[self._strategy.name](self, axes)
        if self._strategy.config.topk_ratio == 1:
            return self._on_device(axes)
        if not self._strategy.config.overlap_step:
            return self._in_turn(axes)
        # Bounds: nothing disturbs what is under way, and everything that may does.
        most = self._overlapped(_crowded(axes) if tolerance else axes, is_least=False)
        if not most.applies.any():  # so that nobody asks for the times
            return most
        least = self._overlapped(axes, is_least=True)
        close = most.step_seconds <= least.step_seconds * max(1 + tolerance, _EXACT)
        middle = (most.step_seconds - least.step_seconds) / 2
        selection = (most.selection_seconds + least.selection_seconds) / 2
        return Steady(
            least.step_seconds + middle,
            least.stall_seconds + middle,
            selection,
            most.applies & close,
        )

    def _axes(self, values: Mapping[str, Array | float]) -> dict[str, Array]:
        for name in values:
            if name not in AXES:
                raise ConfigError(f"axis {unknown_name(name, AXES)}")
        values = dict(values)
        split = np.asarray(values.get("backward", 0.0), float)
        if split.ndim == 2:
            values["backward"] = split.sum(axis=1)
        given = {
            "forward": self._costs.forward_seconds,
            "backward": self._costs.backward_seconds,
            **{name: getattr(self._rates, name) for name in AXES[2:]},
            **values,
        }
        arrays = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(v, float)) for v in given.values())
        )
        found = dict(zip(given, arrays, strict=True))
        for name, array in found.items():
            if not (np.isfinite(array).all() and (array > 0).all()):
                raise ConfigError(f"{name} must be positive for every machine: leave others out")
        share = self._backward / self._backward.sum()
        if split.ndim == 2:
            share = split / split.sum(axis=1, keepdims=True)
        found["share"] = np.broadcast_to(share, (len(found["forward"]), len(self._backward)))
        return found

    # ---- parts of a step ----------------------------------------------------------------------

    def _passed(self, axes: dict[str, Array], intake: Array | float = 0.0) -> Array:
        """Return when backward passes each segment of the last micro-batch, (N, L)."""
        seconds = axes["backward"][:, None] * axes["share"] + intake
        before = self._costs.accumulation * axes["forward"]
        before = before + (self._costs.accumulation - 1) * axes["backward"]
        passed: Array = before[:, None] + np.cumsum(seconds, axis=1)
        return passed

    def _copy_seconds(self, num_bytes: Array, rate: Array, packing: float = np.inf) -> Array:
        """Return what each copy takes, (N, L); nothing where there are no bytes."""
        hardware = self._costs.hardware
        fixed = hardware.overheads.copy.value + hardware.link.latency.value + num_bytes / packing
        seconds: Array = np.where(num_bytes > 0, fixed + num_bytes / rate[:, None], 0.0)
        return seconds

    def _host_seconds(self, tasks: HostTasks, axes: dict[str, Array]) -> Array:
        """Return what each task takes, (N, L): its bytes' time or its arithmetic's."""
        task = self._costs.hardware.overheads.host_task.value
        rate = np.minimum(axes["host"], axes["dram"] / self._rates.host_sharing)
        moving = tasks.num_bytes / rate[:, None]
        work = np.maximum(moving, tasks.steps / axes["steps"][:, None])
        seconds: Array = np.where(tasks.num_bytes > 0, task + work, 0.0)
        return seconds

    def _copies_are_free(self, axes: dict[str, Array], *, both_ways: bool) -> NDArray[np.bool_]:
        """Return where copies run at their links' rates whatever the host does.

        Max-min fairness gives a flow all it can take where that is no more than an equal share.
        """
        copies = 2 if both_ways else 1
        share = axes["dram"] / (self._rates.sharing * copies + self._rates.host_sharing)
        free: NDArray[np.bool_] = np.maximum(axes["d2h"], axes["h2d"]) <= share
        down, up = axes["d2h"], axes["h2d"]
        at_once = down + up if both_ways else np.maximum(down, up)
        together: NDArray[np.bool_] = at_once <= axes["duplex"] * (1 + 1e-12)
        return free & together

    # ---- strategies ---------------------------------------------------------------------------

    def _on_device(self, axes: dict[str, Array]) -> Steady:
        overheads = self._costs.hardware.overheads
        step = overheads.step.value + self._costs.num_params / overheads.device_update.value
        seconds = self._passed(axes)[:, -1] + step
        nothing = np.zeros_like(seconds)
        return Steady(seconds, nothing, nothing, np.ones(len(seconds), bool))

    def _zero_offload(self, axes: dict[str, Array]) -> Steady:
        """All phases in turn: only copies overlap backward, and nothing else is under way."""
        overheads, size = self._costs.hardware.overheads, self._costs.dtype_bytes
        passed = self._passed(axes)
        copies = self._copy_seconds(self._elements * 2.0, axes["d2h"])
        copied = served(passed, copies)[:, -1]
        stepped = passed[:, -1] + overheads.step.value
        total = self._elements.sum(keepdims=True)
        update = self._host_seconds(HostTasks(total * 28.0, 0.0 * total), axes)[:, 0]
        upload = self._copy_seconds(total * size, axes["h2d"])[:, 0]
        seconds = np.maximum(stepped, copied) + update + upload
        limits = axes["dram"] / self._rates.sharing
        alone = (axes["d2h"] <= limits) & (axes["h2d"] <= limits)
        alone &= np.maximum(axes["d2h"], axes["h2d"]) <= axes["duplex"]
        return Steady(seconds, seconds - stepped, np.zeros_like(seconds), alone)

    def _in_turn(self, axes: dict[str, Array]) -> Steady:
        """The engine without overlap: updates start as copies arrive, one upload ends the step."""
        step = self._released(axes)
        stepped, copied = step.stepped, step.copied
        (phase,) = self._phases
        tasks = self._host_seconds(phase.update, axes)
        ready = np.maximum(copied, stepped[:, None])
        done = served(ready, tasks)[:, -1]
        total = phase.uploads.sum(keepdims=True)
        upload = self._copy_seconds(total, axes["h2d"], self._unpack_rate)[:, 0]
        stall = done - stepped + upload
        alone = copied[:, -1] <= stepped
        rates = self._rates
        used = rates.host_sharing * axes["host"] + rates.sharing * axes["d2h"]
        room = used <= axes["dram"]
        applies = self._copies_are_free(axes, both_ways=False) & (alone | room) & step.is_free
        selection = np.zeros_like(stall)
        if self._interval and (chosen := phase.selected > 0).any():
            # No update of a block that selects begins before all that do have their gradients.
            selected = ready[:, chosen].max(axis=1) + self._selecting(phase)
            others = np.where(chosen, 0.0, tasks)
            applies &= (others.sum(axis=1) == 0) | (served(ready, others)[:, -1] <= selected)
            after = selected + np.where(chosen, tasks, 0.0).sum(axis=1)
            selection = (after - done) / self._interval
        return Steady(
            stepped + stall + selection, stall + step.pressed + selection, selection, applies
        )

    def _overlapped(self, axes: dict[str, Array], *, is_least: bool) -> Steady:
        """The engine behind a device that it keeps up with: what is left is the last uploads.

        Args:
            axes: What differs from machine to machine.
            is_least: Whether selections are to wait as little as they can for the host, or as
                long as they may.
        """
        step = self._released(axes)
        passed, stepped, copied = step.passed, step.stepped, step.copied
        assert self._strategy.config is not None
        config = self._strategy.config
        is_fused = config.effective_lag() == 1
        applies = self._copies_are_free(axes, both_ways=True) & step.is_free
        applies &= self._uploads_leave_in_time(axes, step)
        stalls = [
            np.maximum(0.0, uploads.ended(passed, axes["h2d"]) - stepped)
            for uploads in self._uploads
        ]
        selection = np.zeros_like(stepped)
        for index, uploads in enumerate(self._uploads):
            before, end = self._phases[index - 1], stepped + stalls[index - 1]
            ends = [(stepped, end)]  # from which on the host works, and the step's own
            if self._interval and before.selected.any():
                selected = self._selected(before, axes, step, end, is_least=is_least)
                selection += (selected - end) / self._interval
                ends.append((selected, selected))
            for begun, ended in ends:
                done = self._host_done(before, axes, begun, copied, is_fused)
                free = done - ended[:, None]
                # A gradient whose place on the host is free late would hold backward up.
                applies &= ((free <= step.begun) | (self._grads == 0)).all(axis=1)
                if is_fused:
                    delayed = uploads.ended(np.maximum(passed, free), axes["h2d"])
                    applies &= delayed <= (stepped + stalls[index]) * _EXACT
        if not is_fused:
            applies &= self._keeps_up(axes, stepped, copied, config)
        mean: Array = np.mean(stalls, axis=0) + selection
        return Steady(stepped + mean, mean + step.pressed, selection, applies)

    def _selecting(self, phase: WindowPhase) -> float:
        """Return the seconds in which a step's blocks choose columns and hand them over."""
        return float(phase.selected.sum()) * self._costs.hardware.overheads.select.value

    def _selected(
        self, phase: WindowPhase, axes: dict[str, Array], step: Released, end: Array, *,
        is_least: bool,
    ) -> Array:  # fmt: skip
        """Return the end of a step that selects, which ends at ``end`` otherwise, (N,).

        The device waits until the gradients of all blocks that select are on the host; under the
        published rule until they have been added up, too, which bounds are known for only.
        """
        chosen = phase.selected > 0
        ready = step.copied
        adds = phase.intake.num_bytes > 0
        if self._adds and (adds & chosen).any():
            if is_least:
                lengths = self._host_seconds(phase.intake, axes)
                added = served(np.maximum(ready, step.stepped[:, None]), lengths)
            else:
                added = self._host_done(phase, axes, step.stepped, ready, is_fused=False)
            ready = np.where(adds, np.maximum(ready, added), ready)
        selected: Array = np.maximum(end, ready[:, chosen].max(axis=1)) + self._selecting(phase)
        return selected

    def _uploads_leave_in_time(self, axes: dict[str, Array], step: Released) -> NDArray[np.bool_]:
        """Return where the ring never waits for an upload that reads what lies in it."""
        in_time = np.ones(len(step.stepped), bool)
        # Uploads read the tails: that of segment l is copy 2 l + 1.
        (waiting,) = np.nonzero(self._ring.room >= 1)
        if not len(waiting):
            return in_time
        last = (self._ring.room[waiting] - 1) // 2
        going_on = step.passed.copy()
        going_on[:, -1] += step.pressed
        for phase in self._phases:
            lengths = self._copy_seconds(phase.uploads, axes["h2d"], self._unpack_rate)
            ended = served(step.passed, lengths)[:, last]
            in_time &= (ended <= going_on[:, waiting] * _EXACT).all(axis=1)
        return in_time

    def _host_done(
        self,
        phase: WindowPhase,
        axes: dict[str, Array],
        stepped: Array,
        copied: Array,
        is_fused: bool,
    ) -> Array:
        """Return by when the host is done with each segment of a step at the latest, (N, L).

        It takes each segment's gradients in, and updates what is due there. Each byte that is
        copied meanwhile, the rest of this step's and the next one's, costs it a byte of DRAM at
        most.
        """
        intake = self._host_seconds(phase.intake, axes)
        copies = 2 * (self._grads.sum() + phase.uploads.sum())
        lost = copies / np.minimum(axes["host"], axes["dram"] / self._rates.host_sharing)
        start = np.maximum(copied[:, -1], stepped) + lost
        if is_fused:
            intake = intake + self._host_seconds(phase.update, axes)
        done: Array = start[:, None] + np.cumsum(intake, axis=1)
        return done

    def _keeps_up(
        self, axes: dict[str, Array], stepped: Array, copied: Array, config: ZenFlowConfig
    ) -> NDArray[np.bool_]:
        """Return where updates with a lag of several steps end in time beside all intake."""
        lag = config.effective_lag()
        intake = sum(self._host_seconds(p.intake, axes).sum(axis=1) for p in self._phases)
        update = sum(self._host_seconds(p.update, axes).sum(axis=1) for p in self._phases)
        mean_intake = intake / len(self._phases)
        late = np.maximum(copied[:, -1] - stepped, 0.0)
        copies = self._grads.sum() + max(phase.uploads.sum() for phase in self._phases)
        rate = np.minimum(axes["host"], axes["dram"] / self._rates.host_sharing)
        lost = (lag + 1) * copies / rate
        enough: NDArray[np.bool_] = late + lost + update + (lag + 1) * mean_intake <= lag * stepped
        return enough

    @property
    def _scatter_rate(self) -> float:
        overheads = self._costs.hardware.overheads
        return (overheads.unpack_bandwidth or overheads.pack_bandwidth).value

    def _released(self, axes: dict[str, Array]) -> Released:
        """Return when a step's parts end whose gradients leave through the ring."""
        overheads, size = self._costs.hardware.overheads, self._costs.dtype_bytes
        shares = self._plan.shares[::-1]
        intake = np.array([s.split * size / overheads.intake_bandwidth.value for s in shares])
        moved = np.array([float(elements) for elements in self._moved[::-1]]) * moved_bytes(size)
        moved += [s.split * measured_bytes(self._plan.config, size) for s in shares]
        intake += moved / self._costs.elementwise_bandwidth
        passed = self._passed(axes, intake + self._grads / overheads.pack_bandwidth.value)
        start = self._costs.accumulation * axes["forward"]
        start = start + (self._costs.accumulation - 1) * axes["backward"]
        begun = np.concatenate([start[:, None], passed[:, :-1]], axis=1)
        ended = self._ring.ended(begun, passed, axes["d2h"])
        waits = np.where(self._ring.room >= 0, ended[:, self._ring.room], -np.inf)
        pressed = np.maximum(0.0, waits[:, -1] - passed[:, -1])
        rate = overheads.column_update or overheads.device_update
        seconds = overheads.step.value + self._plan.important / rate.value
        seconds += self._plan.resident / overheads.device_update.value
        return Released(
            begun=begun,
            passed=passed,
            stepped=passed[:, -1] + pressed + seconds,
            copied=np.maximum.accumulate(ended[:, 1::2], axis=1),
            pressed=pressed,
            is_free=np.all(waits[:, :-1] <= passed[:, :-1] * _EXACT, axis=1),
        )


_SYSTEM_FORMULAS: Mapping[str, Callable[[ClosedForm, dict[str, Array]], Steady]] = {
    "published_on_device": ClosedForm._on_device,
    "published_zero_offload": ClosedForm._zero_offload,
}
"""Formulas of other systems' schedules."""


def _crowded(axes: dict[str, Array]) -> dict[str, Array]:
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
        return strategy.name in _SYSTEM_FORMULAS and not strategy.options
    config = strategy.config
    in_turn = not config.overlap_step and config.update_interval > 1
    # Blocks that end in turn and land late would wait for one another's updates.
    entangled = selects_every(config) > 0 and config.rolling and config.effective_lag() > 1
    return strategy.releases and not in_turn and not entangled
