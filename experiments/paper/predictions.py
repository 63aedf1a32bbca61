"""Predictions of published set-ups, from the table of hardware and the models' configs.

Nothing is fitted to a measurement. The table's share of DRAM's bandwidth that DeepSpeed's CPU step
reaches is from the phases in the ZenFlow paper, and that of kernels alone from the largest sizes
in three tables, which are no rows.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from experiments.paper.published import BREAKDOWN
from experiments.paper.setups import AnySetup, HostPass, Phases, Quantity, Setup
from sim.fitting.left_out import BY_REGIME, LeftOut
from sim.fitting.regimes import regime_of as regime_of_run
from sim.fitting.uncertainty import Interval, interval_of, threads_are_open
from sim.hardware.catalog import find_machine
from sim.hardware.profile import HardwareProfile
from sim.machine import Machine, least_seconds
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.schedules.systems.deepspeed_zero_offload import RELEASED, host_seconds
from sim.simulate import Strategy
from sim.timing.costs import StepCosts, costs_of
from sim.timing.phases import costs_of_phases

SHARE = "host.deepspeed_share"
"""Name of the figure of DeepSpeed's CPU step."""
_UNBOUND = 1e6
"""Share with which DRAM and cores alone bound it."""
_FIGURES = (
    "host.dram", "host.adam_share", "host.numa_hop", "link.d2h", "link.h2d", "link.pageable",
    "device.bandwidth", "device.matmul_efficiency", "device.launch", "overheads.device_update",
    "fabric.bandwidth", "network.bandwidth", SHARE,
)  # fmt: skip
_ON_THE_HOST = ("deepspeed_zero_offload", "deepspeed_zenflow", "zero3_offload")
"""Strategies with DeepSpeed's CPU step."""
_SETTLING, _MEASURED = 3, 2
"""Numbers of windows that settle, and that are measured."""


def step_bytes() -> float:
    """Return the bytes of DRAM that DeepSpeed's CPU step moves for each parameter."""
    return RELEASED.prepare + RELEASED.update + RELEASED.convert


def deepspeed_rate() -> float:
    """Return the bytes/s that DeepSpeed's CPU step moves on the paper's first host."""
    return BREAKDOWN.num_params * step_bytes() / BREAKDOWN.update


def runs_deepspeed_step(setup: AnySetup) -> bool:
    """Return whether DeepSpeed's CPU step is part of a set-up."""
    if isinstance(setup, HostPass):
        return setup.bytes_each is None
    return isinstance(setup, Setup) and setup.strategy in _ON_THE_HOST


def hardware_of(setup: AnySetup) -> HardwareProfile:
    """Return a set-up's machine."""
    if isinstance(setup, Phases):
        return _phase_costs(setup).hardware
    if isinstance(setup, HostPass):
        profile = find_machine(setup.machine, setup.devices)
    else:
        profile = find_machine(
            setup.machine, setup.devices, num_hosts=setup.hosts, network=setup.network
        )
        profile = profile.with_values(_launches(profile, *setup.launches))
        profile = replace(profile, host_threads=setup.host_threads)
    return replace(profile, binds_cores=setup.binds_cores)


def _launches(profile: HardwareProfile, forward: float, backward: float) -> dict[str, float]:
    """Return the seconds of a launch where the host takes so many times longer for a layer."""
    device = profile.device
    assert device.backward_launch is not None  # of every device of the table
    return {
        "device.launch": forward * device.launch.value,
        "device.backward_launch": backward * device.backward_launch.value,
    }


def regime_of(setup: AnySetup) -> str:
    """Return the kind of work that bounds a set-up, by which errors are compared."""
    if isinstance(setup, Phases):
        return "phases given"
    if isinstance(setup, HostPass):
        return "the host's pass"
    costs = costs_of(workload_of(setup), hardware_of(setup))
    return regime_of_run(costs, _strategy_of(setup))


def _strategy_of(setup: Setup) -> Strategy:
    return Strategy.of(setup.strategy, **setup.options)


def at_roofline(hardware: HardwareProfile) -> HardwareProfile:
    """Return a machine on which DRAM and cores alone bound DeepSpeed's CPU step."""
    return hardware.with_values({SHARE: _UNBOUND, "host.adam_share": 1.0})


def predict(setup: AnySetup, quantity: Quantity, hardware: HardwareProfile | None = None) -> float:
    """Return the seconds that a set-up takes.

    Args:
        setup: What ran.
        quantity: Which of its times.
        hardware: The machine; None is the set-up's own.
    """
    hardware = hardware_of(setup) if hardware is None else hardware
    machine = Machine(hardware, keeps_spans=False)
    if isinstance(setup, HostPass):
        share = setup.num_params / setup.devices
        if setup.bytes_each is None:
            return host_seconds(machine, share)
        return least_seconds(machine.host_kind, share * setup.bytes_each)
    if isinstance(setup, Phases):
        costs = replace(_phase_costs(setup), hardware=hardware)
        return _simulated(machine, costs, Strategy.of(setup.strategy), quantity)
    costs = costs_of(workload_of(setup), hardware)
    if quantity == "compute":
        return costs.compute_seconds
    return _simulated(machine, costs, _strategy_of(setup), quantity)


def predict_costs(costs: StepCosts, strategy: Strategy, quantity: Quantity, rate: float) -> float:
    """Return the seconds that a strategy takes on the costs' machine.

    Args:
        costs: Of one step.
        strategy: What runs.
        quantity: Which of its times.
        rate: Bytes/s that CPU code reaches on the host at most.
    """
    machine = Machine(costs.hardware, keeps_spans=False)
    machine.host_kind = machine.bounded_host(rate)
    return _simulated(machine, costs, strategy, quantity)


def _phase_costs(setup: Phases) -> StepCosts:
    return costs_of_phases(
        forward=setup.forward,
        backward=setup.backward,
        d2h=setup.d2h,
        update=setup.update,
        h2d=setup.h2d,
        num_params=setup.num_params,
    )


def workload_of(setup: Setup) -> Workload:
    """Return the workload of a set-up's step."""
    name, config = setup.model, setup.config
    if config is None:
        name, config = find_model(setup.model)
    return Workload.of_config(
        name,
        config,
        batch_size=setup.batch_size,
        sequence=setup.sequence,
        accumulation=setup.accumulation,
        checkpointing=setup.checkpointing,
        offloads_activations=setup.offloads_activations,
        kernels=setup.kernels,
        attention=setup.attention,
        loss=setup.loss,
        trainer=setup.trainer,
        dtype=setup.dtype,
    )


def _simulated(
    machine: Machine, costs: StepCosts, strategy: Strategy, quantity: Quantity
) -> float:
    """Return a mean over windows in the steady state; selections are left out."""
    schedule = strategy.schedule(machine, costs)
    period = strategy.period
    warm_up = strategy.config.full_warm_up_rounds if strategy.config is not None else 0
    settled = warm_up + _SETTLING * period
    machine.run(schedule.run(settled + _MEASURED * period))
    lengths = [b - a for a, b in itertools.pairwise(schedule.step_ends[settled - 1 :])]
    chosen = {
        "step": lengths,
        "stall": schedule.stalls[settled:],
        "accumulating": [s for number, s in enumerate(lengths, 1) if number % period],
        "boundary": lengths[period - 1 :: period],
    }[quantity]
    return sum(chosen) / len(chosen)


def intervals(setup: AnySetup, quantity: Quantity, draws: int) -> tuple[Interval, Interval]:
    """Return a time's interval by the machine's quantities, and one with the model's own error.

    Given phases have no such error.
    """
    times: list[float] = []

    def drawn(hardware: HardwareProfile) -> float:
        times.append(predict(setup, quantity, hardware))
        return times[-1]

    machine = hardware_of(setup)
    term = BY_REGIME.get(regime_of(setup), LeftOut(0.0, 0.0))  # of phases that are given
    is_open = isinstance(setup, Setup) and threads_are_open(machine, _strategy_of(setup))
    figures = interval_of(machine, drawn, count=draws, draws_threads=is_open)
    again = iter(times)
    whole = interval_of(
        machine, lambda _: next(again), count=draws, left_out=term, draws_threads=is_open
    )
    return figures, whole


def elasticities(setup: AnySetup, quantity: Quantity, by: float = 0.05) -> dict[str, float]:
    """Return per cent of a time for one per cent of a figure, the largest first."""
    profile, before = hardware_of(setup), predict(setup, quantity)
    figures = profile.quantities()
    found = {}
    for name in _FIGURES:
        if name in figures:  # less of it, since a share can't exceed 1
            less = profile.with_values({name: figures[name].value * (1 - by)})
            found[name] = predict(setup, quantity, less)
    shares = {name: math.log(after / before) / math.log(1 - by) for name, after in found.items()}
    return {k: v for k, v in sorted(shares.items(), key=lambda i: -abs(i[1])) if abs(v) >= 0.02}
