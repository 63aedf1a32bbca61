"""Set-ups near the edge of device memory, from threads about running out of it.

Chosen for what they say of model, devices, batch and strategy, and entered before any of them was
predicted. What a strategy's code does was read afterwards, and an assumption says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.paper.setups import MemoryCase, Setup

_GB, _MIB = 1e9, 2**20

_FSDP1 = Setup(
    model="llama-2-7b",
    machine="dgx-a100-40",
    devices=8,
    strategy="fsdp2",
    batch_size=1,
    sequence=2048,
    options={"optimizer": "loop", "sync_each_batch": False},
)
"""Transformers' Trainer of 2023 with FSDP1: torch 2.0 updates its flat parameters one by one."""
_VICUNA = replace(_FSDP1, checkpointing=True, accumulation=16)
_ALPACA = replace(_FSDP1, sequence=512, attention="eager", accumulation=8)
_TRAINER = "predicted as FSDP2; gradients whole between micro-batches, as the Trainer keeps them"


def _case(
    label: str, setup: Setup, *, fits: bool, source: str, assumption: str, **peak: Any
) -> MemoryCase:
    return MemoryCase(
        label=label, setup=setup, fits=fits, source=source, assumption=assumption, **peak
    )


def _vicuna(devices: int, batch: int, *, fits: bool, source: str, **peak: Any) -> MemoryCase:
    return _case(
        f"FastChat, Vicuna-7B on {devices} A100 40 GB, batch {batch}",
        replace(_VICUNA, devices=devices, batch_size=batch),
        fits=fits,
        source=f"lm-sys/FastChat {source}",
        assumption=f"{_TRAINER}; layers recomputed, fused attention, 2,048 tokens",
        **peak,
    )


def _alpaca(devices: int, batch: int, *, fits: bool, source: str, note: str = "") -> MemoryCase:
    return _case(
        f"Stanford Alpaca, Llama-7B on {devices} A100 40 GB, batch {batch}",
        replace(_ALPACA, devices=devices, batch_size=batch),
        fits=fits,
        source=f"tatsu-lab/stanford_alpaca {source}",
        assumption=f"{_TRAINER}; nothing recomputed, eager attention over 512 tokens{note}",
    )


_FACTORY = Setup(
    model="llama-2-7b",
    machine="v100-server",
    devices=8,
    strategy="deepspeed_zero2",
    batch_size=1,
    sequence=1024,
    dtype="float16",
    checkpointing=True,
    attention="eager",
    options={"optimizer": "foreach"},
)


def _stage_3(hidden: int, **options: Any) -> dict[str, Any]:
    """Return ZeRO-3 as transformers configures it for a model of this width."""
    options = {"bucket_elements": hidden**2, "optimizer": "foreach", **options}
    return {"strategy": "deepspeed_zero3", "options": options}


def _factory(
    label: str,
    source: str,
    assumption: str,
    *,
    fits: bool = False,
    peak: float | None = None,
    **changes: Any,
) -> MemoryCase:
    return _case(
        f"LLaMA-Factory, {label}",
        replace(_FACTORY, **changes),
        fits=fits,
        peak=peak,
        scope="device",
        source=f"hiyouga/LLaMA-Factory {source}",
        assumption=f"layers recomputed, that project's default; PyTorch's AdamW; {assumption}",
    )


def _slideformer(batch: int, mebibytes: float) -> MemoryCase:
    return _case(
        f"DeepSpeed ZeRO-3 offload, Llama-3.1-8B on one RTX 4090, batch {batch}",
        Setup(
            model="llama-3.1-8b",
            machine="rtx4090-server",
            devices=1,
            batch_size=batch,
            sequence=1024,
            checkpointing=True,
            kernels="liger",
            strategy="deepspeed_zero3",
            options={"offload": "all"},
        ),
        fits=True,
        peak=mebibytes * _MIB,
        source="SlideFormer's repository, bench/DeepSpeed, CSV of 2026-02-24",
        assumption="every layer recomputed",
    )


def _gpt2_xl(machine: str, *, fits: bool, source: str) -> MemoryCase:
    return _case(
        f"nanoGPT, GPT-2 XL on one {'A100 40 GB' if fits else 'RTX 3090'}",
        Setup(
            model="gpt2-xl",
            machine=machine,
            devices=1,
            strategy="published_on_device",
            batch_size=1,
            sequence=1024,
            accumulation=32,
            dtype="float32",
        ),
        fits=fits,
        source=f"karpathy/nanoGPT {source}",
        assumption="the repository's configuration for fine-tuning; parameters in float32 and "
        "activations too, where automatic casts make some bfloat16",
    )


_QWEN_32B: dict[str, Any] = {
    "model": "qwen2.5-32b",
    "machine": "dgx-a100-80",
    "dtype": "bfloat16",
    "attention": "fused",
    "accumulation": 2,
    **_stage_3(5120),
}
_LLAMA_3: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "machine": "rtx3090-server",
    "attention": "fused",
    "accumulation": 2,
}

MEMORY_FAILURES: tuple[MemoryCase, ...] = (
    _vicuna(4, 2, fits=False, source="#407, #1781"),
    _vicuna(4, 1, fits=False, source="#407"),
    _vicuna(8, 2, fits=True, source='#407, "almost eaten up"'),
    _vicuna(8, 1, fits=True, source="#407", peak=30 * _GB, scope="device"),
    _alpaca(8, 4, fits=False, source="#39"),
    _alpaca(8, 2, fits=True, source="#39"),
    _alpaca(4, 1, fits=False, source="#308", note="; it ran for a fifth of its steps"),
    _factory(
        "Llama-7B on 8 V100, ZeRO-2",
        "#1221",
        "one by one, as the message shows; 1,024 tokens; eager attention",
        options={"optimizer": "loop"},
    ),
    _factory(
        "Llama-7B on 8 V100, ZeRO-3",
        "#1221",
        "as without ZeRO-3",
        fits=True,
        **_stage_3(4096, optimizer="loop"),
    ),
    _factory(
        "Qwen2.5-3B on 4 RTX 3090, ZeRO-2",
        "#6752",
        "bfloat16",
        model="qwen2.5-3b",
        machine="rtx3090-server",
        devices=4,
        sequence=512,
        dtype="bfloat16",
        attention="fused",
    ),
    _factory(
        "Qwen2-7B on 4 A40, ZeRO-3",
        "#4199",
        "an RTX A6000, which has that chip and 3 GiB more without ECC; 1,024 tokens",
        model="qwen2.5-7b",
        machine="rtx-a6000-server",
        devices=4,
        dtype="bfloat16",
        attention="fused",
        **_stage_3(3584),
    ),
    _factory("Qwen2.5-32B on 7 A800, ZeRO-3", "#6999", "A100 80 GB", devices=7, **_QWEN_32B),
    _factory("Qwen2.5-32B on 8 A800, ZeRO-3", "#6999", "A100 80 GB", **_QWEN_32B),
    _factory(
        "Qwen1.5-72B on 16 A800, ZeRO-3",
        "#2959",
        "A100 80 GB, Qwen2.5's shapes",
        model="qwen2.5-72b",
        machine="dgx-a100-80",
        attention="fused",
        hosts=2,
        **_stage_3(8192),
    ),
    _factory(
        "Llama-3-8B on 8 RTX 3090, ZeRO-3",
        "#5977",
        "its examples' configuration",
        **_LLAMA_3,
        **_stage_3(4096),
    ),
    _factory(
        "Llama-3-8B on 8 RTX 3090, ZeRO-3 with offload",
        "#5977",
        "its examples' configuration; the figure is a monitor's, with what the allocator has "
        "cached on a device that is far from full",
        fits=True,
        peak=13 * _GB,
        **_LLAMA_3,
        **_stage_3(4096, offload="all"),
    ),
    _case(
        "dLLM, LLaDA-8B on 2 A100 40 GB, ZeRO-2 with offload",
        Setup(
            model="llama-3.1-8b",
            machine="dgx-a100-40",
            devices=2,
            strategy="deepspeed_zero_offload",
            batch_size=2,
            accumulation=4,
            sequence=1024,
        ),
        fits=False,
        source="ZHZisZZ/dllm #9",
        assumption="Llama-3.1-8B's shapes, which are about LLaDA's; 1,024 tokens; it fails while "
        "the optimizer is made, for 14.9 GiB: all weights, or half of the masters, on a device",
    ),
    _case(
        "lit-llama, Llama-7B on 4 A100 40 GB, DeepSpeed ZeRO-2",
        Setup(
            model="llama-2-7b",
            machine="dgx-a100-40",
            devices=4,
            strategy="deepspeed_zero2",
            batch_size=1,
            sequence=256,
            options={"optimizer": "foreach"},
        ),
        fits=False,
        source="Lightning-AI/lit-llama #397, LianjiaTech/BELLE #137",
        assumption="256 tokens; without offload: 31.38 GiB are weights in 16 bits and three "
        "quarters in float32, as in the other thread, although offload was asked for",
    ),
    _case(
        "Open-Instruct, Llama-7B on 4 A100 80 GB, ZeRO-3",
        Setup(
            model="llama-2-7b",
            machine="dgx-a100-80",
            devices=4,
            batch_size=2,
            sequence=2048,
            attention="eager",
            **_stage_3(4096),
        ),
        fits=False,
        source="allenai/open-instruct #25",
        assumption="eager attention, since that is what was left out",
    ),
    _case(
        "transformers, Llama-2-7B on 2 A100 80 GB, ZeRO-3",
        Setup(
            model="llama-2-7b",
            machine="dgx-a100-80",
            devices=2,
            batch_size=4,
            sequence=1024,
            dtype="float16",
            **_stage_3(4096),
        ),
        fits=False,
        source="deepspeedai/DeepSpeed #5507",
        assumption="the script's blocks of 1,024 tokens, nothing recomputed; it fails in the "
        "first step of the optimizer",
    ),
    _case(
        "LitGPT, lora, Mistral-7B on one A100 40 GB, batch 4",
        Setup(
            model="mistral-7b",
            machine="dgx-a100-40",
            devices=1,
            strategy="lora",
            batch_size=4,
            sequence=1304,
            options={"lora_rank": 8, "lora_targets": "attention"},
        ),
        fits=False,
        source="Lightning-AI/litgpt #781",
        assumption="Alpaca's longest text; queries and values alone have adapters there",
    ),
    _gpt2_xl("rtx3090-server", fits=False, source="#93, #208"),
    _gpt2_xl("dgx-a100-40", fits=True, source="#93"),
    _slideformer(8, 8508.6),
    _slideformer(16, 10620.7),
    _slideformer(32, 16367.4),
)
"""Rows in the order in which they were found, those of one project together."""
