"""Published times of fine-tuning on one named GPU, and of the same source's runs on a few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from experiments.paper.setups import Alternative, Measurement, Setup

FINE_TUNING_GROUPS: Mapping[str, tuple[str, str]] = {
    "trainer-8k": (
        "Llama-3.1-8B on one H100, A100 and RTX PRO 6000",
        "LoRA's adapters are on queries, keys and values. A step of LoRA's row is a micro-batch, "
        "which the table does not say. Deterministic kernels are asked for, with which PyTorch "
        "also fills every new tensor: neither is predicted. SXM or PCIe is not said, and no host "
        "is named.",
    ),
    "recipes": (
        "torchtune on one A100 and one RTX A6000",
        "LoRA's rank and recomputation are not said. The speed that is printed for the A6000 is "
        "1.5 times what its peak allows, so that the device can hardly be the RTX A6000. The host "
        "is not named.",
    ),
    "qwen-1": (
        "Qwen on 1 and 2 A100, its authors' script",
        "Qwen1.5's layers stand for Qwen's, whose width of attention and vocabulary are the same. "
        "Its script trains all weights under ZeRO-3, on one device too. "
        "The kernels of norms and rotary positions may be flash-attn's. One step is taken to be "
        "eight micro-batches.",
    ),
    "peft": (
        "Llama-3.2-3B on one L40S, PEFT's comparison",
        "Sequences are of different lengths, sorted by length into batches; the mean is taken for "
        "all. Adapters are on queries and values alone. A run's time is divided by its steps.",
    ),
    "fsdp-qlora": (
        "LoRA and QLoRA on 2 RTX 3090 and 2 RTX 4090, Llama-2-7B",
        "Attention's output layer has no adapter. The 3090s are limited to 280 W, and one of them "
        "is in a narrower slot. Copies between two GeForce go through the host.",
    ),
    "automodel": (
        "LoRA on one H100, NeMo AutoModel",
        "Adapters have kernels of their own, in Triton, and layers are Transformer Engine's. What "
        "it counts into a step is not said.",
    ),
    "vectorlm": (
        "Llama-3-8B on 1 and 4 A100, FSDP",
        "The page gives tokens per second of micro-batches; one step in four has the optimizer, "
        "and the mean is taken. FSDP runs on one device too.",
    ),
    "trainer-v100": (
        "BERT-large on one V100 16 GB, transformers' Trainer",
        "Automatic casts are not predicted. The optimizer is transformers' own loop. The host is "
        "not named. The rows were entered with the masked language model's head, and have the "
        "source's two classes since a set-up can say so.",
    ),
    "squad-v100": (
        "BERT-large on one V100 32 GB, PyTorch",
        "apex's fused norms and its casts are not predicted. The rows were entered with the "
        "masked language model's head, and have none since a set-up can say so: the task has two "
        "numbers for a token.",
    ),
}
"""Titles and doubts, by group. No term or figure is fitted to these rows."""

_FREE = Alternative(text="all but products is free", values={"device.bandwidth": 1e18})


def _row(
    group: str,
    source: str,
    assumption: str,
    label: str,
    seconds: float,
    setup: Setup,
    *more: Alternative,
) -> Measurement:
    return Measurement(
        label=label,
        seconds=seconds,
        quantity="step",
        setup=setup,
        group=group,
        source=source,
        assumption=assumption,
        alternatives=(_FREE, *more),
    )


LONG = Setup(
    model="llama-3.1-8b",
    machine="hgx-h100",
    devices=1,
    strategy="ddp",
    batch_size=2,
    sequence=8192,
    checkpointing=True,
    options={"optimizer": "foreach", "float32_master": False},
)


def _long(label: str, seconds: float, setup: Setup) -> Measurement:
    return _row(
        "trainer-8k",
        "ljm565/universal-llm-trainer, docs/gpu_test.md and its configurations",
        "SXM; weights, gradients and moments in bfloat16; full sequences of 8,192 tokens, every "
        "layer recomputed, SDPA's fused kernel, transformers' eager kernels",
        label,
        seconds,
        setup,
    )


RECIPE = Setup(
    model="llama-3.2-3b",
    machine="dgx-a100-80",
    devices=1,
    strategy="ddp",
    batch_size=2,
    sequence=4096,
    options={"float32_master": False},
)
_A6000 = replace(
    RECIPE,
    model="llama-3.1-8b",
    machine="rtx-a6000-server",
    strategy="lora",
    sequence=2048,
    checkpointing=True,
    kernels="compiled",
    options={"lora_rank": 8},
)


def _recipe(label: str, tokens: float, setup: Setup, *more: Alternative) -> Measurement:
    return _row(
        "recipes",
        "pytorch/torchtune, README: memory and training speed",
        "packed sequences; PyTorch's fused AdamW, all in bfloat16; with LoRA rank 8 on all "
        "matrices, every layer recomputed",
        f"torchtune, {label} ({tokens:,.0f} tokens/s)",
        setup.batch_size * setup.sequence / tokens,
        setup,
        *more,
    )


_QWEN = Setup(
    model="qwen1.5-7b",
    machine="dgx-a100-80",
    devices=1,
    strategy="lora",
    batch_size=1,
    sequence=1024,
    accumulation=8,
    checkpointing=True,
    options={"lora_rank": 64},
)
_QWEN_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "tie_word_embeddings": False,
}
_QWEN_SMALL = replace(_QWEN, model="qwen-1.8b", config=_QWEN_CONFIG)
_QWEN_WHOLE = replace(
    _QWEN_SMALL, strategy="deepspeed_zero3", options={"bucket_elements": 2048**2}
)  # fmt: skip


def _qwen(label: str, seconds: float, setup: Setup) -> Measurement:
    return _row(
        "qwen-1",
        "QwenLM/Qwen, README: profiling of memory and speed of its fine-tuning",
        "A100 SXM of 80 GB; rank 64 on all matrices, every layer recomputed, FlashAttention, "
        "eight micro-batches of one sequence",
        f"{label}, {setup.sequence:,} tokens",
        seconds,
        setup,
    )


_PEFT = Setup(
    model="llama-3.2-3b",
    machine="l40s-server",
    devices=1,
    strategy="lora",
    batch_size=4,
    sequence=210,
    options={"lora_rank": 32, "lora_targets": "attention"},
)


def _peft(label: str, seconds: float, setup: Setup) -> Measurement:
    return _row(
        "peft",
        "huggingface/peft, method_comparison/MetaMathQA/results",
        "batches of 4 sequences of 210 tokens, as the run's tokens over its sequences; bfloat16, "
        "of full training with its moments, as the 8 bytes of an element show that it holds; "
        "SDPA, nothing recomputed",
        label,
        seconds / 5000,
        setup,
    )


_PAIR = Setup(
    model="llama-2-7b",
    machine="rtx3090-server",
    devices=2,
    strategy="lora",
    batch_size=4,
    sequence=2048,
    checkpointing=True,
    options={"lora_rank": 64},
)


def _pair(label: str, seconds: float, setup: Setup) -> Measurement:
    return _row(
        "fsdp-qlora",
        "AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md",
        "DDP of 1,024 sequences of 2,048 tokens; every layer recomputed, SDPA's fused kernel; a "
        "server of the devices",
        label,
        seconds * 2 * setup.batch_size / 1024,
        setup,
    )


_AUTOMODEL = Setup(
    model="llama-3-8b",
    machine="hgx-h100",
    devices=1,
    strategy="lora",
    batch_size=2,
    sequence=4096,
    accumulation=16,
    kernels="liger",
)


def _automodel(label: str, seconds: float, setup: Setup) -> Measurement:
    return _row(
        "automodel",
        "NVIDIA-NeMo/Automodel, docs/performance-summary.mdx",
        "H100 SXM; rank 16 on all matrices, nothing recomputed, fused elementwise kernels, 32 "
        "sequences of 4,096 tokens a step",
        label,
        seconds,
        setup,
    )


_VECTOR = Setup(
    model="llama-3-8b",
    machine="dgx-a100-80",
    devices=1,
    strategy="ddp",
    batch_size=8,
    sequence=2048,
    accumulation=4,
    checkpointing=True,
    options={"optimizer": "foreach", "float32_master": False},
)
_VECTOR_4 = replace(_VECTOR, devices=4, strategy="fsdp2")


def _vector(label: str, tokens: float, setup: Setup) -> Measurement:
    return _row(
        "vectorlm",
        "VectorInstitute/vectorlm, docs/reference_throughput.md",
        "A100 SXM of 80 GB; all in bfloat16, FlashAttention, every layer recomputed, four "
        "micro-batches a step; tokens of all devices",
        f"vectorlm, {label} ({tokens:,.0f} tokens/s)",
        4 * setup.devices * setup.batch_size * setup.sequence / tokens,
        setup,
    )


_V100 = Setup(
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
_V100_1 = replace(_V100, batch_size=1, accumulation=4)


def _v100(label: str, rate: float, setup: Setup) -> Measurement:
    return _row(
        "trainer-v100",
        "huggingface/transformers, docs/source/en/perf_train_gpu_one.mdx",
        "V100 SXM2; sequences of 512 tokens, transformers' eager kernels, plain float32 products",
        f"BERT-large, {label} ({rate:g} sequences/s)",
        4 / rate,
        setup,
    )


def _squad(batch: int, rate: float) -> Measurement:
    return _row(
        "squad-v100",
        "deepspeedai/DeepSpeed, docs/_posts/2020-05-28-fastest-bert-training.md",
        "V100 SXM2; sequences of 384 tokens, eager kernels, weights in float16, apex's fused Adam",
        f"BERT-large on SQuAD, batch {batch} ({rate:g} sequences/s)",
        batch / rate,
        replace(_V100, batch_size=batch, sequence=384, dtype="float16", options={}),
    )


FINE_TUNING: tuple[Measurement, ...] = (
    _long("Llama-3.1-8B, 1 H100", 4.7, LONG),
    _long("Llama-3.1-8B, 1 RTX PRO 6000", 10.9, replace(LONG, machine="rtx-pro-6000-server")),
    _long("Llama-3.1-8B, LoRA, 1 A100", 32 * 11.5,
          replace(LONG, machine="dgx-a100-80", strategy="lora", accumulation=32,
                  options={"lora_rank": 8, "lora_targets": "attention"})),
    _recipe("Llama-3.2-3B on 1 A100", 7075, RECIPE),
    _recipe("Llama-3.1-8B, LoRA, 1 A6000", 4699, _A6000,
            Alternative(text="RTX 6000 Ada",
                        setup=replace(_A6000, machine="rtx-6000-ada-server"))),
    _qwen("Qwen-7B, LoRA", 2.8, _QWEN),
    _qwen("Qwen-7B, LoRA", 21.3, replace(_QWEN, sequence=8192)),
    _qwen("Qwen-14B, LoRA", 8.4, replace(_QWEN, model="qwen1.5-14b", sequence=2048)),
    _qwen("Qwen-1.8B, LoRA", 1.1, _QWEN_SMALL),
    _qwen("Qwen-1.8B, LoRA", 6.8, replace(_QWEN_SMALL, sequence=8192)),
    _qwen("Qwen-1.8B, QLoRA", 6.5, replace(_QWEN_SMALL, strategy="qlora", sequence=8192)),
    _qwen("Qwen-1.8B", 2.2, replace(_QWEN_WHOLE, sequence=512)),
    _qwen("Qwen-1.8B", 2.3, replace(_QWEN_WHOLE, sequence=2048)),
    _qwen("Qwen-1.8B", 5.6, replace(_QWEN_WHOLE, sequence=8192)),
    _qwen("Qwen-7B on 2 A100", 4.5,
          replace(_QWEN, devices=2, strategy="deepspeed_zero3",
                  options={"bucket_elements": 4096**2})),
    _peft("Llama-3.2-3B, LoRA, 1 L40S", 585.19, _PEFT),
    _peft("Llama-3.2-3B, 1 L40S", 1812.97,
          replace(_PEFT, strategy="ddp",
                  options={"optimizer": "foreach", "float32_master": False})),
    _pair("Llama-2-7B, LoRA, 2 RTX 3090", 881, _PAIR),
    _pair("Llama-2-7B, QLoRA, 2 RTX 3090", 875, replace(_PAIR, strategy="qlora", batch_size=8)),
    _pair("Llama-2-7B, LoRA, 2 RTX 4090", 437, replace(_PAIR, machine="rtx4090-server")),
    _pair("Llama-2-7B, QLoRA, 2 RTX 4090", 450,
          replace(_PAIR, machine="rtx4090-server", strategy="qlora", batch_size=8)),
    _automodel("Llama-3-8B, LoRA, 1 H100", 10.51, _AUTOMODEL),
    _automodel("Qwen2.5-7B, LoRA, 1 H100", 9.29, replace(_AUTOMODEL, model="qwen2.5-7b")),
    _vector("1 A100", 3550.48, _VECTOR),
    _vector("LoRA, 1 A100", 4079.28, replace(_VECTOR, strategy="lora", options={"lora_rank": 8})),
    _vector("4 A100", 12_688.44, _VECTOR_4),
    _vector("4 A100, 8,192 tokens", 11_463.46, replace(_VECTOR_4, batch_size=2, sequence=8192)),
    _v100("float32", 8.86, _V100),
    _v100("float32, 4 micro-batches", 7.75, _V100_1),
    _v100("float32, 4 micro-batches, recomputed", 5.99, replace(_V100_1, checkpointing=True)),
    _v100("float16", 18.64, replace(_V100, dtype="float16")),
    _squad(4, 37.78),
    _squad(12, 49.32),
)  # fmt: skip
