"""Published measurements: what was measured by whom, on what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evidence.literature.times.alternatives import ALTERNATIVE_GROUPS, ALTERNATIVES
from evidence.literature.times.communication import COMMUNICATION, COMMUNICATION_GROUPS
from evidence.literature.times.data_parallel import DATA_PARALLEL, DATA_PARALLEL_GROUPS
from evidence.literature.times.fine_tuning import FINE_TUNING, FINE_TUNING_GROUPS
from evidence.literature.times.host_offload import HOST_OFFLOAD, HOST_OFFLOAD_GROUPS
from evidence.literature.times.host_passes import HOST_PASS_GROUPS, HOST_PASSES
from evidence.literature.times.launch_bound import LAUNCH_BOUND, LAUNCH_BOUND_GROUPS
from evidence.literature.times.offload_runs import OFFLOAD_GROUPS, OFFLOAD_RUNS
from evidence.literature.times.one_device import ONE_DEVICE, ONE_DEVICE_GROUPS
from evidence.literature.times.one_host import ONE_HOST, ONE_HOST_GROUPS
from evidence.literature.times.several_hosts import SEVERAL_HOSTS, SEVERAL_HOSTS_GROUPS
from evidence.literature.times.sharded_runs import SHARDED, SHARDED_GROUPS
from evidence.literature.times.zero3_runs import ZERO3_GROUPS, ZERO3_RUNS
from experiments.paper.published import BREAKDOWN, DEEPSPEED_ZENFLOW, QWEN_3B
from experiments.paper.setups import (
    Alternative,
    HostPass,
    Measurement,
    Quantity,
    Setup,
)

GROUPS: Mapping[str, tuple[str, str]] = {
    "phases": (
        "Llama-2-7B on 4 A100, from its phases",
        "The phases are given; this checks the schedules only.",
    ),
    "qwen": (
        "Qwen2.5 on 2 of 8 A100 40 GB, two EPYC 7742",
        "Of ZenFlow's rows the least known figure is the rate of copies through pageable memory: "
        "the float gradients and the new weights of a window take it. What the cores of the "
        "training process and of the update do to one another is not modelled: the same "
        "prediction stands for each binding with the same placement of memory. What the release "
        "does for each parameter, and its own passes over gradients, are counted in its code of "
        "version 0.19.",
    ),
    "llama": (
        "Llama-2-7B on 2 devices that the log does not name",
        "The machine is not known. An A100 cannot compute the logged batch in the logged time at "
        "its peak rate, so the paper's other machine is assumed. Nobody has published what its "
        "host reaches in DeepSpeed's step, or its copies through pageable memory; the constant "
        "comes from the A100's host. The example's configuration has had a global batch of 8 too.",
    ),
    "thunder": (
        "Llama-3.2-1B on one H100, forward and backward",
        "The power limit and the clock of the H100 are not said.",
    ),
    "slideformer": (
        "Llama-3.1-8B on one RTX 4090",
        "A 4090 boosts above the clock of its data sheet: the measured slope of 0.39 s a sequence "
        "is already about 0.95 of the data sheet's peak, recomputation counted. The host is not "
        "named.",
    ),
    "host": (
        "The host's pass alone",
        "Both are read from pictures or text of an issue, to one or two digits.",
    ),
    **HOST_PASS_GROUPS,
    **ALTERNATIVE_GROUPS,
    **SHARDED_GROUPS,
    **LAUNCH_BOUND_GROUPS,
    **COMMUNICATION_GROUPS,
    **OFFLOAD_GROUPS,
    **ZERO3_GROUPS,
    **FINE_TUNING_GROUPS,
    **DATA_PARALLEL_GROUPS,
    **ONE_DEVICE_GROUPS,
    **ONE_HOST_GROUPS,
    **HOST_OFFLOAD_GROUPS,
    **SEVERAL_HOSTS_GROUPS,
}

TOPICS: Mapping[str, tuple[str, Sequence[str]]] = {
    "first": (
        "ZenFlow's own runs, and the first of others",
        ("phases", "qwen", "llama", "thunder", "slideformer", "host"),
    ),
    "host_passes": ("AdamW kernels alone on a host", tuple(HOST_PASS_GROUPS)),
    "alternatives": ("Adapters, and weights that are streamed", tuple(ALTERNATIVE_GROUPS)),
    "sharded_runs": ("Sharded weights, on one host and on several", tuple(SHARDED_GROUPS)),
    "launch_bound": ("Small models and small batches", tuple(LAUNCH_BOUND_GROUPS)),
    "communication": ("Collectives that hide behind no compute", tuple(COMMUNICATION_GROUPS)),
    "offload_runs": ("Training that offloads", tuple(OFFLOAD_GROUPS)),
    "zero3_runs": ("ZeRO-3 and its like", tuple(ZERO3_GROUPS)),
    "fine_tuning": ("Fine-tuning on one named GPU", tuple(FINE_TUNING_GROUPS)),
    "data_parallel": ("Data parallelism without offload", tuple(DATA_PARALLEL_GROUPS)),
    "one_device": ("One device", tuple(ONE_DEVICE_GROUPS)),
    "one_host": ("The devices of one host", tuple(ONE_HOST_GROUPS)),
    "host_offload": ("An optimizer on the host, or 8-bit states", tuple(HOST_OFFLOAD_GROUPS)),
    "several_hosts": ("FSDP on several hosts", tuple(SEVERAL_HOSTS_GROUPS)),
}
"""Titles and groups of the pages that show the rows, by the page's name."""

LAST_GROUPS = (
    *ONE_DEVICE_GROUPS, *ONE_HOST_GROUPS, *HOST_OFFLOAD_GROUPS, *SEVERAL_HOSTS_GROUPS,
)  # fmt: skip
"""Groups that were entered last, before any of their rows was predicted."""
BLIND_GROUPS = (
    *OFFLOAD_GROUPS, *ZERO3_GROUPS, *FINE_TUNING_GROUPS, *DATA_PARALLEL_GROUPS, *LAST_GROUPS,
)  # fmt: skip
"""Groups whose rows were all entered before any of them was predicted."""
UNFITTED = (
    *HOST_PASS_GROUPS, *ALTERNATIVE_GROUPS, *SHARDED_GROUPS, *LAUNCH_BOUND_GROUPS,
    *COMMUNICATION_GROUPS, *BLIND_GROUPS,
)  # fmt: skip
"""Groups with no say in any constant but the term for what the model leaves out."""

PAPER = "ZenFlow paper (arXiv 2505.12242) and DeepSpeed blog deepspeed-zenflow, figures 3 and 4"
_BLOG = "DeepSpeed blog zenflow-corebinding"

_ALPACA = (
    "512 tokens a sequence, padded, as the example's script does it; 4 sequences a device, the "
    "configuration's global batch of 8 over two devices; no recomputation, PyTorch's eager kernels"
)
_SMALL = replace(QWEN_3B, model="qwen2.5-1.5b")
_IN_TURN = {**DEEPSPEED_ZENFLOW, "overlap": False}
_TWO_CORES = {**DEEPSPEED_ZENFLOW, "reserved_cores": 2 / 64}


def _flow(
    setup: Setup, *, binds_cores: bool = True, options: Mapping[str, Any] = DEEPSPEED_ZENFLOW
) -> Setup:
    return replace(setup, strategy="deepspeed_zenflow", binds_cores=binds_cores, options=options)


def _pageable(share: float) -> Alternative:
    return Alternative(
        text=f"pageable copies at {share:g} of the link", values={"link.pageable": share}
    )


def _qwen(label: str, milliseconds: float, source: str, setup: Setup) -> Measurement:
    alternatives = [Alternative(text="8 sequences a device", setup=replace(setup, batch_size=8))]
    if setup.strategy == "deepspeed_zenflow":
        alternatives += [_pageable(0.15), _pageable(0.5)]
    return Measurement(
        label=label,
        seconds=milliseconds / 1e3,
        quantity="step",
        setup=setup,
        group="qwen",
        source=source,
        assumption=_ALPACA,
        alternatives=tuple(alternatives),
    )


def _phases(label: str, seconds: float, quantity: Quantity, strategy: str) -> Measurement:
    return Measurement(
        label=label,
        seconds=seconds,
        quantity=quantity,
        setup=replace(BREAKDOWN, strategy=strategy),
        group="phases",
        source=PAPER,
        assumption="each phase is spread evenly over 32 layers; gradients leave inside backward",
    )


_LOG = "DeepSpeedExamples, training/DeepSpeed-ZenFlow/finetuning: README's log"
_LLAMA = Setup(
    model="llama-2-7b",
    machine="h100-xeon-8462y",
    devices=2,
    strategy="deepspeed_zenflow",
    batch_size=16,
    sequence=512,
    options=DEEPSPEED_ZENFLOW,
)


def _llama(label: str, milliseconds: float, quantity: Quantity, setup: Setup) -> Measurement:
    fewer = replace(setup, batch_size=4)
    alternatives = [
        Alternative(text="4 sequences a device", setup=fewer),
        Alternative(
            text="A100 and one EPYC 7742, 4 sequences a device",
            setup=replace(fewer, machine="a100-epyc-7742"),
        ),
    ]
    if setup.strategy == "deepspeed_zenflow":
        alternatives.append(_pageable(0.5))
    return Measurement(
        label=label,
        seconds=milliseconds / 1e3,
        quantity=quantity,
        setup=setup,
        group="llama",
        source=_LOG,
        assumption="two H100 with two Xeon 8462Y+, the paper's second machine; 16 sequences of "
        "512 tokens a device, the global batch of 32 in the configuration beside the log",
        alternatives=tuple(alternatives),
    )


def _slideformer(batch_size: int, seconds: float) -> Measurement:
    setup = Setup(
        model="llama-3.1-8b",
        machine="rtx4090-server",
        devices=1,
        strategy="deepspeed_zero_offload",
        batch_size=batch_size,
        sequence=1024,
        checkpointing=True,
        kernels="liger",
        options={"overlap_comm": True},
    )
    free = {"device.bandwidth": 1e18}
    return Measurement(
        label=f"ZeRO-3 offload, batch {batch_size}",
        seconds=seconds,
        quantity="step",
        setup=setup,
        group="slideformer",
        source="SlideFormer's repository, bench/DeepSpeed, CSV of 2026-02-24",
        assumption="an RTX 4090 bound to one socket of EPYC 7742, which the repository does not "
        "name; every layer recomputed; ZeRO-3 is simulated as ZeRO-2, whose weights go up once "
        "and whose passes over gradients are not all stage 3's, with stage 3's default of copies "
        "beside backward",
        alternatives=(
            Alternative(text="kernels so fused that all but products is free", values=free),
            Alternative(
                text="that, and products at the data sheet's peak",
                values={**free, "device.matmul_efficiency": 1.0},
            ),
        ),
    )


def _thunder(kernels: str, milliseconds: float) -> Measurement:
    return Measurement(
        label=f"forward and backward, {kernels}",
        seconds=milliseconds / 1e3,
        quantity="compute",
        setup=Setup(
            model="llama-3.2-1b",
            machine="hgx-h100",
            devices=1,
            strategy="published_on_device",
            batch_size=1,
            sequence=2048,
            kernels=kernels,
        ),
        group="thunder",
        source="Lightning-AI/lightning-thunder #1506, comment of 2024-12-04",
        assumption="an H100 SXM; transformers' own model, in bfloat16",
    )


MEASUREMENTS: tuple[Measurement, ...] = (
    _phases("ZeRO-Offload, step", 7.145, "step", "published_zero_offload"),
    _phases("ZeRO-Offload, idle", 5.100, "stall", "published_zero_offload"),
    _phases("delayed by one step, idle", 2.555, "stall", "published_delayed"),
    _phases("ZenFlow, step", 2.045, "step", "zenflow_paper"),
    _qwen("3B, ZeRO-Offload, cores not bound", 2887, _BLOG, replace(QWEN_3B, binds_cores=False)),
    _qwen("3B, ZeRO-Offload, bound", 2497, _BLOG, QWEN_3B),
    _qwen("3B, ZeRO-Offload, not bound", 3084, "deepspeedai/DeepSpeed #7474",
          replace(QWEN_3B, binds_cores=False)),
    _qwen("3B, ZeRO-Offload, bound", 2383, "deepspeedai/DeepSpeed #7474", QWEN_3B),
    _qwen("3B, ZenFlow, its first binding", 1419, _BLOG, _flow(QWEN_3B, binds_cores=False)),
    _qwen("3B, ZenFlow, its new binding", 1325, _BLOG, _flow(QWEN_3B, binds_cores=False)),
    _qwen("3B, ZenFlow, DeepSpeed's binding", 1232, _BLOG, _flow(QWEN_3B)),
    _qwen("3B, ZenFlow, DeepSpeed's and its new", 1116, _BLOG, _flow(QWEN_3B)),
    _qwen("3B, ZenFlow, no overlap", 1564, "deepspeedai/DeepSpeed #7478",
          _flow(QWEN_3B, binds_cores=False, options=_IN_TURN)),
    _qwen("3B, ZenFlow, overlap", 1381, "deepspeedai/DeepSpeed #7478",
          _flow(QWEN_3B, binds_cores=False)),
    _qwen("3B, ZenFlow, bound, no overlap", 1344, "deepspeedai/DeepSpeed #7478",
          _flow(QWEN_3B, options=_IN_TURN)),
    _qwen("3B, ZenFlow, bound, overlap, two cores reserved", 1217, "deepspeedai/DeepSpeed #7478",
          _flow(QWEN_3B, options=_TWO_CORES)),
    _qwen("1.5B, ZeRO-2, no offload", 240, _BLOG,
          replace(_SMALL, strategy="deepspeed_zero2")),
    _qwen("1.5B, ZeRO-Offload, bound", 1365, _BLOG, _SMALL),
    _qwen("1.5B, ZenFlow, both bindings", 569, _BLOG, _flow(_SMALL)),
    _llama("accumulating step (703 to 740)", 720, "accumulating", _LLAMA),
    _llama("update step (1913, 2221)", 2067, "boundary", _LLAMA),
    _llama("mean of steps 5 to 12", 1078, "step", _LLAMA),
    _llama("without ZenFlow (nearly 4 s)", 4000, "step",
           replace(_LLAMA, strategy="deepspeed_zero_offload", options={})),
    _thunder("eager", 53.6),
    _thunder("compiled", 38.0),
    _slideformer(8, 8.9672),
    _slideformer(16, 11.9340),
    _slideformer(32, 18.2987),
    Measurement(
        label="DeepSpeed's CPU step, 72B on 32 A100 (about 10 s)",
        seconds=10.0,
        quantity="host",
        setup=HostPass(machine="dgx-a100-80", devices=8, num_params=72.7e9 / 4),
        group="host",
        source="deepspeedai/DeepSpeed #6834",
        assumption="four hosts of two EPYC 7742 share the parameters of Qwen-72B evenly",
    ),
    Measurement(
        label="prime-rl's AdamW, 171B on 8 H200 (12.8 s)",
        seconds=12.8,
        quantity="host",
        setup=HostPass(machine="hgx-h200", devices=8, num_params=171e9, bytes_each=30.0),
        group="host",
        source="PrimeIntellect-ai/prime-rl #3248",
        assumption="30 bytes of DRAM a parameter: master and moments in and out, a float "
        "gradient, a 16-bit weight",
    ),
    *HOST_PASSES,
    *ALTERNATIVES,
    *SHARDED,
    *LAUNCH_BOUND,
    *COMMUNICATION,
    *OFFLOAD_RUNS,
    *ZERO3_RUNS,
    *FINE_TUNING,
    *DATA_PARALLEL,
    *ONE_DEVICE,
    *ONE_HOST,
    *HOST_OFFLOAD,
    *SEVERAL_HOSTS,
)  # fmt: skip

NOT_PREDICTED = (
    "BERT-base, compiled, on an A100 (keras-team/keras-io, 202 ms) and a lecture's GPT-2 "
    "(karpathy/build-nanogpt, 333 ms): products are TF32's, which no set-up can have.",
    "XTuner's Llama-2-7B on 8 A100: its pages give 2,234 and 3,864 tokens/s for one set-up.",
    "LoRA of Llama-2-7B in float32 on one MI300X (ROCm/rocm-blogs, llama-lora): its logs give "
    "196 s and 8 min for one run.",
    "TinyLlama-1.1B under DDP and on one A100 (Lightning-AI/litgpt, extensions/thunder): the time "
    "is of the last of many micro-batches, with what is still queued of those before.",
    "ZeRO-3 with weights alone on the host (deepspeedai/DeepSpeed #3901, 6.05 s): no simulated "
    "strategy has its states on the device then.",
    "ZeRO-Infinity's 50B on a DGX-2 (deepspeedai/DeepSpeed #1776, 298.9 s a step): where the "
    "states were is not said.",
    "Steps of 100 and 129 ms of T5-base with a batch of 1 on an RTX 3090 and an A100 "
    "(huggingface/transformers #14608, #15026): encoders with decoders are not in the table.",
    "Steps of a course's decoders on an RTX 5090 in anenbergb/LLM-from-scratch: most vary by a "
    "quarter and more from one to the next.",
    "ZeRO-2 beside DDP on 8 A100 (TensorAuto/OpenTau #177, 3.4 s of backward against 0.7 s): the "
    "model is of images, words and actions.",
    "The step behind an update step in the Llama-2-7B log (891 and 1062 ms against 720): the "
    "simulated update slows no later step down but by sharing DRAM.",
    "DeepSpeed's kernel alone on 0.54 and 0.67 G parameters (DandinPower/numa-cpu-adam-bench, 55 "
    "and 68 ms): the host is not named.",
    "Megatron's CPU optimizer for 106B on four hosts (THUDM/slime 1139, 9.6 s): it was timed "
    "under a profiler, and is no fused kernel.",
)
