"""Simulate: run a strategy on a machine until it repeats, and say what a step takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from sim.hardware.profile import HardwareProfile
from sim.lanes import Recording
from sim.machine import Machine
from sim.schedules.drive import LANE as DRIVE
from sim.schedules.parallel.averaged import AveragedEngineSchedule
from sim.schedules.parallel.ddp import DDP
from sim.schedules.parallel.deepspeed_zero2 import DEEPSPEED_ZERO2
from sim.schedules.parallel.deepspeed_zero3 import DEEPSPEED_ZERO3, ZERO3_OFFLOAD
from sim.schedules.parallel.fsdp import FSDP2, FSDP2_OFFLOAD
from sim.schedules.parallel.zenflow import ShardedEngineSchedule
from sim.schedules.schedule import AbstractSchedule, System
from sim.schedules.streamed import StreamedEngineSchedule
from sim.schedules.streams import Streams
from sim.schedules.systems.deep_optimizer_states import DEEP_OPTIMIZER_STATES
from sim.schedules.systems.deepspeed_zenflow import DEEPSPEED_ZENFLOW
from sim.schedules.systems.deepspeed_zero_offload import DEEPSPEED_ZERO_OFFLOAD
from sim.schedules.systems.layer_overlapped import LAYER_OVERLAPPED
from sim.schedules.systems.layer_streaming import MEGATRAIN, ROUNDPIPE, SLIDEFORMER
from sim.schedules.systems.lora import LORA, QLORA
from sim.schedules.systems.on_device import PUBLISHED_ON_DEVICE
from sim.schedules.systems.quantised_states import ADAMW_4BIT, ADAMW_8BIT
from sim.schedules.systems.superoffload import SUPEROFFLOAD, TORCHAO_OFFLOAD
from sim.schedules.systems.zero_infinity import PUBLISHED_ZERO_INFINITY
from sim.schedules.systems.zero_offload import (
    PUBLISHED_DELAYED,
    PUBLISHED_ZERO_OFFLOAD,
)
from sim.schedules.zenflow import EngineSchedule
from sim.timing.costs import StepCosts
from sim.timing.division import PARALLELS, Division
from sim.timing.drive_memory import check_on_drive
from zenflow.config import ZenFlowConfig, unknown_name
from zenflow.errors import ConfigError
from zenflow.presets import PRESET_CHANGES, ZERO_INFINITY
from zenflow.trace.timeline import Timeline

SYSTEMS: Mapping[str, System] = {
    system.name: system
    for system in (
        PUBLISHED_ON_DEVICE,
        PUBLISHED_ZERO_OFFLOAD,
        PUBLISHED_DELAYED,
        DEEPSPEED_ZERO_OFFLOAD,
        DEEPSPEED_ZENFLOW,
        PUBLISHED_ZERO_INFINITY,
        DEEP_OPTIMIZER_STATES,
        LAYER_OVERLAPPED,
        SUPEROFFLOAD,
        TORCHAO_OFFLOAD,
        ADAMW_8BIT,
        ADAMW_4BIT,
        LORA,
        QLORA,
        MEGATRAIN,
        SLIDEFORMER,
        ROUNDPIPE,
        DDP,
        DEEPSPEED_ZERO2,
        DEEPSPEED_ZERO3,
        FSDP2,
        FSDP2_OFFLOAD,
        ZERO3_OFFLOAD,
    )
}
"""Other systems by name; the engine's own strategies are its presets."""

STRATEGIES: tuple[str, ...] = (*PRESET_CHANGES, *SYSTEMS)

PASSES = ("forward", "backward")
"""Names of the device's passes."""

_OWN_LANES = ("device", "launch")
"""Lanes whose work is the device's own."""
SETTLING_WINDOWS = 3
"""Least number of windows before a run counts as steady."""
_MEASURED_WINDOWS = 2
_FEWEST_STEPS = 4
"""Least number of measured steps, however short the windows are."""
STEADY = 1e-3
"""Relative difference of two windows that counts as none."""
LONGEST_SETTLING = 40
"""Number of windows after which a run is measured, steady or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted steady-state step of one device; seconds and bytes. See `simulate`."""

    strategy: str
    step_seconds: float
    """Mean seconds of a step over whole windows."""
    slowest_step_seconds: float
    """Seconds of the longest step, selections aside: the update's work may be uneven."""
    stall_seconds: float
    """Mean seconds of a step in which the device waits."""
    selection_seconds: float = 0.0
    """Seconds of step and stall that are selections of columns, spread over the steps between."""
    d2h_bytes: float
    """Bytes copied to the host, per step."""
    h2d_bytes: float
    """Bytes copied to the device, per step."""
    drive_read_bytes: float = 0.0
    """Bytes read from drives, per step."""
    drive_written_bytes: float = 0.0
    """Bytes written to drives, per step."""
    fabric_bytes: float = 0.0
    """Bytes that collectives pass through the device, per step."""
    busy_seconds: Mapping[str, float]
    """Seconds of work of each lane, per step."""
    passes: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the device's forward and backward, per step."""
    update_seconds: float = 0.0
    """Seconds of the device's work that are the optimizer's own step, per step."""
    timeline: Timeline
    """Spans of the measured steps, none of which selects; empty if spans were not kept."""

    @property
    def stall_fraction(self) -> float:
        """Share of the step in which the device waits."""
        return self.stall_seconds / self.step_seconds if self.step_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name, without the timeline."""
        return {
            "strategy": self.strategy,
            "step_seconds": self.step_seconds,
            "slowest_step_seconds": self.slowest_step_seconds,
            "stall_seconds": self.stall_seconds,
            "stall_fraction": self.stall_fraction,
            "selection_seconds": self.selection_seconds,
            "d2h_bytes_per_step": self.d2h_bytes,
            "h2d_bytes_per_step": self.h2d_bytes,
            "fabric_bytes_per_step": self.fabric_bytes,
            "drive_read_bytes_per_step": self.drive_read_bytes,
            "drive_written_bytes_per_step": self.drive_written_bytes,
            "busy_seconds": dict(self.busy_seconds),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A strategy by name, with the engine's configuration where it is one of its presets.

    See `Strategy.of`.
    """

    name: str
    config: ZenFlowConfig | None = None
    """Settings of the engine; None for other systems."""
    releases: bool = True
    """The engine's gradient mode: whether gradients leave during backward."""
    parallel: str = "ddp"
    """Way in which the engine's devices share a model, one of `PARALLELS`; other systems have
    their own."""
    reshards: bool = True
    """Whether the engine's sharded weights are dropped behind forward."""
    streams: Streams | None = None
    """How the weights of the engine's model visit its device; None where all stay there."""
    state_on_drive: bool = False
    """Whether the states that the engine's host has are on a drive."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of another system's schedule that are not its defaults."""

    @classmethod
    def of(
        cls,
        name: str,
        *,
        releases: bool = True,
        parallel: str = "ddp",
        reshards: bool = True,
        streams: Streams | None = None,
        state_on_drive: bool = False,
        **changes: Any,
    ) -> Strategy:
        """Return the strategy of this name.

        Args:
            name: Of a preset or of another system.
            releases: The engine's gradient mode.
            parallel: How the engine's devices share a model, one of `PARALLELS`.
            reshards: Whether sharded weights are dropped behind forward.
            streams: How the weights of the engine's model visit its device; all layers of
                zero_infinity do in any case.
            state_on_drive: Whether the states that the engine's host has are on a drive, as those
                of zero_infinity are in any case.
            changes: Knobs, or options of another system.

        Raises:
            ConfigError: There is no such strategy or option, a knob breaks its rule, or the
                strategy does not share a model in this way.

        Examples:
            >>> Strategy.of("zenflow", update_interval=8).period
            8
            >>> Strategy.of("fsdp2_offload").config is None  # another project's system
            True
        """
        if parallel not in PARALLELS:
            raise ConfigError(f"parallel {unknown_name(parallel, PARALLELS)}")
        if name in SYSTEMS:
            if streams is not None:
                raise ConfigError(
                    f"{name} has its own way, or none, to stream weights: leave streams out"
                )
            if state_on_drive:
                raise ConfigError(f"{name} has its own place for states: leave state_on_drive out")
            if parallel != "ddp":
                raise ConfigError(
                    f"{name} shares a model in its own way: leave parallel out, or take fsdp2"
                )
            changes |= {} if reshards else {"reshard_after_forward": False}
            SYSTEMS[name].options(changes)  # refuses what there is not
            return cls(name=name, options=changes)
        if name not in PRESET_CHANGES:
            raise ConfigError(f"strategy {unknown_name(name, STRATEGIES)}")
        if others := [key for key in changes if key.startswith("lora_")]:
            raise ConfigError(
                f"{name} has no adapters, so it does not take {', '.join(others)}: take lora or "
                "qlora"
            )
        if "float32_master" in changes:
            raise ConfigError(
                f"{name} always has float32 masters, so it does not take float32_master: take "
                "ddp, fsdp2, fsdp2_offload or torchao_offload"
            )
        if not reshards and parallel != "fsdp":
            raise ConfigError(
                "reshard_after_forward is about sharded weights: give parallel fsdp as well"
            )
        config = ZenFlowConfig.preset(name, **changes)
        if name == ZERO_INFINITY:
            state_on_drive, streams = True, streams or Streams()
        if state_on_drive:
            check_on_drive(config)
        return cls(
            name=name,
            config=config,
            releases=releases,
            parallel=parallel,
            reshards=reshards,
            streams=streams,
            state_on_drive=state_on_drive,
        )

    @property
    def warm_up(self) -> int:
        """Number of first steps that defer nothing."""
        return 0 if self.config is None else self.config.full_warm_up_rounds

    @property
    def period(self) -> int:
        """Number of steps after which a steady state repeats."""
        if self.config is not None:
            return self.config.update_interval
        return int(self.system.options(self.options).get("update_interval", 1))

    @property
    def system(self) -> System:
        """Record of the other system with this strategy's name."""
        return SYSTEMS[self.name]

    def division(self, hardware: HardwareProfile) -> Division:
        """Return the division of the engine's work among the devices of a machine."""
        return Division.of(self.parallel, hardware.total_devices)

    def schedule(self, machine: Machine, costs: StepCosts) -> AbstractSchedule:
        """Return the schedule on a machine.

        Raises:
            ConfigError: The other system has no such option.
        """
        if self.config is not None:
            division = self.division(machine.hardware)
            settings: dict[str, Any] = {
                "releases": self.releases,
                "division": division,
                "state_on_drive": self.state_on_drive,
            }
            if self.streams is not None:
                if machine.hardware.total_devices > 1:
                    raise ConfigError(
                        "weights are streamed to one device: take one, or leave streams out"
                    )
                settings["streams"] = self.streams
                return StreamedEngineSchedule(machine, costs, self.config, **settings)
            if division.device > 1:
                settings["reshards"] = self.reshards
                return ShardedEngineSchedule(machine, costs, self.config, **settings)
            if division.host > 1:
                return AveragedEngineSchedule(machine, costs, self.config, **settings)
            return EngineSchedule(machine, costs, self.config, **settings)
        return self.system.schedule(machine, costs, **self.system.options(self.options))


def busiest_lane(done: Prediction) -> str | None:
    """Return the lane beside the device's own with most work; None if there is none."""
    others = {
        lane: seconds for lane, seconds in done.busy_seconds.items() if lane not in _OWN_LANES
    }
    return max(others, key=lambda lane: others[lane]) if any(others.values()) else None


def simulate(
    costs: StepCosts,
    strategy: Strategy,
    *,
    pinned: bool = True,
    keeps_spans: bool = True,
    num_steps: int | None = None,
    settling_windows: int = SETTLING_WINDOWS,
    longest_settling: int = LONGEST_SETTLING,
) -> Prediction:
    """Return the prediction of a steady-state step, simulated event by event.

    A selection of columns costs the engine a stall once in `select_interval` steps. The stall is
    simulated by itself and spread over these steps, so that few steps say what many would.

    Args:
        costs: Of one step of the model on the machine.
        strategy: What to run.
        pinned: Whether the host's copy buffers are pinned.
        keeps_spans: Whether the prediction has a timeline.
        num_steps: Measured steps, rounded up to whole windows; None for a few windows.
        settling_windows: Windows before those, at least; more where queues still grow.
        longest_settling: Windows after which a run is taken as it is.

    Raises:
        ConfigError: The strategy's options are wrong.

    Examples:
        >>> from sim.timing.phases import costs_of_phases
        >>> costs = costs_of_phases(
        ...     forward=1.0, backward=2.0, d2h=1.0, update=3.0, h2d=1.0, num_params=10**9)
        >>> step = simulate(costs, Strategy.of("published_zero_offload"))
        >>> round(step.step_seconds, 1), round(step.stall_seconds, 1)
        (7.0, 4.0)
    """
    if strategy.config is None:  # refuses options before they are used
        strategy.schedule(Machine(costs.hardware), costs)
    period = strategy.period
    measured = measured_steps(period, num_steps)
    settling = strategy.warm_up + settling_windows * period
    while True:
        machine = Machine(costs.hardware, pinned=pinned, keeps_spans=keeps_spans)
        schedule = selecting_every(strategy, 0).schedule(machine, costs)
        machine.run(schedule.run(settling + measured))
        lengths = [end - start for start, end in pairwise(schedule.step_ends[settling - 1 :])]
        recording = machine.recording
        busy = {lane: recording.since(settling, lane)[0] / measured for lane in recording.lanes}
        if (
            is_steady(lengths, period, busy | _each_way(recording, settling, measured))
            or settling > longest_settling * period
        ):
            break
        settling *= 2  # queues are still growing: a long lag takes its time to fill up
    selection = _selection_seconds(costs, strategy, schedule.step_ends, settling, pinned)
    # Under DDP what is uploaded is gathered in the same lane.
    gathered = recording.since(settling, "h2d", "all-gather")[1]
    timeline = recording.timeline(
        {
            "strategy": strategy.name,
            "device": costs.hardware.device.name,
            "period": period,
            "end_seconds": schedule.step_ends[-1],
            # None of these steps shows a selection: readers add what those take on average.
            "selection_seconds": selection,
        },
        settling,
    )
    return Prediction(
        strategy=strategy.name,
        step_seconds=sum(lengths) / measured + selection,
        slowest_step_seconds=max(lengths),
        stall_seconds=sum(schedule.stalls[settling:]) / measured + selection,
        selection_seconds=selection,
        d2h_bytes=_moved(recording, settling, "d2h") / measured,
        h2d_bytes=(_moved(recording, settling, "h2d") - gathered) / measured,
        drive_read_bytes=_of_drives(recording, settling, "read") / measured,
        drive_written_bytes=_of_drives(recording, settling, "write") / measured,
        fabric_bytes=(recording.since(settling, "fabric")[1] + gathered) / measured,
        busy_seconds=busy,
        passes={name: recording.since(settling, "device", name)[0] / measured for name in PASSES},
        update_seconds=recording.since(settling, "device", "step")[0] / measured,
        timeline=timeline,
    )


def _each_way(recording: Recording, settling: int, measured: int) -> dict[str, float]:
    """Return the seconds per step of a drive's busier way: one lane has reads and writes."""
    if DRIVE not in recording.lanes:
        return {}
    ways = [recording.since(settling, DRIVE, name)[0] for name in ("read", "write")]
    return {DRIVE: max(ways) / measured}


def _of_drives(recording: Recording, settling: int, name: str) -> float:
    """Return the bytes that drives have read or written since some steps, for any strategy."""
    own = recording.since(settling, DRIVE, name)[1]
    return own + recording.since(settling, f"nvme {name}")[1]


def _moved(recording: Recording, settling: int, direction: str) -> float:
    """Return the bytes that have moved in a direction since some steps, with streamed weights."""
    lanes = (direction, f"weights {direction}")
    return sum(recording.since(settling, lane)[1] for lane in lanes if lane in recording.lanes)


def selects_every(config: ZenFlowConfig) -> int:
    """Return the steps from one selection of columns to the next; 0 where none recurs."""
    return config.select_interval_steps if 0 < config.topk_ratio < 1 else 0


def measured_steps(period: int, num_steps: int | None = None) -> int:
    """Return the number of measured steps: whole windows, as many as asked for or a few."""
    wanted = max(_FEWEST_STEPS, _MEASURED_WINDOWS * period) if num_steps is None else num_steps
    return -(-wanted // period) * period


def steps_to_next_selection(settling: int, warm_up: int) -> int:
    """Return the steps from a selection behind the settling ones to one that follows.

    Both follow one right behind warm-up, as often as each other.
    """
    return settling + 1 - max(1, warm_up)


def is_steady(lengths: Sequence[float], period: int, busy: Mapping[str, float]) -> bool:
    """Whether first and last window are as long, and no lane has more work than time.

    A lane with more work for a step than the step is long falls behind, until something waits.
    """
    first, last = sum(lengths[:period]), sum(lengths[-period:])
    mean = sum(lengths) / len(lengths)
    return abs(last - first) <= STEADY * last and max(busy.values()) <= mean * (1 + STEADY)


def selecting_every(strategy: Strategy, select_interval: int) -> Strategy:
    """Return the strategy with selections so many steps apart; 0 selects once, at first."""
    if strategy.config is None:
        return strategy
    config = replace(strategy.config, select_strategy="step", select_interval=select_interval)
    return replace(strategy, config=config)


def _selection_seconds(
    costs: StepCosts, strategy: Strategy, ends: Sequence[float], settling: int, pinned: bool
) -> float:
    """Return the seconds by which selections lengthen a step, spread over all steps.

    The same steps are taken again with one selection as the first is measured: the end of the
    steps that follow moves by what it costs.
    """
    every = 0 if strategy.config is None else selects_every(strategy.config)
    if not every:
        return 0.0
    once_more = steps_to_next_selection(settling, strategy.warm_up)
    steps = min(len(ends), settling + once_more)  # before another one falls due
    machine = Machine(costs.hardware, pinned=pinned, keeps_spans=False)
    # Selected at the first step after warm-up, and again right behind the settling ones.
    again = selecting_every(strategy, once_more).schedule(machine, costs)
    machine.run(again.run(steps))
    return max(0.0, again.step_ends[-1] - ends[steps - 1]) / every
