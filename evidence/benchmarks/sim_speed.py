"""The simulator's own speed: simulated steps, machines and a sweep's points a second, on one core.

    python -m evidence.benchmarks.sim_speed [--out DIR] [--smoke]

The floor of the event simulation is SimPy's own queue: what as many empty events take. Machines
share one recording, which C code settles. Points are counted from end to end: a whole sweep with
its journal and its table, which begins with empty caches. SimPy answers points of the same sweep
in turn with them. Seconds are CPU time of this process, so that others count little.
"""

from __future__ import annotations

import argparse
import functools
import gc
import io
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from rich.console import Console

from evidence.benchmarks.record import setting, spread
from experiments.output.files import write_json, write_text
from experiments.request.request import Request
from experiments.sweeps.axes.parsing import parse_axes
from experiments.sweeps.execution.run import run_sweep
from experiments.sweeps.grid import Sweep
from sim.hardware.catalog import find_machine
from sim.machine import Machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.replay.arrays import rates_of
from sim.replay.tape import times_of
from sim.simulate import Strategy, simulate
from sim.steady import steady_many
from sim.timing.costs import StepCosts, costs_of

MODEL, MACHINE = "llama-3.1-8b", "hgx-h200"  # 32 layers, embedding and head
EVENT_STRATEGIES = ("zero_offload", "delayed", "zenflow_paper", "zenflow", "superoffload")
RECORDED = ("zero_offload", "delayed", "zenflow_paper", "zenflow")
QUEUED = 4  # events under way at a time: a stream or two, the link, the host
LARGE = "points of k, S, DRAM and link"
AIMS = {"events": 500.0, LARGE: 10_000.0}
FULL, SMOKE = (5, 100, 2_000, 22_620), (1, 4, 10, 80)  # repeats, steps, machines, points
SWEPT = Request(
    model="llama-2-7b", gpu="a100-80-pcie", host="epyc-9654", link="pcie4-x16", batch_size=8,
    checkpointing=True,
)  # fmt: skip
_GPUS = "gpu=rtx4090,rtx5090,l40s,a100-80-pcie,h100-pcie"
_LINKS = "link=pcie3-x16,pcie4-x16,pcie5-x16"
_HOSTS = "host=desktop-ddr5,epyc-7742,epyc-9654"
OTHERS: dict[str, tuple[str, ...]] = {
    "machines": (_GPUS, "batch=1,2,4,8", "S=2,4,8", _LINKS, _HOSTS),
    "models": ("model=qwen2.5-0.5b,qwen2.5-1.5b,llama-3.2-1b", _GPUS, _LINKS, "batch=1,4"),
    "settings": ("topk_ratio=0.02,0.05,0.1,0.2", "S=1,2,4,6,8", "queue_depth=1,2,4,8", _LINKS),
}
"""Axes of sweeps of which no two points share their costs, or their schedule."""
USUAL = {"model": "qwen2.5-0.5b", "gpu": "rtx4090", "host": "epyc-7742", "link": "pcie4-x16"}
BY_SIMPY = 3  # points
WIDTH = 12


def make_costs() -> StepCosts:
    workload = Workload.of_config(*find_model(MODEL), batch_size=8, sequence=2048)
    return costs_of(workload, find_machine(MACHINE, 1))


def strategy_of(name: str) -> Strategy:
    knobs: dict[str, Any] = {"select_interval": 0} if name.startswith("zenflow") else {}
    return Strategy.of(name, **knobs)


def time_events(costs: StepCosts, name: str, steps: int) -> tuple[float, int]:
    """Return seconds and SimPy events of so many steps."""
    machine = Machine(costs.hardware, keeps_spans=False)
    schedule = strategy_of(name).schedule(machine, costs)
    started = time.process_time()
    machine.run(schedule.run(steps))
    seconds = time.process_time() - started
    return seconds, next(machine.env._eid)


def time_queue(events: int) -> float:
    """Return the seconds in which SimPy passes so many events that do nothing."""
    env = simpy.Environment()

    def wait(count: int) -> Generator[simpy.Event, Any, None]:
        for _ in range(count):
            yield env.timeout(1.0)

    for _ in range(QUEUED):
        env.process(wait(events // QUEUED))
    started = time.process_time()
    env.run()
    return time.process_time() - started


def time_machines(costs: StepCosts, name: str, count: int) -> float:
    """Return the seconds in which a recording is made and settled on so many machines."""
    forget()
    generator = np.random.default_rng(0)
    rates = np.tile(rates_of(costs), (count, 1))
    rates[:, :4] *= generator.uniform(0.2, 1.2, (count, 4))  # links and memory
    started = time.process_time()
    steady_many(costs, strategy_of(name), rates, np.array([times_of(costs)]))
    return time.process_time() - started


def large_sweep(count: int) -> Sweep:
    """Return a sweep of settings and rates, with selections that recur."""
    axes = ["topk_ratio=0.02,0.05,0.1,0.2,0.3", "S=1,2,4,8"]
    if count > 1000:
        axes += ["dram=20:400:10", "link_rate=4:60:2"]
    return Sweep(axes=parse_axes(axes), request=SWEPT)


def rates_sweep(count: int) -> Sweep:
    """Return a sweep of so many machines that differ in rates, with selections that recur."""
    step = 440 / max(1, count // 40)
    axes = parse_axes(["link_rate=20:39.5:0.5", f"dram=600:{600 + 440 - step}:{step}"])
    return Sweep(axes=axes, request=SWEPT)


def others_sweep(name: str, count: int) -> Sweep:
    """Return a sweep of machines, models or settings; of few points for a smoke test."""
    axes = parse_axes(OTHERS[name] if count > 1000 else OTHERS[name][:1])
    varied = {axis.name for axis in axes}
    fixed: dict[str, Any] = {key: value for key, value in USUAL.items() if key not in varied}
    return Sweep(axes=axes, request=Request(**fixed))


def forget() -> None:
    """Empty the caches of the simulator and of sweeps, as of a process that has just begun."""
    cached = type(functools.cache(forget))
    for found in gc.get_objects():
        if type(found) is cached and found.__module__.startswith(("sim.", "experiments.")):
            found.cache_clear()


def time_sweep(sweep: Sweep) -> float:
    """Return points a second of a whole sweep in this process."""
    forget()
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        run_sweep(sweep, Path(folder), 1, Console(file=io.StringIO()))
        return sweep.num_points / (time.process_time() - started)


def time_simpy(sweep: Sweep) -> float:
    """Return points a second that SimPy answers one by one."""
    started = time.process_time()
    for index in np.linspace(0, sweep.num_points - 1, BY_SIMPY).astype(int).tolist():
        case = sweep.case(index)
        simulate(costs_of(case.workload, case.hardware), case.strategy, keeps_spans=False)
    return BY_SIMPY / (time.process_time() - started)


def time_points(count: int) -> dict[str, float]:
    """Return points a second of each kind of sweep, and of SimPy on the same."""
    found = {}
    sweeps = {LARGE: large_sweep(count), "points of rates": rates_sweep(max(40, count // 10))}
    sweeps |= {f"points of {name}": others_sweep(name, count) for name in OTHERS}
    for name, sweep in sweeps.items():
        found[name] = time_sweep(sweep)
        found[f"{name}, SimPy"] = time_simpy(sweep)
    return found


def measure(repeats: int, steps: int, count: int, points: int) -> dict[str, Any]:
    """Return rates with their spread; strategies take turns."""
    costs = make_costs()
    rows: dict[str, list[float]] = defaultdict(list)
    floors: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for name in EVENT_STRATEGIES:
            seconds, events = time_events(costs, name, steps)
            rows[f"events {name}"].append(steps / seconds)
            floors[f"events {name}"].append(seconds / time_queue(events))
        for name in RECORDED:
            rows[f"machines {name}"].append(count / time_machines(costs, name, count))
        for name, rate in time_points(points).items():
            rows[name].append(rate)
    return {
        "rates": {key: spread(values) for key, values in rows.items()},
        "times_floor": {key: spread(values) for key, values in floors.items()},
    }


def table(record: dict[str, Any]) -> str:
    """Return the rates, one a line, beside their aims."""
    lines = [
        f"{'':<38}{'per second':>{WIDTH}}{'quartiles':>22}{'aim':>{WIDTH}}{'x floor':>{WIDTH}}"
    ]
    for key, values in record["rates"].items():
        aim = AIMS.get(key, AIMS["events"] if key.startswith("events") else None)
        low, _, high = values["quartiles"]
        floor = record["times_floor"].get(key)
        times = "-" if floor is None else f"{floor['median']:.1f}"
        lines.append(
            f"{key:<38}{values['median']:>{WIDTH},.0f}"
            f"{f'{low:,.0f} .. {high:,.0f}':>22}"
            f"{'-' if aim is None else f'{aim:,.0f}':>{WIDTH}}{times:>{WIDTH}}"
        )
    lines.append(
        f"events: steps of {MODEL} a second. Floor: as many events that do nothing, through "
        "SimPy's queue. Machines: of one recording. Points: of a sweep from end to end, all with "
        "selections that recur"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/sim_speed"))
    parser.add_argument("--smoke", action="store_true", help="tiny: tests the script")
    options = parser.parse_args(arguments)
    sizes = SMOKE if options.smoke else FULL
    record = setting(**measure(*sizes))
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "sim_speed.json", record)
    shown = table(record)
    write_text(options.out / "sim_speed.txt", shown + "\n")
    print(shown)


if __name__ == "__main__":
    main()
