"""Flags that name a machine and a workload, shared by the simulator's commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from experiments.commands.flag_types import Memory
from experiments.commands.train_flags import knob_flags
from experiments.training.settings import DTYPES

Command = TypeVar("Command", bound=Callable[..., Any])


_FLAGS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--model",),
        {
            "required": True,
            "help": "A named model (llama-2-7b, Qwen/Qwen2.5-0.5B), a size of `zenflow train`, a "
            "config.json or a directory with one.",
        },
    ),
    (
        ("--gpu",),
        {"help": "Device by name (rtx4090): the rest is as in its usual machine."},
    ),
    (
        ("--machine", "--hardware"),
        {"help": "A whole machine by name, such as dgx-a100-80, or a profile's JSON file."},
    ),
    (
        ("--profile",),
        {"type": click.Path(path_type=Path), "help": "What `zenflow calibrate` wrote."},
    ),
    (("--num-gpus",), {"type": click.IntRange(min=1), "help": "Devices that train together."}),
    (("--host",), {"help": "Host by name, such as 2x-epyc-7742."}),
    (("--host-ram",), {"type": Memory(), "help": "Host memory in GiB."}),
    (("--link",), {"help": "Link to the host by name, such as pcie4-x16."}),
    (("--fabric",), {"help": "Fabric between devices by name, such as nvlink4."}),
    (("--nvme",), {"help": "NVMe drives by name, such as 4x-gen4, or none."}),
    (
        ("--batch-size",),
        {"type": int, "default": 4, "help": "Sequences of a micro-batch on each device."},
    ),
    (("--sequence",), {"type": int, "default": 1024, "help": "Tokens of a sequence."}),
    (("--grad-accum",), {"type": int, "default": 1, "help": "Micro-batches of a step."}),
    (
        ("--dtype",),
        {
            "type": click.Choice(DTYPES),
            "help": "Of parameters; default: bfloat16 if the device can.",
        },
    ),
)


def simulation_flags(command: Command) -> Command:
    """Give a command the flags of a model, a machine and a workload."""
    for names, options in reversed(_FLAGS):
        shown = {"show_default": True} if "default" in options else {"default": None}
        command = click.option(*names, **{**shown, **options})(command)
    return command


def run_flags(command: Command) -> Command:
    """Give a command the flags of how a simulated run goes: its knobs, and what it keeps."""
    command = click.option(
        "--gradients",
        type=click.Choice(("release", "keep")),
        default="release",
        help="When gradients leave: in backward, or step().",
    )(command)
    return click.option(
        "--checkpointing/--no-checkpointing",
        default=False,
        help="Whether backward recomputes a layer's activations.",
    )(knob_flags(command))
