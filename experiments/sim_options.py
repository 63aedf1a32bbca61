"""Flags that name a machine and a workload, shared by the simulator's commands. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from sim.catalog import assemble, find_machine
from sim.hardware import HardwareProfile
from sim.models import find_model
from sim.profile_file import read_profile
from sim.workload import DTYPE_BYTES, Workload
from zenflow.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])

_MACHINE_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--hardware",
        {"help": "A machine of the table (dgx-a100-80, rtx4090-desktop, ...) or a profile.json."},
    ),
    ("--gpu", {"help": "A device of the table, with --host and --link in place of --hardware."}),
    ("--host", {"help": "A host of the table."}),
    ("--link", {"help": "A link of the table (pcie4-x16, ...)."}),
    ("--num-gpus", {"type": int, "help": "Devices that train together."}),
)
_WORKLOAD_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--batch-size", {"type": int, "help": "Sequences of a micro-batch on one device."}),
    ("--sequence", {"type": int, "help": "Tokens of a sequence."}),
    ("--grad-accum", {"type": int, "help": "Micro-batches of a step."}),
    ("--dtype", {"type": click.Choice(list(DTYPE_BYTES)), "help": "Of weights and gradients."}),
    (
        "--checkpointing/--no-checkpointing",
        {"help": "Whether backward recomputes a layer's activations."},
    ),
)
_WORKLOAD_FIELDS = {"grad_accum": "accumulation"}


def simulation_flags(command: Command) -> Command:
    """Give a command the flags of a model, a machine and a workload."""
    for flag, options in reversed(_MACHINE_FLAGS + _WORKLOAD_FLAGS):
        command = click.option(flag, default=None, **options)(command)
    return click.option(
        "--model", required=True, help="A named model, a config.json, or a directory with one."
    )(command)


def hardware_of(flags: dict[str, Any]) -> HardwareProfile:
    """Return the machine that the flags name.

    Raises:
        ConfigError: They name none, or something that is not in the table.
    """
    name, count = flags.get("hardware"), flags.get("num_gpus")
    if name is None:
        missing = [f"--{key}" for key in ("gpu", "host", "link") if not flags.get(key)]
        if missing:
            raise ConfigError(
                f"name a machine with --hardware, or its parts: {', '.join(missing)} is missing"
            )
        return assemble(flags["gpu"], flags["host"], flags["link"], num_devices=count or 1)
    if any(flags.get(key) for key in ("gpu", "host", "link")):
        raise ConfigError("--hardware names the whole machine: leave out --gpu, --host and --link")
    if Path(name).suffix == ".json" or Path(name).exists():
        profile = read_profile(Path(name))
        return profile if count is None else replace(profile, num_devices=count)
    return find_machine(name, num_devices=count)


def workload_of_flags(flags: dict[str, Any]) -> Workload:
    """Return the model and batch that the flags describe.

    Raises:
        ConfigError: The model is not known, or a number breaks its rule.
    """
    name, config = find_model(flags["model"])
    names = ("batch_size", "sequence", "grad_accum", "dtype", "checkpointing")
    settings = {
        _WORKLOAD_FIELDS.get(key, key): flags[key] for key in names if flags.get(key) is not None
    }
    return Workload.of_config(name, config, **settings)
