"""Predictions of published set-ups, from the table of hardware and the models' configs.

Nothing is fitted to a measurement. One constant is measured: what DeepSpeed's CPU step reaches,
from the phases in the ZenFlow paper, for all set-ups that run it alike.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from experiments.literature.measurements import BREAKDOWN
from experiments.literature.setups import AnySetup, HostPass, Phases, Quantity, Setup
from sim.fitting.left_out import TABLE
from sim.fitting.uncertainty import Interval, interval_of
from sim.fluid import Resource
from sim.hardware.catalog import find_machine
from sim.hardware.profile import HardwareProfile
from sim.machine import Machine, least_seconds
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.schedules.deepspeed_zero_offload import RELEASED
from sim.simulate import Strategy
from sim.timing.costs import StepCosts, costs_of
from sim.timing.phases import costs_of_phases

RATE = "DeepSpeed's CPU step"
"""Name of the constant among the figures that a prediction depends on."""
RATE_SIGMA = 0.15
"""Its relative uncertainty: issue 6834's 1.8 G parameters/s of a host against the paper's 1.46."""
_FIGURES = (
    "host.dram", "host.numa_hop", "link.d2h", "link.h2d", "link.pageable", "device.bandwidth",
    "device.matmul_efficiency", "device.launch", "overheads.device_update", "fabric.bandwidth",
    "network.bandwidth",
)  # fmt: skip
_SETTLING, _MEASURED = 3, 2
"""Windows."""


class _StepMachine(Machine):
    """A machine on whose host CPU code reaches a given rate, below what DRAM and cores allow."""

    def __init__(self, hardware: HardwareProfile, rate: float) -> None:
        """Bound the host's work to so many bytes/s of DRAM, shared by all devices."""
        super().__init__(hardware, keeps_spans=False)
        if math.isfinite(rate):
            step = Resource("cpu step", rate * self.rates.reach / hardware.num_devices)
            self.host_kind = replace(self.host_kind, uses={**self.host_kind.uses, step: 1.0})


def step_bytes() -> float:
    """Return the bytes of DRAM that DeepSpeed's CPU step moves for each parameter."""
    return RELEASED.prepare + RELEASED.update + RELEASED.convert


def deepspeed_rate(bytes_each: float | None = None) -> float:
    """Return the bytes/s that DeepSpeed's CPU step moves on a host, whatever its ranks.

    Args:
        bytes_each: Of a parameter in the measured step; None is `step_bytes`.
    """
    return BREAKDOWN.num_params * (bytes_each or step_bytes()) / BREAKDOWN.update


def runs_deepspeed_step(setup: AnySetup) -> bool:
    """Return whether DeepSpeed's CPU step is part of a set-up."""
    if isinstance(setup, HostPass):
        return setup.bytes_each is None
    return isinstance(setup, Setup) and setup.strategy.startswith("deepspeed")


def rate_of(setup: AnySetup) -> float:
    """Return the bytes/s that CPU code reaches on the host; infinite where DRAM bounds it."""
    return deepspeed_rate() if runs_deepspeed_step(setup) else math.inf


def hardware_of(setup: AnySetup) -> HardwareProfile:
    """Return a set-up's machine."""
    if isinstance(setup, Phases):
        return _phase_costs(setup).hardware
    if isinstance(setup, HostPass):
        return find_machine(setup.machine, setup.devices)
    profile = find_machine(
        setup.machine, setup.devices, num_hosts=setup.hosts, network=setup.network
    )
    return replace(profile, binds_cores=setup.binds_cores)


def predict(
    setup: AnySetup,
    quantity: Quantity,
    hardware: HardwareProfile | None = None,
    rate: float | None = None,
) -> float:
    """Return the seconds that a set-up takes.

    Args:
        setup: What ran.
        quantity: Which of its times.
        hardware: The machine; None is the set-up's own.
        rate: Bytes/s that CPU code reaches on the host; None is `rate_of`.
    """
    hardware = hardware_of(setup) if hardware is None else hardware
    machine = _StepMachine(hardware, rate_of(setup) if rate is None else rate)
    if isinstance(setup, HostPass):
        share = setup.num_params / setup.devices * (setup.bytes_each or step_bytes())
        return least_seconds(machine, machine.host_kind, share)
    if isinstance(setup, Phases):
        costs = replace(_phase_costs(setup), hardware=hardware)
        return _simulated(machine, costs, Strategy.of(setup.strategy), quantity)
    costs = costs_of(_workload(setup), hardware)
    return _simulated(machine, costs, Strategy.of(setup.strategy, **setup.options), quantity)


def predict_costs(
    costs: StepCosts, strategy: Strategy, quantity: Quantity, rate: float = math.inf
) -> float:
    """Return the seconds that a strategy takes on the costs' machine.

    Args:
        costs: Of one step.
        strategy: What runs.
        quantity: Which of its times.
        rate: Bytes/s that CPU code reaches on the host; infinite where DRAM bounds it.
    """
    return _simulated(_StepMachine(costs.hardware, rate), costs, strategy, quantity)


def _phase_costs(setup: Phases) -> StepCosts:
    return costs_of_phases(
        forward=setup.forward,
        backward=setup.backward,
        d2h=setup.d2h,
        update=setup.update,
        h2d=setup.h2d,
        num_params=setup.num_params,
    )


def _workload(setup: Setup) -> Workload:
    name, config = find_model(setup.model)
    return Workload.of_config(
        name,
        config,
        batch_size=setup.batch_size,
        sequence=setup.sequence,
        accumulation=setup.accumulation,
        checkpointing=setup.checkpointing,
        offloads_activations=setup.offloads_activations,
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
    """Return what the uncertainty of figures makes of a time, and that with what is left out.

    Figures are the machine's and the measured constant. Where phases are given nothing of them is
    left out.
    """
    noise = np.random.default_rng(1)
    sigma = math.sqrt(math.log1p(RATE_SIGMA**2))
    times: list[float] = []

    def drawn(hardware: HardwareProfile) -> float:
        factor = math.exp(sigma * float(noise.standard_normal()) - sigma**2 / 2)
        times.append(predict(setup, quantity, hardware, rate_of(setup) * factor))
        return times[-1]

    machine, term = hardware_of(setup), 0.0 if isinstance(setup, Phases) else TABLE
    figures = interval_of(machine, drawn, count=draws)
    again = iter(times)
    whole = interval_of(machine, lambda _: next(again), count=draws, left_out=term)
    return figures, whole


def elasticities(setup: AnySetup, quantity: Quantity, by: float = 0.05) -> dict[str, float]:
    """Return per cent of a time for one per cent of a figure, the largest first."""
    profile, rate, before = hardware_of(setup), rate_of(setup), predict(setup, quantity)
    figures = profile.quantities()
    found = {}
    for name in _FIGURES:
        if name in figures:  # less of it, since a share can't exceed 1
            less = profile.with_values({name: figures[name].value * (1 - by)})
            found[name] = predict(setup, quantity, less)
    if math.isfinite(rate):
        found[RATE] = predict(setup, quantity, profile, rate * (1 - by))
    shares = {name: math.log(after / before) / math.log(1 - by) for name, after in found.items()}
    return {k: v for k, v in sorted(shares.items(), key=lambda i: -abs(i[1])) if abs(v) >= 0.02}
