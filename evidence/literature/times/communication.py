"""Published times of training whose collectives do not hide behind compute, or hardly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.paper.setups import Alternative, Measurement, Setup

COMMUNICATION_GROUPS: Mapping[str, tuple[str, str]] = {
    "ddp-gpt2": (
        "GPT-2 in float32 under DDP on 2 RTX 3090, copies between them through the host",
        "The table is taken to be of the devices that the comment before it names. Their board "
        "and PCIe slots are not named. Most of the time of two devices is an all-reduce that is "
        "longer than backward. The issue doubts that PyTorch reached this device's full speed. "
        "The rows of one device tell compute from collectives.",
    ),
    "ddp-bert": (
        "BERT-large in float16 on 1 and 2 GeForce, DDP of apex",
        "The boards are not named. Two devices are slower than one by about 100 ms, as long as "
        "the whole all-reduce at 7 GB/s: as if nothing of it hid behind backward, as it does in "
        "the prediction. The rows of one device tell compute from collectives.",
    ),
    "fsdp-400": (
        "Llama under FSDP on 64 and 128 A100, 400 Gb/s for each host",
        "A host's eight devices share what each device has for itself in the tables above. The "
        "network is named for 128 devices alone. One row is bound by it, the 70B with one "
        "sequence a device: it carried a quarter more than the table says that it does.",
    ),
}
"""Titles and doubts, by group. No term or figure is fitted to these rows."""

_HALF = (
    Alternative(text="half of the bandwidth between devices", values={"fabric.bandwidth": 6e9}),
)
_FREE = (Alternative(text="all but products is free", values={"device.bandwidth": 1e18}),)


def _gpt2(model: str, sequence: int, seconds: float, devices: int = 2) -> Measurement:
    """Return a row of 4 sequences a device; 200 steps on two devices, 400 on one."""
    return Measurement(
        label=f"{model}, {sequence} tokens, {devices} device{'s' * (devices > 1)}",
        seconds=seconds / (200 if devices == 2 else 400),
        quantity="step",
        setup=Setup(
            model=model,
            machine="rtx3090-server",
            devices=devices,
            strategy="ddp",
            batch_size=4,
            sequence=sequence,
            attention="eager",
            dtype="float32",
            options={"optimizer": "loop"},
        ),
        group="ddp-gpt2",
        source="huggingface/transformers #9371, comments of 2021-01-27: run_clm.py with "
        "NCCL_P2P_DISABLE=1",
        assumption="two RTX 3090 of a server; plain float32, DDP's default buckets, AdamW in a "
        "loop as transformers had it; time of a run over its steps",
        alternatives=_HALF if devices == 2 else (),
    )


def _bert(machine: str, name: str, devices: int, rate: float) -> Measurement:
    return Measurement(
        label=f"{devices} {name} ({rate:g} sequences/s)",
        seconds=28 * devices / rate,
        quantity="step",
        setup=Setup(
            model="bert-large",
            machine=machine,
            devices=devices,
            strategy="ddp",
            batch_size=28,
            sequence=384,
            attention="eager",
            dtype="float16",
        ),
        group="ddp-bert",
        source="lambdal/deeplearning-benchmark, pytorch/results: logs of "
        "PyTorch_bert_large_squad_FP16, October 2022",
        assumption="28 sequences of 384 tokens a device; the table's BERT, with an output layer "
        "over its vocabulary that this task does not have; gradients reduced in float16",
        alternatives=_HALF if devices == 2 else (),
    )


_A100 = Setup(
    model="llama-3-8b",
    machine="dgx-a100-80",
    devices=8,
    hosts=8,
    network="4x-efa-100",
    strategy="fsdp2",
    batch_size=1,
    sequence=8192,
    options={"float32_reduce": True},
)


def _fsdp(label: str, tokens: float, setup: Setup, source: str, assumption: str) -> Measurement:
    return Measurement(
        label=label,
        seconds=setup.batch_size * setup.sequence / tokens,
        quantity="step",
        setup=setup,
        group="fsdp-400",
        source=source,
        assumption=assumption,
        alternatives=(
            *_FREE,
            Alternative(
                text="200 Gb/s for each device", setup=replace(setup, network="8x-infiniband-hdr")
            ),
        ),
    )


def _titan(label: str, tokens: float, **changes: Any) -> Measurement:
    return _fsdp(
        label,
        tokens,
        replace(_A100, **changes),
        "pytorch/torchtitan, docs/performance.md",
        "eight hosts of AWS p4de, whose network has 400 Gb/s; gradients reduced in float32; "
        "8,192 tokens a sequence for Llama-3, 4,096 for Llama-2; not compiled; the first row "
        "recomputed by operation",
    )


_13B: dict[str, Any] = {"model": "llama-2-13b", "batch_size": 2, "sequence": 4096}
_70B: dict[str, Any] = {"model": "llama-2-70b", "batch_size": 2, "sequence": 4096}

COMMUNICATION: tuple[Measurement, ...] = (
    _gpt2("gpt2-medium", 128, 49.3823, devices=1),
    _gpt2("gpt2-medium", 512, 152.6255, devices=1),
    _gpt2("gpt2", 128, 30.0181),
    _gpt2("gpt2", 512, 49.1999),
    _gpt2("gpt2-medium", 128, 74.9924),
    _gpt2("gpt2-medium", 512, 124.1163),
    _gpt2("gpt2-large", 128, 152.2178),
    _bert("rtx3090-server", "RTX 3090", 1, 52.57),
    _bert("rtx3090-server", "RTX 3090", 2, 89.24),
    _bert("rtx4090-server", "RTX 4090", 1, 93.59),
    _bert("rtx4090-server", "RTX 4090", 2, 139.01),
    _titan("Llama-3-8B on 64 A100", 2973, checkpointing="op"),
    _titan("Llama-3-8B on 64 A100, every second layer recomputed", 2904, checkpointing=0.5),
    _titan("Llama-3-70B on 64 A100", 331, model="llama-3.1-70b", checkpointing=True),
    _titan("Llama-2-13B on 64 A100", 2162, **_13B),
    _titan(
        "Llama-2-13B on 64 A100, every second layer recomputed", 1914, **_13B, checkpointing=0.5
    ),
    _titan("Llama-2-13B on 64 A100, recomputed by operation", 1904, **_13B, checkpointing="op"),
    _titan("Llama-2-70B on 64 A100", 353, **_70B, checkpointing=True),
    _titan(
        "Llama-2-70B on 64 A100, recomputed by operation",
        355,
        **{**_70B, "batch_size": 1},
        checkpointing="op",
    ),
    _fsdp(
        "Llama-2-70B on 128 A100",
        380,
        replace(
            _A100,
            model="llama-2-70b",
            hosts=16,
            batch_size=6,
            sequence=4096,
            checkpointing=True,
            options={},
        ),
        "foundation-model-stack/fms-fsdp, README",
        "sixteen hosts with 400 Gb/s each; 4,096 tokens a sequence; gradients reduced in 16 bits; "
        "not compiled",
    ),
)
