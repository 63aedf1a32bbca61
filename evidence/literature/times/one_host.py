"""Published times of the devices of one host, data parallel or sharded; all entered blind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evidence.literature.times.one_device import gpt2_config
from experiments.paper.setups import Alternative, Measurement, Setup, row_of

ONE_HOST_GROUPS: Mapping[str, tuple[str, str]] = {
    "llm-c": (
        "GPT-2 of 124M to 1.6B on 8 A100 and 8 H100, llm.c",
        "Its kernels are its own, in CUDA, and its host is C: it launches faster than Python. "
        "Times are rounded to two digits.",
    ),
    "litgpt-fsdp": (
        "TinyLlama-1.1B under FSDP on 8 A100 40 GB, litgpt",
        "The FSDP is PyTorch's first, in place of FSDP2. Thunder's fusions are not "
        "torch.compile's. Its own modules have queries, keys and values in one matrix.",
    ),
    "flash-training": (
        "GPT-3's smaller models on 8 A100 80 GB, flash-attn's training code",
        "Weights and gradients are float32 under automatic casts, which are not predicted: "
        "averages have twice the bytes. The kernels of dropout, sums and norms are fused ones, "
        "launched from Python.",
    ),
    "encoder-ddp": (
        "An encoder of 163M on 8 H100, DDP in float32",
        "The layers are PyTorch's own; BERT's stand for them, with an output layer of its own.",
    ),
    "qwen3-ddp": (
        "Qwen3-0.6B on 4 H200, 4 H100 and 4 L40S, DDP",
        "Texts of a wiki are packed, and attention works on each alone, where the set-up counts "
        "the whole triangle of a pack. Their lengths are not said.",
    ),
    "titan-gpt2": (
        "A Llama of GPT-2's size under FSDP2 on 4 H100",
        "Its shapes are those whose number of operations gives the printed utilisation. What is "
        "recomputed is not said.",
    ),
    "speedrun-4090": (
        "GPT-2 of 124M on 2 RTX 4090, DDP",
        "Neither the host nor the slots are said. Weights and gradients are float32 under "
        "automatic casts, which are not predicted: averages have twice the bytes. A step waits "
        "for its batch to be read.",
    ),
}
"""Titles and doubts, by group. No term or figure is fitted to these rows."""


_C = Setup(
    model="gpt2",
    config=gpt2_config(),
    machine="dgx-a100-80",
    devices=8,
    strategy="published_on_device",
    batch_size=64,
    sequence=1024,
    kernels="compiled",
    attention="native",
)
_C_MEDIUM = replace(_C, model="gpt2-medium", config=gpt2_config(1024, 24, 16))
_C_LARGE = replace(
    _C,
    model="gpt2-large",
    config=gpt2_config(1280, 36, 20),
    batch_size=32,
    accumulation=2,
)
_C_XL = replace(
    _C,
    model="gpt2-xl",
    config=gpt2_config(1600, 48, 25),
    machine="hgx-h100",
    batch_size=16,
    accumulation=8,
)
_SCRIPTS = "karpathy/llm.c, scripts/run_gpt2_*.sh"
_RECORD = "KellerJordan/modded-nanogpt, records/track_1_short/2024-10-13_llmc"


def _c(label: str, seconds: float, setup: Setup, source: str = _SCRIPTS) -> Measurement:
    return row_of(
        "llm-c",
        source,
        "SXM; weights and gradients in bfloat16 with float32 masters, ZeRO-1; fused kernels as "
        "torch.compile's, cuDNN's attention, nothing recomputed",
        label,
        seconds,
        setup,
    )


_LIT = Setup(
    model="tinyllama-1.1b",
    machine="dgx-a100-40",
    devices=8,
    strategy="fsdp2",
    batch_size=4,
    sequence=2048,
    options={"float32_master": False},
)


def _lit(label: str, milliseconds: float, setup: Setup) -> Measurement:
    return row_of(
        "litgpt-fsdp",
        "Lightning-AI/litgpt, extensions/thunder/README.md and pretrain.py of May 2024",
        "all in bfloat16, PyTorch's fused AdamW, a micro-batch a step; torch.compile's kernels "
        "for Thunder's",
        label,
        milliseconds / 1e3,
        setup,
    )


def _pile(width: int, layers: int, heads: int) -> Mapping[str, Any]:
    return gpt2_config(width, layers, heads, words=50_264, positions=2048, dropout=0.1)


_FLASH = Setup(
    model="gpt3-125m",
    config=_pile(768, 12, 12),
    machine="dgx-a100-80",
    devices=8,
    strategy="ddp",
    batch_size=32,
    sequence=2048,
    kernels="compiled",
)
_FLASH_1B = replace(
    _FLASH,
    model="gpt3-1.3b",
    config=_pile(2048, 24, 16),
    strategy="published_on_device",
    batch_size=8,
    accumulation=8,
)
_FLASH_3B = replace(
    _FLASH_1B,
    model="gpt3-2.7b",
    config=_pile(2560, 32, 20),
    batch_size=4,
    accumulation=16,
)


def _flash(label: str, tokens: float, setup: Setup) -> Measurement:
    step = setup.devices * setup.batch_size * setup.sequence * setup.accumulation
    return row_of(
        "flash-training",
        "Dao-AILab/flash-attention, training/README.md and its configurations",
        "the configurations' micro-batches for 80 GB; dropout of 0.1, GPT-2's default; fused "
        "kernels as torch.compile's, FlashAttention; a fused AdamW, ZeRO-1 from 1.3B on",
        f"{label} ({tokens / 1e3:,.0f}k tokens/s)",
        step / tokens,
        setup,
    )


_QWEN = Setup(
    model="qwen3-0.6b",
    machine="hgx-h200",
    devices=4,
    strategy="ddp",
    batch_size=32,
    sequence=4096,
    checkpointing=True,
    kernels="liger",
    options={"float32_master": False},
)


def _qwen(label: str, tokens: float, setup: Setup) -> Measurement:
    short = replace(setup, batch_size=8 * setup.batch_size, sequence=setup.sequence // 8)
    step = setup.devices * setup.batch_size * setup.sequence * setup.accumulation
    return row_of(
        "qwen3-ddp",
        "Scicom-AI-Enterprise-Organization/small-ablation, simple-throughput-multigpus",
        "SXM; all in bfloat16, PyTorch's fused AdamW; packs of 4,096 tokens as one text each; "
        "tokens of all devices",
        f"Qwen3-0.6B, {label} ({tokens / 1e3:,.0f}k tokens/s)",
        step / tokens,
        setup,
        Alternative(text="texts of 512 tokens", setup=short),
    )


_TITAN = Setup(
    model="llama-gpt2",
    config={
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "tie_word_embeddings": False,
    },
    machine="grand-teton-h100",
    devices=4,
    strategy="fsdp2",
    batch_size=5,
    sequence=8192,
    checkpointing="op",
    kernels="compiled",
    loss="float32",
    options={"float32_reduce": True, "optimizer": "foreach"},
)

ONE_HOST: tuple[Measurement, ...] = (
    _c("GPT-2 124M, 8 A100", 0.300, _C),
    _c("GPT-2 350M, 8 A100", 0.820, _C_MEDIUM),
    _c("GPT-2 774M, 8 A100", 1.7, _C_LARGE),
    _c("GPT-2 1.6B, 8 H100", 2.80, _C_XL),
    _c("GPT-2 124M, 8 H100", 0.140, replace(_C, machine="hgx-h100"), _RECORD),
    _lit("TinyLlama-1.1B, eager", 456.57, _LIT),
    _lit("TinyLlama-1.1B, Thunder", 333.56, replace(_LIT, kernels="compiled")),
    _flash("GPT-3 125M", 1_310_000, _FLASH),
    _flash("GPT-3 355M", 503_000,
           replace(_FLASH, model="gpt3-355m", config=_pile(1024, 24, 16))),
    _flash("GPT-3 1.3B", 169_000, _FLASH_1B),
    _flash("GPT-3 2.7B", 85_000, _FLASH_3B),
    row_of(
        "encoder-ddp",
        "drmysore/nebius-h100-8gpu-benchmark, exercise2/scripts/benchmark.py and results",
        "float32 with plain products, SDPA's fused kernel without a causal mask, dropout of 0.1, "
        "PyTorch's AdamW",
        "encoder of 163M (41,480 tokens/s a device)",
        8 * 512 / 41_480.2,
        Setup(
            model="encoder-163m",
            config={
                "model_type": "bert",
                "vocab_size": 50_257,
                "hidden_size": 768,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "intermediate_size": 3072,
                "max_position_embeddings": 512,
                "tie_word_embeddings": False,
            },
            machine="hgx-h100",
            devices=8,
            strategy="ddp",
            batch_size=8,
            sequence=512,
            dtype="float32",
            options={"optimizer": "foreach"},
        ),
    ),
    _qwen("4 H200", 300_000, _QWEN),
    _qwen("4 H100", 292_000, replace(_QWEN, machine="hgx-h100", batch_size=8, accumulation=4)),
    _qwen("4 L40S", 90_000, replace(_QWEN, machine="l40s-server", batch_size=16, accumulation=2)),
    row_of(
        "titan-gpt2",
        "pytorch/torchtitan #533, its log without the change",
        "H100 of 95 GiB as torchtitan's own tables have them; layers compiled, float32 loss and "
        "reductions, recomputation by operation, as torchtitan's Llama-3-8B has it",
        "5 x 8,192 tokens (112,000 tokens/s a device)",
        5 * 8192 / 112_000,
        _TITAN,
        Alternative(text="nothing recomputed", setup=replace(_TITAN, checkpointing=False)),
    ),
    row_of(
        "speedrun-4090",
        "tyler-romero/nanogpt-speedrun, logs/4c627c0d-029c-4f8a-bd18-40f99b43b22e.txt",
        "a server of RTX 4090; no dropout; biases and norms' weights as GPT-2 has them; "
        "torch.compile, SDPA's fused kernel, PyTorch's AdamW",
        "GPT-2 124M, 4 micro-batches of 32",
        1.19134,
        Setup(
            model="gpt2",
            config=gpt2_config(),
            machine="rtx4090-server",
            devices=2,
            strategy="ddp",
            batch_size=32,
            sequence=1024,
            accumulation=4,
            kernels="compiled",
            options={"optimizer": "foreach"},
        ),
    ),
)  # fmt: skip
