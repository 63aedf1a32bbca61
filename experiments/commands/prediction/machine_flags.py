"""Flags that name a machine and a workload, shared by the simulator's commands."""

from __future__ import annotations

from typing import Any

import click

from experiments.commands.command import given, with_flags
from experiments.commands.flag_types import (
    KNOWN_FILE,
    PATH,
    BatchSize,
    Memory,
    RecomputationFlag,
    RecomputedLayers,
)
from experiments.commands.training.train_flags import given_flags, knob_flags
from experiments.sweeps.axes.kinds import SYSTEM_OPTIONS
from experiments.training.settings.training import DTYPES
from sim.models.kernels import KERNELS
from sim.models.workload import ATTENTIONS, LOSSES
from sim.timing.division import PARALLELS

MOST_DRAWS = 10_000
"""Most draws of a machine's uncertain figures: more move an interval by nothing."""

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
    click.option(
        "--num-gpus", type=click.IntRange(min=1), help="Devices of a host that train together."
    ),
    click.option(
        "--num-hosts", type=click.IntRange(min=1), help="Hosts that train together, all alike."
    ),
    click.option("--host", help="Host by name, such as 2x-epyc-7742."),
    click.option("--host-ram", type=Memory(), help="Host memory in GiB."),
    click.option(
        "--host-threads",
        type=click.IntRange(min=1),
        help="Threads of each device's process; default: its share of the cores. `torchrun` "
        "gives PyTorch and DeepSpeed 1, unless OMP_NUM_THREADS says more.",
    ),
    click.option("--link", help="Link to the host by name, such as pcie4-x16."),
    click.option("--fabric", help="Fabric between devices by name, such as nvlink4."),
    click.option("--network", help="Network between hosts by name, such as 8x-infiniband-ndr."),
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

parallel_flags = with_flags(
    click.option(
        "--parallel",
        type=click.Choice(PARALLELS),
        default="ddp",
        show_default=True,
        help="How devices share a model: weights whole on each, or sharded as by FSDP2.",
    ),
    click.option(
        "--reshard-after-forward/--no-reshard-after-forward",
        default=True,
        help="Whether sharded weights are dropped behind forward, and gathered again.",
    ),
)
"""Flags of how several devices share a model."""

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

master_flags = with_flags(
    click.option(
        "--float32-master/--no-float32-master",
        default=None,
        help="Whether other systems' AdamW has float32 weights beside 16-bit ones. Without, all "
        "of it has 16 bits, as in pure bfloat16 training; of ddp, fsdp2, fsdp2_offload, "
        "superoffload, adamw_8bit and adamw_4bit.  [default: each system's own]",
    ),
)
"""Flag of what other systems' AdamW updates."""

run_flags = with_flags(
    parallel_flags,
    click.option(
        "--checkpointing",
        cls=RecomputationFlag,
        type=RecomputedLayers(),
        is_flag=False,
        flag_value="1",
        default=False,
        help="Have backward recompute layers' activations: all layers', or those of a share, "
        "evenly spread. 1/2 is every second layer, 20/32 are 20 of 32. op: of every layer all but "
        "attention and every second product, as torchtitan's option. --no-checkpointing: none.",
    ),
    click.option(
        "--attention",
        type=click.Choice(ATTENTIONS),
        default="fused",
        show_default=True,
        help="Kernels: fused ones (FlashAttention-2, PyTorch's) compute scores once more in "
        "backward, and so do native ones, Hopper's and Blackwell's (FlashAttention-3 and 4, "
        "cuDNN's); eager ones keep them.",
    ),
    click.option(
        "--loss",
        type=click.Choice(LOSSES),
        default="tokens",
        show_default=True,
        help="Cross entropy of every token's logits, their sum, or a few classes of a sequence "
        "with no output layer over the vocabulary.",
    ),
    click.option(
        "--offload-activations/--no-offload-activations",
        default=False,
        help="Whether activations wait on the host for backward.",
    ),
    click.option(
        "--lora-rank",
        type=click.IntRange(min=1),
        help="Rank of adapters, of lora and qlora.  [default: 16]",
    ),
    click.option(
        "--lora-targets",
        help="Matrices that get adapters, of lora and qlora: all of a layer, or attention's.  "
        "[default: all]",
    ),
    master_flags,
    knob_flags,
    click.option(
        "--gradients",
        type=click.Choice(("release", "keep")),
        default="release",
        help="When gradients leave: in backward, or step().",
    ),
)
"""Flags of how a simulated run goes: its knobs, and what it keeps."""


def strategy_options(context: click.Context) -> dict[str, Any]:
    """Return the knobs and options of a strategy that stand on the command line."""
    return {**given_flags(context)[1], **system_options(context)}


def system_options(context: click.Context) -> dict[str, Any]:
    """Return the options of other systems that stand on the command line."""
    return {name: value for name, value in given(context).items() if name in SYSTEM_OPTIONS}
