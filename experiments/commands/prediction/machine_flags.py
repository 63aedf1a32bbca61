"""Flags that name a machine and a workload, shared by the simulator's commands."""

from __future__ import annotations

import click

from experiments.commands.command import with_flags
from experiments.commands.flag_types import KNOWN_FILE, PATH, BatchSize, Memory
from experiments.commands.training.train_flags import knob_flags
from experiments.training.settings.training import DTYPES
from sim.models.kernels import KERNELS

simulation_flags = with_flags(
    click.option(
        "--model",
        required=True,
        help="A named model (llama-2-7b, Qwen/Qwen2.5-0.5B), a size of `zenflow train`, a "
        "config.json or a directory with one.",
    ),
    click.option("--gpu", help="Device by name (rtx4090): the rest is as in its usual machine."),
    click.option(
        "--machine",
        "--hardware",
        help="A whole machine by name, such as dgx-a100-80, or a profile's JSON file.",
    ),
    click.option("--profile", type=PATH, help="What `zenflow calibrate` wrote."),
    click.option("--num-gpus", type=click.IntRange(min=1), help="Devices that train together."),
    click.option("--host", help="Host by name, such as 2x-epyc-7742."),
    click.option("--host-ram", type=Memory(), help="Host memory in GiB."),
    click.option("--link", help="Link to the host by name, such as pcie4-x16."),
    click.option("--fabric", help="Fabric between devices by name, such as nvlink4."),
    click.option("--nvme", help="NVMe drives by name, such as 4x-gen4, or none."),
    click.option(
        "--batch-size",
        default=4,
        show_default=True,
        help="Sequences of a micro-batch on each device.",
    ),
    click.option("--sequence", default=1024, show_default=True, help="Tokens of a sequence."),
    click.option("--grad-accum", default=1, show_default=True, help="Micro-batches of a step."),
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        help="Of parameters; default: bfloat16 if the device can.",
    ),
)
"""Flags of a model, a machine and a workload."""

compute_flags = with_flags(
    click.option(
        "--kernels",
        type=click.Choice(tuple(KERNELS)),
        default="eager",
        show_default=True,
        help="Norms, rotary positions, gates and loss: transformers' own, Liger's, or compiled.",
    ),
    click.option(
        "--from-trace",
        type=KNOWN_FILE,
        help="Take compute from a trace that torch.profiler exported of your own training without "
        "offloading (.gz too). Batch, micro-batches and checkpointing default to the trace's.",
    ),
    click.option(
        "--traced-batch",
        type=BatchSize(),
        help="With --from-trace, for a trace without shapes: the micro-batches that it is of.",
    ),
)
"""Flags of how forward and backward compute, modelled or traced."""

run_flags = with_flags(
    click.option(
        "--checkpointing/--no-checkpointing",
        default=False,
        help="Whether backward recomputes a layer's activations.",
    ),
    knob_flags,
    click.option(
        "--gradients",
        type=click.Choice(("release", "keep")),
        default="release",
        help="When gradients leave: in backward, or step().",
    ),
)
"""Flags of how a simulated run goes: its knobs, and what it keeps."""
