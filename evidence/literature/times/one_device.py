"""Published times of one device, and of the same source's runs on a few; all entered blind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.paper.setups import Alternative, Measurement, Setup, row_of

ONE_DEVICE_GROUPS: Mapping[str, tuple[str, str]] = {
    "book-gpt2": (
        "A book's GPT-2 of 163M on 1 and 4 A100",
        "The memory of the A100 is not said. Two forward passes of an evaluation are in the time "
        "of every 15 steps, of 10 with a batch of 32 and of 5 on four devices. With a batch of 32 "
        "so is the start of an epoch, every 12 steps and every 3. The first row's norms and GELU "
        "are the book's own, of several kernels each. They are not predicted, and neither is what "
        "a vocabulary of an odd number costs the output layer.",
    ),
    "lecture-gpt2": (
        "A lecture's GPT-2 of 124M on one A100",
        "The memory of the A100 is not written down. Weights and gradients are float32 under "
        "automatic casts, which are not predicted.",
    ),
    "keras": (
        "BERT-base, Gemma-7B and Mistral-7B on one A100 40 GB, transformers' Trainer",
        "Adapters are on queries and values alone. The compiled row replays CUDA graphs, whose "
        "launches cost even less than predicted.",
    ),
    "engine-layers": (
        "Llama-2-7B and Llama-3-8B on one device, transformers' and Transformer Engine's layers",
        "The device is not named. The products of Transformer Engine's layers hold more than one "
        "matrix each, which is not predicted.",
    ),
    "torchtune-1b": (
        "LoRA of Llama-3.2-1B on 1 and 4 devices, torchtune",
        "Keys have no adapter. On four devices weights are sharded (FSDP2), where the set-up has "
        "all of them on each. Attention works on each packed text alone, where the set-up counts "
        "the whole triangle. Tokens that fill packs up are not counted by the source.",
    ),
    "bert-3090": (
        "BERT-large on one RTX 3090, transformers' Trainer",
        "The time of 128 steps holds the Trainer's start.",
    ),
    "thunder-7b": (
        "Llama-2-7B on one H100, Lightning Thunder",
        "The kind of the H100 is not said. Thunder's fusions are not torch.compile's.",
    ),
    "factory-7b": (
        "LoRA of Llama-2-7B on one A100, LLaMA-Factory",
        "Only the largest length is said, neither the texts nor whether they are padded to it. "
        "Adapters are on queries and values alone by the project's default.",
    ),
    "open-llama-7b": (
        "LoRA and QLoRA of OpenLLaMA-7B on one A100 40 GB",
        "Only the largest length is said, neither the mean nor whether texts are padded to it. "
        "What is recomputed is inferred from the source's peaks of memory.",
    ),
}
"""Titles and doubts, by group. No term or figure is fitted to these rows."""


def gpt2_config(
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    *,
    words: int = 50_304,
    positions: int = 1024,
    dropout: float = 0.0,
    tied: bool = True,
) -> Mapping[str, Any]:
    """Return the configuration of a GPT-2 of these shapes."""
    return {
        "model_type": "gpt2",
        "vocab_size": words,
        "n_positions": positions,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "resid_pdrop": dropout,
        "attn_pdrop": dropout,
        "tie_word_embeddings": tied,
    }


_BOOK = Setup(
    model="gpt2-163m",
    config=gpt2_config(words=50_257, dropout=0.1, tied=False),
    machine="dgx-a100-40",
    devices=1,
    strategy="ddp",
    batch_size=8,
    sequence=1024,
    attention="eager",
    dtype="float32",
    options={"optimizer": "foreach"},
)
_BOOK_FLASH = replace(
    _BOOK, attention="fused", dtype="bfloat16", options={"float32_master": False}
)
_BOOK_COMPILED = replace(
    _BOOK_FLASH, config=gpt2_config(dropout=0.1, tied=False), batch_size=32, kernels="compiled"
)


def _book(label: str, tokens: float, setup: Setup) -> Measurement:
    return row_of(
        "book-gpt2",
        "rasbt/LLMs-from-scratch, ch05/10_llm-training-speed/README.md",
        "A100 SXM of 40 GB; dropout of 0.1; PyTorch's AdamW, which is fused with bfloat16 weights",
        f"{label} ({tokens:,.0f} tokens/s)",
        setup.devices * setup.batch_size * setup.sequence / tokens,
        setup,
    )


_LECTURE = Setup(
    model="gpt2",
    config=gpt2_config(words=50_257),
    machine="dgx-a100-80",
    devices=1,
    strategy="ddp",
    batch_size=16,
    sequence=1024,
    attention="eager",
    options={"optimizer": "foreach"},
)
_LECTURE_COMPILED = replace(_LECTURE, kernels="compiled")


def _lecture(label: str, seconds: float, setup: Setup) -> Measurement:
    return row_of(
        "lecture-gpt2",
        "karpathy/build-nanogpt, commits of 2024-06-07 and 08; times from the chapters of its "
        "lecture",
        "A100 SXM of 80 GB; no dropout; 16-bit products under automatic casts, PyTorch's AdamW",
        f"GPT-2, {label}",
        seconds,
        setup,
    )


_KERAS = Setup(
    model="mistral-7b",
    machine="dgx-a100-40",
    devices=1,
    strategy="lora",
    batch_size=8,
    sequence=128,
    options={"lora_rank": 4, "lora_targets": "attention"},
)
_KERAS_BERT = replace(
    _KERAS,
    model="bert-base-cased",
    config={
        "model_type": "bert",
        "vocab_size": 28_996,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
    },
    strategy="ddp",
    batch_size=32,
    sequence=512,
    attention="eager",
    loss="classes",
    dtype="float32",
    options={"optimizer": "foreach"},
)


def _keras(label: str, milliseconds: float, setup: Setup) -> Measurement:
    return row_of(
        "keras",
        "keras-team/keras-io, templates/getting_started/benchmarks.md and "
        "haifeng-jin/keras-benchmarks 0.0.5: native PyTorch",
        "full sequences, as texts are padded to the largest length; transformers 4.38's kernels: "
        "SDPA in the decoders and eager attention in BERT; adapters' weights in bfloat16",
        label,
        milliseconds / 1e3,
        setup,
    )


_ENGINE = Setup(
    model="llama-2-7b",
    machine="hgx-h100",
    devices=1,
    strategy="ddp",
    batch_size=8,
    sequence=256,
    options={"float32_master": False},
)


def _engine(label: str, milliseconds: float, setup: Setup) -> Measurement:
    return row_of(
        "engine-layers",
        "NVIDIA/TransformerEngine, docs/examples/te_llama/"
        "tutorial_accelerate_hf_llama_with_te.ipynb",
        "H100 SXM; full sequences of 256 tokens, to which nearly every batch of eight is cut; all "
        "in bfloat16, PyTorch's fused AdamW, FlashAttention; fused norms, gates and rotary "
        "positions, and cuDNN's attention, where layers are Transformer Engine's",
        label,
        milliseconds / 1e3,
        setup,
    )


_OWN_LAYERS = replace(_ENGINE, kernels="liger", loss="float32", attention="native")

_TUNE = Setup(
    model="llama-3.2-1b",
    machine="dgx-a100-80",
    devices=1,
    strategy="lora",
    batch_size=6,
    sequence=2048,
    loss="parts",
    options={"lora_rank": 64},
)


def _tune(label: str, tokens: float, setup: Setup) -> Measurement:
    return row_of(
        "torchtune-1b",
        "odissei-benchmarks/torchtune-gpu-benchmark, README.md and configs",
        "SXM devices, told by the rates of their memory: 1600 and 2600 MHz of 80 GB, 1215 MHz of "
        "40 GB; packs of 2,048 tokens, nothing recomputed or compiled; adapters on all matrices",
        f"{label} ({tokens:,.0f} tokens/s a device)",
        setup.batch_size * setup.sequence / tokens,
        setup,
    )


_BERT_3090 = Setup(
    model="bert-large",
    machine="rtx3090-desktop",
    devices=1,
    strategy="ddp",
    batch_size=4,
    sequence=512,
    attention="eager",
    loss="classes",
    dtype="float32",
    options={"optimizer": "foreach"},
)


def _bert(label: str, rate: float, setup: Setup) -> Measurement:
    return row_of(
        "bert-3090",
        "SumanthRH/finetune-benchmarking, notes.md and its scripts",
        "the RTX 3090 that the notes speak of; transformers' eager kernels, plain float32 "
        "products",
        f"BERT-large, {label} ({rate:g} steps/s)",
        1.0 / rate,
        setup,
    )


_VERTEX = Setup(
    model="open-llama-7b",
    config={
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    machine="dgx-a100-40",
    devices=1,
    strategy="lora",
    batch_size=2,
    sequence=512,
    attention="eager",
    dtype="float16",
    options={"lora_rank": 16},
)
_VERTEX_4 = replace(_VERTEX, strategy="qlora", checkpointing=True)


def _vertex(label: str, rate: float, setup: Setup) -> Measurement:
    shorter = replace(setup, sequence=setup.sequence // 2)
    return row_of(
        "open-llama-7b",
        "GoogleCloudPlatform/vertex-ai-samples, "
        "pytorch_openllama_7b_finetune_benchmark_report.md of 2023",
        "sequences of the largest length; rank 16 on all matrices, as its count of parameters "
        "tells; eager attention; every layer recomputed with QLoRA, none with LoRA",
        f"{label}, {setup.sequence} tokens ({rate:g} sequences/s)",
        setup.batch_size / rate,
        setup,
        Alternative(text="sequences of half the length", setup=shorter),
    )


ONE_DEVICE: tuple[Measurement, ...] = (
    _book("float32, eager attention", 12_525, _BOOK),
    _book("bfloat16, FlashAttention", 91_901, _BOOK_FLASH),
    _book("compiled, batch 32", 142_156, _BOOK_COMPILED),
    _book("compiled, batch 32, 4 A100, DDP", 419_259, replace(_BOOK_COMPILED, devices=4)),
    _lecture("eager, 16-bit products", 0.300, _LECTURE),
    _lecture("compiled", 0.130, _LECTURE_COMPILED),
    _lecture("compiled, FlashAttention", 0.096, replace(_LECTURE_COMPILED, attention="fused")),
    _lecture("the same, 50,304 words, fused AdamW", 0.090,
             replace(_LECTURE_COMPILED, config=gpt2_config(), attention="fused", options={})),
    _keras("BERT-base, 2 classes, float32", 693.37, _KERAS_BERT),
    _keras("Gemma-7B, LoRA", 253.95, replace(_KERAS, model="gemma-7b")),
    _keras("Mistral-7B, LoRA", 217.56, _KERAS),
    _keras("Mistral-7B, LoRA, compiled", 176.04, replace(_KERAS, kernels="compiled")),
    _engine("Llama-2-7B, transformers' layers", 248, _ENGINE),
    _engine("Llama-2-7B, Transformer Engine's", 185, _OWN_LAYERS),
    _engine("Llama-3-8B, transformers' layers", 270, replace(_ENGINE, model="llama-3-8b")),
    _engine("Llama-3-8B, Transformer Engine's", 217, replace(_OWN_LAYERS, model="llama-3-8b")),
    _tune("1 A100 80 GB", 19_422, _TUNE),
    _tune("1 A100 40 GB", 17_500, replace(_TUNE, machine="dgx-a100-40")),
    _tune("1 H100", 36_668, replace(_TUNE, machine="hgx-h100")),
    _tune("4 H100", 33_650, replace(_TUNE, machine="hgx-h100", devices=4)),
    _bert("batch 4", 2.952, _BERT_3090),
    _bert("4 micro-batches of 1", 2.285, replace(_BERT_3090, batch_size=1, accumulation=4)),
    _bert("batch 4, recomputed", 2.245, replace(_BERT_3090, checkpointing=True)),
    row_of(
        "thunder-7b",
        "Lightning-AI/lightning-thunder, docs/source/intermediate/benchmarking.rst",
        "H100 SXM; all in bfloat16, PyTorch's fused AdamW, nothing recomputed; torch.compile's "
        "kernels for Thunder's",
        "Llama-2-7B, 1 x 4,096 tokens",
        0.38311,
        replace(_ENGINE, batch_size=1, sequence=4096, kernels="compiled"),
    ),
    row_of(
        "factory-7b",
        "unslothai/unsloth, README of February 2024: LLaMA-Factory's own comparison",
        "A100 SXM of 80 GB; full sequences of 1,024 tokens; FlashAttention, every layer "
        "recomputed",
        "Llama-2-7B, LoRA, FlashAttention (2,954 tokens/s)",
        4 * 1024 * 2 / 2954,
        replace(
            _ENGINE,
            machine="dgx-a100-80",
            strategy="lora",
            batch_size=4,
            sequence=1024,
            accumulation=2,
            checkpointing=True,
            options={"lora_rank": 8, "lora_targets": "attention"},
        ),
    ),
    _vertex("OpenLLaMA-7B, LoRA", 4.84, _VERTEX),
    _vertex("OpenLLaMA-7B, LoRA", 5.56, replace(_VERTEX, sequence=256)),
    _vertex("OpenLLaMA-7B, QLoRA", 2.88, _VERTEX_4),
    _vertex("OpenLLaMA-7B, QLoRA", 2.95, replace(_VERTEX_4, sequence=256)),
)  # fmt: skip
