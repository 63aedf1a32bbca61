"""Published times of FSDP on several hosts, and of one of them beside them.

All rows were entered before any of them was predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from experiments.paper.setups import PAGEABLE, Alternative, Measurement, Setup, row_of

SEVERAL_HOSTS_GROUPS: Mapping[str, tuple[str, str]] = {
    "atorch": (
        "Llama-2-7B under FSDP on 8 to 64 A100",
        "The rate is worked back into time by the source's own formula, which counts "
        "recomputation and no causal mask. FSDP has no type of its own there: it gathers and "
        "reduces in float32, and automatic casts follow. The set-up gathers in 16 bits.",
    ),
    "p4d": (
        "Llama-2-7B under FSDP on four hosts with 8 A100",
        "The log is of the first steps, of which the first is left out. Four adapters fit a "
        "p4d.24xlarge with 40 GB and a p4de.24xlarge with 80 GB.",
    ),
    "titan-a100": (
        "Llama 2 and 3 under FSDP2 on 64 A100",
        "The hosts and their network are not named. Whether norms are fused is not said.",
    ),
    "llama-405b": (
        "Llama-3.1-405B under FSDP with CPU offload on 64 H100",
        "The time is given to one digit. FSDP's first version has no prefetch in forward. The "
        "host has 208 threads, and neither it nor the network is named.",
    ),
}
"""Titles and doubts, by group. No term or figure is fitted to these rows."""

_ATORCH = Setup(
    model="llama-2-7b",
    machine="dgx-a100-80",
    devices=8,
    strategy="fsdp2",
    network="4x-roce-200",
    batch_size=4,
    sequence=4096,
    checkpointing=True,
    options={"float32_reduce": True, "optimizer": "foreach"},
)


def _atorch(hosts: int, teraflops: float) -> Measurement:
    """Return a row of the table of full training; the rate is of one device."""
    setup = replace(_ATORCH, hosts=hosts)
    tokens, width, inner = setup.batch_size * setup.sequence, 4096, 11_008
    layer = tokens * (8 * width**2 + 4 * setup.sequence * width + 6 * width * inner)
    flops = 32 * layer * 4 + 2 * tokens * width * 32_000 * 3
    return row_of(
        "atorch",
        "intelligent-machine-learning/dlrover, atorch/examples/llama2: README and scripts",
        "hosts as a DGX A100 with 800 Gb/s each; the script's 4,096 tokens, FlashAttention, eager "
        "kernels, PyTorch's default AdamW",
        f"7B on {8 * hosts} A100, FSDP ({teraflops:g} TFLOP/s)",
        flops / (teraflops * 1e12),
        setup,
    )


_P4D = Setup(
    model="llama-2-7b-50432",
    config={
        "model_type": "llama",
        "vocab_size": 50_432,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    machine="dgx-a100-40",
    devices=8,
    hosts=4,
    network="4x-efa-100",
    strategy="fsdp2",
    batch_size=2,
    sequence=4096,
    checkpointing=True,
    attention="eager",
    options={"optimizer": "foreach"},
)
_TITAN = Setup(
    model="llama-3-8b",
    machine="dgx-a100-80",
    devices=8,
    hosts=8,
    strategy="fsdp2",
    batch_size=1,
    sequence=8192,
    checkpointing="op",
    options={"float32_reduce": True, "optimizer": "foreach"},
)


def _titan(label: str, tokens: float, setup: Setup) -> Measurement:
    return row_of(
        "titan-a100",
        "pytorch/torchtitan, docs/performance.md of 2024",
        "tokens per second of one device; eight hosts as a DGX A100 with its network; the "
        "configurations' lengths, not compiled; every second layer where the table says layers",
        f"{label} ({tokens:,} tokens/s)",
        setup.batch_size * setup.sequence / tokens,
        setup,
        Alternative(text="400 Gb/s for each host", setup=replace(setup, network="4x-efa-100")),
    )


_405B = Setup(
    model="llama-3.1-405b",
    config={
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    machine="hgx-h100",
    devices=8,
    hosts=8,
    strategy="fsdp2_offload",
    batch_size=1,
    sequence=4096,
    checkpointing=True,
    binds_cores=False,
    host_threads=26,
    options={"float32_master": False, "optimizer": "fused"},
)

SEVERAL_HOSTS: tuple[Measurement, ...] = (
    _atorch(1, 204.67),
    _atorch(2, 197.22),
    _atorch(4, 196.04),
    _atorch(8, 195.14),
    row_of(
        "p4d",
        "aws-samples/awsome-distributed-training, 3.test_cases/10.FSDP: README's log and scripts",
        "p4d.24xlarge, 400 Gb/s for each host; the script's two sequences of 4,096 tokens a "
        "device, every layer recomputed, transformers' eager attention, PyTorch's default AdamW",
        "7B on 32 A100, FSDP (6.05 s)",
        6.05,
        _P4D,
        Alternative(text="A100 of 80 GB", setup=replace(_P4D, machine="dgx-a100-80")),
        Alternative(text="fused attention", setup=replace(_P4D, attention="fused")),
    ),
    _titan("Llama-3-8B, every second layer recomputed", 2904, replace(_TITAN, checkpointing=0.5)),
    _titan("Llama-3-8B, recomputed by operation", 2973, _TITAN),
    _titan(
        "Llama-3-70B, recomputed",
        331,
        replace(_TITAN, model="llama-3.1-70b", checkpointing=True),
    ),
    _titan(
        "Llama-2-13B, nothing recomputed",
        2162,
        replace(_TITAN, model="llama-2-13b", batch_size=2, sequence=4096, checkpointing=False),
    ),
    row_of(
        "llama-405b",
        "LambdaLabsML/distributed-training-guide, 05-training-llama-405b, README of October 2024",
        "hosts as a DGX H100 with its network; 26 threads a process; all in bfloat16, every layer "
        "recomputed, FlashAttention, eager kernels; PyTorch's fused AdamW on the CPU",
        "405B on 64 H100, all offloaded (about 30 s)",
        30.0,
        _405B,
        PAGEABLE,
    ),
)  # fmt: skip
