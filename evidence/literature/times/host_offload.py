"""Published times of training with its optimizer on the host, or with 8-bit states, on one host.

All rows were entered before any of them was predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from evidence.literature.times.zero3_runs import RELEASED, gpt
from experiments.paper.setups import (
    PAGEABLE,
    Alternative,
    HostPass,
    Measurement,
    Setup,
    row_of,
)

HOST_OFFLOAD_GROUPS: Mapping[str, tuple[str, str]] = {
    "alps": (
        "A model of Llama-3-8B's shapes on four GH200, ZeRO-2, ZeRO-3 and its offload",
        "The rate is of all four devices, the mean of the logs from step 10 on. Rotary positions "
        "are complex products in float32, and keys are repeated before attention, which the "
        "set-ups do not say. SuperOffload's run is no row: the source finds that it updates no "
        "weights.",
    ),
    "fairscale": (
        "GPT-3 13B on 1 and 8 V100, FairScale's FSDP with CPU offload",
        "FSDP2's offload stands for FairScale's, which copies the same bytes but gathers no layer "
        "ahead. The host is not named: its Adam has AVX2 alone, and 20 threads. Steps whose "
        "gradients overflowed are left out.",
    ),
    "bert-8bit": (
        "BERT-large on one V100, AdamW with 32-bit and 8-bit states",
        "A time is of 128 steps with the first of them, in float32. Weights' updates by "
        "transformers' own AdamW go through tensors one by one.",
    ),
    "tune-70b": (
        "Llama-3-70B under FSDP with CPU offload on 8 A100",
        "Texts of Alpaca have no fixed length: 128 tokens stand for the longer of two. The host "
        "is not named.",
    ),
    "theta": (
        "Megatron's BERT-large on 1 and 8 A100, ZeRO-3 with its optimizer offloaded",
        "Neither the machine nor the release of DeepSpeed is said: the paths are Argonne's, whose "
        "ThetaGPU has DGX A100 of 40 GB, and the time is August 2021's. Copies go through "
        "pageable memory, the configuration's default then.",
    ),
    "silver": (
        "DeepSpeed's CPU step on one Xeon Silver 4210R",
        "The source calls it too slow. Neither the number of threads nor that of memory modules "
        "is said.",
    ),
    "sve": (
        "DeepSpeed's CPU-Adam with SVE",
        "The host is not named; the text speaks of Grace. The rate is not in proportion to size.",
    ),
}
"""Titles and doubts, by group. No term or figure is fitted to these rows."""

_ALPS = Setup(
    model="llama-3-8b-nemo-words",
    config={
        "model_type": "llama",
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    machine="gh200-quad",
    devices=4,
    strategy="deepspeed_zero3",
    batch_size=1,
    sequence=2048,
)


def _alps(label: str, tokens: float, setup: Setup) -> Measurement:
    return row_of(
        "alps",
        "ImaGoodFella/lsaie_project, logs of December 2025, configurations and model.py",
        "every sequence padded to 2,048 tokens, nothing recomputed, SDPA's fused kernel, eager "
        "kernels; each process bound to one Grace",
        f"{label} ({tokens:,.0f} tokens/s)",
        setup.devices * setup.batch_size * setup.sequence / tokens,
        setup,
    )


_FAIRSCALE = Setup(
    model="gpt3-13b",
    config=gpt(5120, 40, 40, words=50_264, tied=False),
    machine="dgx-1",
    devices=1,
    strategy="fsdp2_offload",
    batch_size=8,
    sequence=2048,
    checkpointing=True,
    attention="eager",
    dtype="float16",
    binds_cores=False,
    host_threads=20,
    options={"optimizer": "fused"},
)


def _fairscale(label: str, seconds: float, setup: Setup) -> Measurement:
    return row_of(
        "fairscale",
        "facebookresearch/fairseq, examples/fully_sharded_data_parallel/README.md",
        "a DGX-1; V100 SXM2 of 32 GB; eager kernels, every layer recomputed; float32 between host "
        "and device, both ways; DeepSpeed's fused CPU-Adam",
        label,
        seconds,
        setup,
        PAGEABLE,
    )


_BERT = Setup(
    model="bert-large",
    machine="v100-server",
    devices=1,
    strategy="ddp",
    batch_size=4,
    sequence=512,
    attention="eager",
    loss="classes",
    dtype="float32",
    options={"optimizer": "loop"},
)


def _bert(label: str, seconds: float, setup: Setup) -> Measurement:
    return row_of(
        "bert-8bit",
        "huggingface/transformers, docs: perf_train_gpu_one, first as scaling.mdx (#15119)",
        "float32 without tensor cores; 512 sequences of 512 random tokens in steps of four; eager "
        "kernels and dropout",
        label,
        seconds / 128,
        setup,
    )


_TUNE = Setup(
    model="llama-3.1-70b",
    machine="dgx-a100-80",
    devices=8,
    strategy="fsdp2_offload",
    batch_size=2,
    sequence=128,
    checkpointing=True,
    binds_cores=False,
    options={"float32_master": False, "optimizer": "fused"},
)
_THETA = Setup(
    model="megatron-bert-large",
    config={
        "model_type": "bert",
        "vocab_size": 29_056,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
    },
    machine="dgx-a100-40",
    devices=1,
    strategy="zero3_offload",
    batch_size=4,
    sequence=512,
    checkpointing=True,
    attention="eager",
    dtype="float16",
    binds_cores=False,
)


def _theta(label: str, samples: float, setup: Setup) -> Measurement:
    return row_of(
        "theta",
        "xduan7/scalable-transformer, docs/report.md of 2021-08-21 and its configurations",
        "a DGX A100 of 40 GB; four sequences of 512 tokens a device, every layer recomputed, "
        "eager kernels; one thread each where torch.distributed.launch starts several processes",
        f"{label} ({samples:g} samples/s)",
        setup.devices * setup.batch_size / samples,
        setup,
        PAGEABLE,
    )


def _sve(billions: float, seconds: float) -> Measurement:
    return row_of(
        "sve",
        "deepspeedai/DeepSpeed #8365",
        "one Grace; 28 bytes of DRAM a parameter, all in float32",
        f"CPU-Adam with SVE, {billions:g}B",
        seconds,
        HostPass(machine="gh200", devices=1, num_params=billions * 1e9, bytes_each=28.0),
    )


HOST_OFFLOAD: tuple[Measurement, ...] = (
    _alps("ZeRO-2", 19_599.6, replace(_ALPS, strategy="deepspeed_zero2", options=RELEASED)),
    _alps("ZeRO-3", 14_565.5, _ALPS),
    _alps("ZeRO-3, optimizer offloaded", 8286.5, replace(_ALPS, strategy="zero3_offload")),
    _fairscale("13B on 1 V100, all offloaded", 322 / 6, _FAIRSCALE),
    _fairscale("13B on 8 V100, all offloaded", 241 / 6, replace(_FAIRSCALE, devices=8)),
    _bert("AdamW in float32", 57.82, _BERT),
    _bert("AdamW with 8-bit states", 55.95, replace(_BERT, strategy="adamw_8bit", options={})),
    _bert(
        "AdamW in float32, four micro-batches, recomputed",
        85.47,
        replace(_BERT, batch_size=1, accumulation=4, checkpointing=True),
    ),
    row_of(
        "tune-70b",
        "meta-pytorch/torchtune #993",
        "all in bfloat16; two texts a device, padded to 128 tokens; the threads of the host "
        "shared out; PyTorch's fused AdamW on the CPU",
        "70B on 8 A100, all offloaded (13.57 s)",
        13.57,
        _TUNE,
        Alternative(text="256 tokens", setup=replace(_TUNE, sequence=256)),
        PAGEABLE,
    ),
    _theta("BERT-large on 1 A100, optimizer offloaded", 3.14, _THETA),
    _theta(
        "BERT-large on 8 A100, optimizer offloaded",
        18.3,
        replace(_THETA, devices=8, host_threads=1),
    ),
    row_of(
        "silver",
        "deepspeedai/DeepSpeed #1635",
        "all six channels of one socket; the step of ZeRO-3's optimizer on the host as stage 2's",
        "DeepSpeed's CPU step, 1.35B on a Xeon 4210R",
        22.88,
        HostPass(machine="rtx3090-xeon-4210r", devices=1, num_params=1.35e9),
    ),
    _sve(1, 0.125),
    _sve(2, 0.215),
    _sve(4, 0.487),
)  # fmt: skip
