"""``zenflow plan``: what fits a machine, and how fast. Loads no torch and runs nothing."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import click

from experiments.sim_options import hardware_of, simulation_flags, workload_of
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from sim.memory import MemoryNeed
    from sim.options import Option
    from sim.plan import Plan

_FILE_WIDTH = 120


@click.command(name="plan")
@simulation_flags
@click.option(
    "--checkpointing/--no-checkpointing", default=None,
    help="Whether backward recomputes activations; with neither, where it takes that to fit.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON (seconds, bytes), no table.")
@click.pass_context
def plan_command(context: click.Context, /, **flags: Any) -> None:
    """Say which strategies fit a machine, how fast each would be, and which to use.

    From a model's configuration and a table of hardware, in a second, with no GPU and no torch.
    Times are predictions for each strategy's steady state, as `zenflow simulate` makes them.
    """
    from sim.plan import plan

    try:
        hardware, notes = hardware_of(flags)
        workload = workload_of(flags, hardware)
        found = plan(workload, hardware, may_shrink=flags["checkpointing"] is not False)
    except ConfigError as error:
        raise click.UsageError(str(error), context) from error
    if flags["as_json"]:
        record = {**found.to_dict(), "notes": notes}
        click.echo(json.dumps(_finite(record), indent=2, allow_nan=False))
    else:
        _print(found, notes, flags["model"])


# ---- the answer -------------------------------------------------------------------------------


def _print(plan: Plan, notes: list[str], model: str) -> None:
    from rich.console import Console

    from sim.memory_parts import gib

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # a file or a pipe has no width to fit
        console.width = _FILE_WIDTH
    hardware, work = plan.hardware, plan.workload

    def say(text: str = "") -> None:
        console.print(text, soft_wrap=not console.is_terminal)

    devices = f"{hardware.num_devices} x {hardware.device.name}"
    say(
        f"{work.name}, {work.num_params / 1e9:.3g} billion parameters in {work.dtype}; each "
        f"device takes {work.batch_size} x {work.sequence} tokens, {work.accumulation} to a step"
    )
    say(
        f"{hardware.name}: {devices} with {gib(hardware.device.memory.value)}, "
        f"{hardware.host.name} with {gib(hardware.host.dram_bytes.value)}, {hardware.link.name}, "
        f"{hardware.nvme.name if hardware.nvme else 'no'} drives"
    )
    for note in notes:
        say(f"({note})")
    say()
    console.print(plan_table(plan))
    chosen = plan.recommended
    say("Predicted, not measured. Memory: of one device, of the host for all of them.")
    say()
    say(f"Use: {chosen.label if chosen else 'nothing here'}. {plan.reason}")
    if chosen is not None:
        say(f"     zenflow train --model {model} {' '.join(_train_flags(chosen))}")
        if hardware.num_devices > 1:
            say("     (several devices: in your own loop, under DistributedDataParallel)")
        say(f"     Largest parts: {_largest(chosen.need)}.")
    _print_shortfalls(plan, say)
    _print_improvements(plan, say)


def plan_table(plan: Plan) -> Table:
    """Return every strategy with its predicted step and its memory; a notebook shows it too."""
    from rich.table import Table

    from sim.memory_parts import gib

    table = Table()
    table.add_column("strategy")
    for name in ("step", "tokens/s", "stalled", "device", "host", "fits", "AdamW"):
        table.add_column(name, justify="right", no_wrap=True)
    for option, after in zip(plan.options, [*plan.options[1:], None], strict=True):
        done = option.prediction
        table.add_row(
            option.label,
            f"{option.step_seconds:.3g} s" if done else "-",
            f"{option.tokens_per_second:,.0f}" if done else "-",
            f"{done.stall_fraction:.1%}" if done else "-",
            gib(option.need.device_bytes),
            gib(option.need.host_bytes),
            "yes" if option.fits else "no",
            "exactly" if option.rule.startswith("AdamW exactly") else "no",
            end_section=after is not None and option.is_ours != after.is_ours,
            style="bold" if option is plan.recommended else None,
        )
    return table


def _train_flags(option: Option) -> list[str]:
    """Return the flags with which `zenflow train` runs an option."""
    work, config = option.need.workload, option.strategy.config
    assert config is not None
    flags = [f"--strategy {option.strategy.name}", f"--dtype {work.dtype}"]
    flags += [f"--batch-size {work.batch_size}", f"--sequence {work.sequence}"]
    flags += [f"--grad-accum {work.accumulation}"] if work.accumulation > 1 else []
    flags += [
        f"--{change.replace('_', '-').replace('=', ' ')}"
        for change in option.changes
        if "=" in change
    ]
    if work.checkpointing:
        flags.append("--checkpointing")
    return flags


def _largest(need: MemoryNeed) -> str:
    from sim.memory_parts import gib

    parts = sorted(need.parts, key=lambda part: -part.num_bytes)[:6]
    listed = ", ".join(f"{part.name} {gib(part.num_bytes)} ({part.place})" for part in parts)
    return f"{listed}; the device is fullest at the {need.moment}"


def _print_shortfalls(plan: Plan, say: Any) -> None:
    short = [option for option in plan.options if option.shortfalls]
    if not short:
        return
    say()
    say("Does not fit, and what would change that:")
    for option in short:
        say(f"- {option.label}: {'; '.join(map(str, option.shortfalls))}")


def _print_improvements(plan: Plan, say: Any) -> None:
    useful = [item for item in plan.improvements if item.helps]
    say()
    if not useful:
        say("No other part that was tried in the machine saves anything.")
        return
    say("What would help:" if plan.recommended else "With more memory:")
    for item in useful:
        if item.saved_seconds is None or item.saved_share is None:
            say(f"- {item.change}: {item.strategy} would fit, {item.step_seconds:.3g} s a step")
            continue
        say(
            f"- {item.change}: saves {item.saved_seconds:.3g} s of a step, {item.saved_share:.1%} "
            f"({item.strategy})"
        )


def _finite(value: Any) -> Any:
    """Return a record with null for what is not finite, which JSON has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
