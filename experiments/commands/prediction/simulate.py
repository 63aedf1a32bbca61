"""``zenflow simulate``: one strategy on one machine, before anything is run."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.commands.command import Command, given, option
from experiments.commands.flag_types import NEW_FILE, PICTURE
from experiments.commands.prediction.request_flags import draws_flag, request_flags
from experiments.commands.training.train_flags import given_flags, knob_flags
from experiments.output.commit import commit
from experiments.output.patience import Patience
from experiments.request.hardware import hardware_of
from experiments.request.request import Request
from experiments.request.workload import as_traced, notes_on, notes_on_positions, workload_of
from experiments.traces.facts import TraceFacts
from sim.hardware.profile import HardwareProfile
from sim.memory.need import MemoryNeed, memory_of
from sim.memory_parts import gib
from sim.models.workload import Workload
from sim.planning.rules import rule_of
from sim.simulate import Prediction, Strategy, simulate
from sim.timing.costs import costs_of
from zenflow.trace.timeline import Timeline

if TYPE_CHECKING:
    from sim.fitting.uncertainty import Interval

_LANE_WIDTH = 12
_MOST_PARTS = 5


@click.command(
    cls=Command,
    name="simulate",
    examples=[
        "zenflow simulate --model llama-2-7b --machine dgx-a100-80",
        "zenflow simulate --model qwen2.5-0.5b --gpu rtx4090 --strategy fsdp2 --json",
    ],
)
@request_flags(requires=["model"])
@knob_flags
@option("--pageable", is_flag=True, section="Prediction", help="Copy buffers that are not pinned.")
@draws_flag(0)
@option("--seed", type=int, default=0, section="Prediction", help="Seed of the draws.")
@option(
    "--json", "as_json", is_flag=True, section="Output",
    help="Print JSON (seconds, bytes), no table.",
)  # fmt: skip
@option("--trace", type=NEW_FILE, section="Output", help="Write a Chrome trace (.gz too).")
@option("--plot", type=PICTURE, section="Output", help="Draw the timeline.")
@click.pass_context
def simulate_command(context: click.Context, /, **flags: Any) -> None:
    """Predict a step: time, stall, bytes, lanes, memory, and its timeline."""
    request = as_traced(Request.of(flags), given(context))
    hardware, _ = hardware_of(request)
    workload = workload_of(request, hardware)
    strategy = request.to_strategy(**given_flags(context)[1])
    notes = [*notes_on_positions(request), *notes_on(workload, hardware)]
    with Patience(f"Simulating {workload.name}") as patience:
        prediction = simulate(costs_of(workload, hardware), strategy, pinned=not flags["pageable"])
        memory = memory_of(workload, strategy, hardware)
        interval = _interval(workload, strategy, hardware, flags, patience)
    if flags["trace"] is not None:
        _described(prediction.timeline, workload, hardware).write(flags["trace"])
    if flags["plot"] is not None:
        _draw(prediction, hardware, flags["plot"])
    if flags["as_json"]:
        click.echo(json.dumps(_record(prediction, notes, hardware, memory, interval), indent=2))
    else:
        click.echo(_text(prediction, notes, hardware, memory, interval))


def _described(timeline: Timeline, workload: Workload, hardware: HardwareProfile) -> Timeline:
    """Return the timeline with what it is of, which a trace file has to say by itself."""
    facts = TraceFacts(
        strategy=timeline.metadata["strategy"],
        model=workload.name,
        num_params=workload.num_params,
        batch_size=workload.batch_size,
        sequence=workload.sequence,
        grad_accum=workload.accumulation,
        machine=_machine(hardware),
        commit=commit(),
    )
    return replace(timeline, metadata={**timeline.metadata, **facts.to_metadata()})


def _machine(hardware: HardwareProfile) -> str:
    count = hardware.total_devices
    hosts = f" in {hardware.num_hosts} hosts" if hardware.num_hosts > 1 else ""
    return f"{count} x {hardware.name}{hosts}" if count > 1 else hardware.name


def _interval(
    workload: Workload,
    strategy: Strategy,
    hardware: HardwareProfile,
    flags: dict[str, Any],
    patience: Patience,
) -> Interval | None:
    if not flags["draws"]:
        return None
    from sim.fitting.left_out import left_out_in
    from sim.fitting.uncertainty import interval_of, threads_are_open  # load numpy, unlike help
    from sim.steady import steady

    drawn_so_far = itertools.count(1)

    def step_seconds(drawn: HardwareProfile) -> float:
        patience.update(f"draw {next(drawn_so_far)} of {flags['draws']}")
        costs = costs_of(workload, drawn)
        return steady(costs, strategy, pinned=not flags["pageable"]).step_seconds

    return interval_of(
        hardware, step_seconds, count=flags["draws"], seed=flags["seed"],
        left_out=left_out_in(strategy, costs_of(workload, hardware)),
        draws_threads=threads_are_open(hardware, strategy),
    )  # fmt: skip


def _draw(prediction: Prediction, hardware: HardwareProfile, path: Path) -> None:
    from experiments.output.plots import draw_timeline, save_figure  # slow to load
    from experiments.output.run_types import TimedSummary

    summary: TimedSummary = {
        "strategy": f"{prediction.strategy}, simulated on {hardware.name}",
        "mean_step_seconds": prediction.step_seconds,
        "stall_fraction": prediction.stall_fraction,
        "config": {"update_interval": prediction.timeline.metadata["period"]},
        "emulated_link": None,
    }
    save_figure(draw_timeline(prediction.timeline, summary), path)


def _record(
    prediction: Prediction,
    notes: list[str],
    hardware: HardwareProfile,
    memory: MemoryNeed,
    interval: Interval | None,
) -> dict[str, Any]:
    workload = memory.workload
    return {
        "model": workload.name,
        "num_params": workload.num_params,
        "active_params": workload.active_params,
        "hardware": hardware.name,
        "num_devices": hardware.total_devices,
        "num_hosts": hardware.num_hosts,
        **prediction.to_dict(),
        "rule": rule_of(memory.strategy),
        "tokens_per_second": _tokens_per_second(prediction, workload, hardware),
        "step_seconds_interval": None
        if interval is None
        else {"low": interval.low, "high": interval.high, "coverage": interval.coverage},
        "notes": notes,
        "drivers": [] if interval is None else [list(item) for item in interval.drivers],
        "memory": memory.to_dict(),
        "chance_to_fit": memory.chance(hardware),
        "shortfalls": [str(item) for item in memory.fits(hardware)],
    }


def _tokens_per_second(
    prediction: Prediction, workload: Workload, hardware: HardwareProfile
) -> float:
    return workload.tokens_per_step * hardware.total_devices / prediction.step_seconds


def _text(
    prediction: Prediction,
    notes: list[str],
    hardware: HardwareProfile,
    memory: MemoryNeed,
    interval: Interval | None,
) -> str:
    step, workload = prediction.step_seconds, memory.workload
    lines = [
        f"{workload.name} ({workload.sizes}), {prediction.strategy}, "
        f"on {_machine(hardware)}; simulated",
        f"rule     {rule_of(memory.strategy)}",
        *notes,
        f"step     {step * 1e3:.1f} ms, {_tokens_per_second(prediction, workload, hardware):,.0f} "
        f"tokens/s; slowest of a window {prediction.slowest_step_seconds * 1e3:.1f} ms",
        f"stall    {prediction.stall_seconds * 1e3:.1f} ms ({prediction.stall_fraction:.1%})"
        + _selections(prediction),
        f"bytes    {prediction.d2h_bytes / 1e9:.3f} GB down, "
        f"{prediction.h2d_bytes / 1e9:.3f} GB up",
    ]
    if interval is not None:
        names = ", ".join(name for name, _ in interval.drivers[:3])
        moved = f"; most moved by {names}" if names else ""
        lines.append(
            f"interval {interval.low * 1e3:.1f} to {interval.high * 1e3:.1f} ms holds "
            f"{interval.coverage:.0%} of draws{moved}"
        )
    lines += [
        f"{lane:<{_LANE_WIDTH}} busy {seconds * 1e3:9.1f} ms  {seconds / step:5.0%}"
        for lane, seconds in prediction.busy_seconds.items()
    ]
    lines += _memory_lines(memory)
    if (chance := memory.chance(hardware)) is not None:
        lines.append(f"memory   fits the device with a chance of {chance:.0%}")
    lines += [f"does not fit: {item}" for item in memory.fits(hardware)]
    return "\n".join(lines)


def _selections(prediction: Prediction) -> str:
    """Return how much of the stall no step of the trace shows; empty where that is nothing."""
    seconds = prediction.selection_seconds
    if not seconds:
        return ""
    return (
        f", {seconds * 1e3:.1f} ms of it selections of columns, spread over all steps (the "
        "timeline shows the steps between two)"
    )


def _memory_lines(memory: MemoryNeed) -> list[str]:
    """Return totals of device and host with their largest parts, and of NVMe where it is used."""
    places = {
        "device": ("device",),
        "host": ("pageable", "pinned"),
        "nvme": ("nvme",),
    }
    lines = []
    for name, where in places.items():
        parts = sorted(
            (part for part in memory.parts if part.place in where), key=lambda p: -p.num_bytes
        )
        if parts:
            shown = ", ".join(f"{part.name} {gib(part.num_bytes)}" for part in parts[:_MOST_PARTS])
            lines.append(f"memory   {name} {gib(memory.bytes_at(*where))}: {shown}")
    return lines
