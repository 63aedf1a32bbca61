"""``zenflow plan``: what fits a machine, and how fast. Loads no torch and runs nothing."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.recipes import DTYPES, MODEL_SIZES
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from sim.hardware import HardwareProfile
    from sim.memory import MemoryNeed
    from sim.options import Option
    from sim.plan import Plan
    from sim.workload import Workload

_FILE_WIDTH = 120
_BYTE_TOKENS = 258
"""Vocabulary of the sizes that `zenflow train` knows by name, as in experiments.tokens."""
_NAMED_BASES = ("gpu", "machine", "profile")


class Memory(click.ParamType):
    """A positive number of GiB."""

    name = "GIB"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return bytes."""
        try:
            size = float(value)
        except (TypeError, ValueError):
            size = math.nan
        if not (math.isfinite(size) and size > 0):
            self.fail(
                f"must be a positive number of GiB, got {value!r}: write 64, say", param, ctx
            )
        return size * (1 << 30)


@click.command(name="plan")
@click.option(
    "--model", required=True,
    help="A named model (llama-2-7b, Qwen/Qwen2.5-0.5B), a size of `zenflow train`, a config.json "
    "or a directory with one.",
)  # fmt: skip
@click.option(
    "--gpu", help="Device by name, such as rtx4090: the rest is as in its usual machine."
)
@click.option("--machine", "--hardware", help="A whole machine by name, such as dgx-a100-80.")
@click.option(
    "--profile", type=click.Path(path_type=Path), help="A machine as `zenflow calibrate` wrote it."
)
@click.option("--num-gpus", type=click.IntRange(min=1), help="Devices that train together.")
@click.option("--host", help="Host by name, such as 2x-epyc-7742.")
@click.option("--host-ram", type=Memory(), help="Host memory in GiB.")
@click.option("--link", help="Link to the host by name, such as pcie4-x16.")
@click.option("--fabric", help="Fabric between devices by name, such as nvlink4.")
@click.option("--nvme", help="NVMe drives by name, such as 4x-gen4, or none.")
@click.option("--batch-size", type=int, default=4, show_default=True,
              help="Sequences of a micro-batch on each device.")  # fmt: skip
@click.option("--sequence", type=int, default=1024, show_default=True,
              help="Tokens of a sequence.")  # fmt: skip
@click.option("--grad-accum", type=int, default=1, show_default=True,
              help="Micro-batches of a step.")  # fmt: skip
@click.option(
    "--checkpointing/--no-checkpointing", default=None,
    help="Whether backward recomputes activations; with neither, where it takes that to fit.",
)  # fmt: skip
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Of parameters; default: bfloat16 if the device can.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (seconds, bytes), no table.")
@click.pass_context
def plan_command(context: click.Context, /, **flags: Any) -> None:
    """Say which strategies fit a machine, how fast each would be, and which to use.

    From a model's configuration and a table of hardware, in a second, with no GPU and no torch.
    Times are predictions for each strategy's steady state, as `zenflow simulate` makes them.
    """
    from sim.plan import plan

    try:
        hardware, notes = _hardware(flags)
        workload = _workload(flags, hardware)
        found = plan(workload, hardware, may_shrink=flags["checkpointing"] is not False)
    except ConfigError as error:
        raise click.UsageError(str(error), context) from error
    if flags["as_json"]:
        record = {**found.to_dict(), "notes": notes}
        click.echo(json.dumps(_finite(record), indent=2, allow_nan=False))
    else:
        _print(found, notes, flags["model"])


# ---- what was asked for -----------------------------------------------------------------------


def _hardware(flags: dict[str, Any]) -> tuple[HardwareProfile, list[str]]:
    """Return the machine, and notes on what was assumed of it.

    Raises:
        ConfigError: Not exactly one of --gpu, --machine and --profile was given, or a name is
            unknown.
    """
    from sim.catalog import find_fabric, find_host, find_link, find_machine, find_nvme
    from sim.hardware import Figure
    from sim.profile_file import read_profile

    given = [f"--{name}" for name in _NAMED_BASES if flags[name] is not None]
    if len(given) != 1:
        raise ConfigError(
            f"one of --gpu, --machine and --profile says what the machine is, got "
            f"{' and '.join(given) or 'none'}: give --gpu rtx4090, say"
        )
    notes: list[str] = []
    count = flags["num_gpus"]
    if flags["gpu"] is not None:
        hardware, notes = _usual_machine(flags)
    elif flags["machine"] is not None:
        hardware = find_machine(flags["machine"], count)
    else:
        hardware = read_profile(flags["profile"])
    changes: dict[str, Any] = {}
    if flags["host"] is not None:
        changes["host"] = find_host(flags["host"])
    if flags["host_ram"] is not None:
        ram = Figure(value=flags["host_ram"], kind="spec", source="--host-ram")
        changes["host"] = replace(changes.get("host", hardware.host), dram_bytes=ram)
    if flags["link"] is not None:
        changes["link"] = find_link(flags["link"])
    if flags["fabric"] is not None:
        changes["fabric"] = find_fabric(flags["fabric"])
    if flags["nvme"] is not None:
        changes["nvme"] = None if flags["nvme"] == "none" else find_nvme(flags["nvme"])
    if count is not None:
        changes["num_devices"] = count
    return replace(hardware, **changes) if changes else hardware, notes


def _usual_machine(flags: dict[str, Any]) -> tuple[HardwareProfile, list[str]]:
    """Return a machine of the table with this device and enough of them, and what it lends.

    Raises:
        ConfigError: The device is unknown, or no machine holds it and parts are missing.
    """
    from sim.catalog import assemble, find_device, find_machine, machine_names

    device, count = find_device(flags["gpu"]), flags["num_gpus"] or 1
    parts = [name for name in ("host", "link") if flags[name] is None]
    if not parts and (count == 1 or flags["fabric"] is not None):
        made = assemble(
            device, flags["host"], flags["link"], count, fabric=flags["fabric"],
            nvme=None if flags["nvme"] in (None, "none") else flags["nvme"],
        )  # fmt: skip
        return made, []
    usual = [find_machine(name) for name in machine_names()]
    usual = [machine for machine in usual if machine.device.name == device.name]
    enough = [machine for machine in usual if machine.num_devices >= count]
    if not enough:
        raise ConfigError(
            f"no machine of the table holds {count} {device.name}: give --host, --link"
            f"{' and --fabric' if count > 1 else ''}"
        )
    chosen = min(enough, key=lambda machine: machine.num_devices)
    lent = [*parts, *(["fabric"] if count > 1 and flags["fabric"] is None else [])]
    lent += ["drives"] if flags["nvme"] is None and chosen.nvme is not None else []
    note = f"assumed as in {chosen.name}: {', '.join(lent)}"
    return replace(chosen, num_devices=count), [note]


def _workload(flags: dict[str, Any], hardware: HardwareProfile) -> Workload:
    """Return the workload.

    Raises:
        ConfigError: The model is unknown or lacks a field, or a number breaks its rule.
    """
    from sim.workload import Workload

    name, config = _model(flags["model"])
    peaks = hardware.device.flops
    usable = next(
        (name for name in ("bfloat16", "float16", "float32") if name in peaks), DTYPES[0]
    )
    return Workload.of_config(
        name,
        config,
        batch_size=flags["batch_size"],
        sequence=flags["sequence"],
        accumulation=flags["grad_accum"],
        dtype=flags["dtype"] or usable,
        checkpointing=bool(flags["checkpointing"]),
    )


def _model(name: str) -> tuple[str, dict[str, Any]]:
    from sim.models import find_model

    size = MODEL_SIZES.get(name)
    if size is None:
        return find_model(name)
    values = asdict(size)
    return name, {
        "model_type": "llama",
        "vocab_size": _BYTE_TOKENS,
        "hidden_size": values["hidden"],
        "num_hidden_layers": values["layers"],
        "num_attention_heads": values["heads"],
        "intermediate_size": values["ffn"],
        "tie_word_embeddings": values["tied"],
    }


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
    console.print(_table(plan))
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


def _table(plan: Plan) -> Table:
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
        flags.append("(and model.gradient_checkpointing_enable() in your own loop)")
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
