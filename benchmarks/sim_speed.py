"""The simulator's own speed: simulated steps a second, configurations a second, on one core.

    python -m benchmarks.sim_speed [--out DIR] [--smoke]

The floor of the event simulation is SimPy's own queue: what as many empty events take.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simpy

from benchmarks.record import setting, spread
from experiments.output.files import write_json, write_text
from sim.closed_forms.steady import ClosedForm
from sim.hardware.catalog import find_machine
from sim.machine import Machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy
from sim.timing.costs import StepCosts, costs_of

MODEL, MACHINE = "llama-3.1-8b", "hgx-h200"  # 32 layers, embedding and head
EVENT_STRATEGIES = ("zero_offload", "delayed", "zenflow_paper", "zenflow", "superoffload")
FORM_STRATEGIES = ("zero_offload", "delayed", "zenflow_paper", "zenflow")
QUEUED = 4  # events under way at a time: a stream or two, the link, the host
AIMS = {"events": 500.0, "closed form": 100_000.0}
FULL, SMOKE = (9, 100, 50_000), (1, 4, 100)  # repeats, steps, machines
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
    started = time.perf_counter()
    machine.run(schedule.run(steps))
    seconds = time.perf_counter() - started
    return seconds, next(machine.env._eid)


def time_queue(events: int) -> float:
    """Return the seconds in which SimPy passes so many events that do nothing."""
    env = simpy.Environment()

    def wait(count: int) -> Generator[simpy.Event, Any, None]:
        for _ in range(count):
            yield env.timeout(1.0)

    for _ in range(QUEUED):
        env.process(wait(events // QUEUED))
    started = time.perf_counter()
    env.run()
    return time.perf_counter() - started


def time_form(costs: StepCosts, name: str, count: int) -> float:
    form = ClosedForm(costs, strategy_of(name))
    generator = np.random.default_rng(0)
    axes: dict[str, Any] = {key: generator.uniform(1e10, 6e10, count) for key in ("d2h", "h2d")}
    started = time.perf_counter()
    form.solve(**axes, host=generator.uniform(5e10, 3e11, count), duplex=1e15, dram=1e12)
    return time.perf_counter() - started


def measure(repeats: int, steps: int, count: int) -> dict[str, Any]:
    """Return rates with their spread; strategies take turns."""
    costs = make_costs()
    rows: dict[str, list[float]] = defaultdict(list)
    floors: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for name in EVENT_STRATEGIES:
            seconds, events = time_events(costs, name, steps)
            rows[f"events {name}"].append(steps / seconds)
            floors[f"events {name}"].append(seconds / time_queue(events))
        for name in FORM_STRATEGIES:
            rows[f"closed form {name}"].append(count / time_form(costs, name, count))
    return {
        "rates": {key: spread(values) for key, values in rows.items()},
        "times_floor": {key: spread(values) for key, values in floors.items()},
    }


def table(record: dict[str, Any]) -> str:
    """Return the rates, one a line, beside their aims."""
    lines = [
        f"{'':<28}{'per second':>{WIDTH}}{'quartiles':>22}{'aim':>{WIDTH}}{'x floor':>{WIDTH}}"
    ]
    for key, values in record["rates"].items():
        kind = "events" if key.startswith("events") else "closed form"
        low, _, high = values["quartiles"]
        floor = record["times_floor"].get(key)
        times = "-" if floor is None else f"{floor['median']:.1f}"
        lines.append(
            f"{key:<28}{values['median']:>{WIDTH},.0f}"
            f"{f'{low:,.0f} .. {high:,.0f}':>22}"
            f"{AIMS[kind]:>{WIDTH},.0f}{times:>{WIDTH}}"
        )
    lines.append(
        f"events: steps of {MODEL} a second; closed form: machines a second. Floor: as many "
        "events that do nothing, through SimPy's queue"
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
