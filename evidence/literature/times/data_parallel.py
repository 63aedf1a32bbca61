"""Published times of data parallelism without offload: ZeRO-1, DDP and sharded weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from evidence.literature.times.zero3_runs import gpt, other_recomputation
from experiments.paper.setups import Alternative, Measurement, Setup

DATA_PARALLEL_GROUPS: Mapping[str, tuple[str, str]] = {
    "internlm": (
        "InternLM-7B under ZeRO-1 on 8 to 1,024 A100, RoCE of 400 Gb/s for a host",
        "From 8 to 1,024 devices the measured speed of each falls by 44 %, with the same batch. "
        "The fused kernels are flash-attn's and apex's. With more devices states may be shared "
        "among some of them only.",
    ),
    "tinyllama": (
        "TinyLlama-1.1B on 16 A100 40 GB",
        "The network is not named. The fused kernels are flash-attn's.",
    ),
    "bert-pretraining": (
        "BERT-large's pretraining on V100 and A100, DDP with LAMB",
        "The output layer works on the masked tokens alone, about a sixth, where the set-up "
        "counts all of them. Neither LAMB's norms nor dropout's kernels are counted, and apex's "
        "norms are fused. More tokens pass in a second with 512 of them than with 128, as only "
        "a fused kernel of attention does it, or sequences without their padding.",
    ),
    "few-h100": (
        "ZeRO-3 and FSDP on 4 and 8 devices: H100, A100 and MI300X",
        "The rows of MI300X are the slower half of a comparison of how collectives copy: these "
        "use the compute units, which backward needs too, and this is not modelled. Of the H100 "
        "neither the kind nor the host is said, nor which layers the 32 are. With four A100 what "
        "is recomputed is not said; the batch would not fit without.",
    ),
    "nemo": (
        "Llama-3-8B's fine-tuning on 8 and 32 H100, NeMo",
        "Short sequences are packed into those of 4,096 tokens, and attention works on each "
        "alone: the set-up counts the whole triangle. LoRA's one adapter for queries, keys and "
        "values is three here, and there is one for the output; its rank is the recipe's default.",
    ),
    "partial": (
        "Llama-3-8B under FSDP2 on 8 H100 and 8 MI300X, compiled",
        "The power limit of the H100 is not said.",
    ),
}
"""Titles and doubts, by group. No term or figure is fitted to these rows."""

_FREE = Alternative(text="all but products is free", values={"device.bandwidth": 1e18})

_INTERN = Setup(
    model="internlm-7b",
    config={
        "model_type": "llama",
        "vocab_size": 103_168,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    machine="dgx-a100-80",
    devices=8,
    network="4x-roce-100",
    strategy="published_on_device",
    batch_size=2,
    sequence=2048,
    accumulation=4,
    kernels="liger",
)
_BERT = Setup(
    model="bert-large",
    machine="dgx-a100-80",
    devices=8,
    strategy="ddp",
    batch_size=256,
    sequence=128,
    attention="eager",
    dtype="float16",
)
_NEMO = Setup(
    model="llama-3-8b",
    machine="hgx-h100",
    devices=8,
    strategy="published_on_device",
    batch_size=1,
    sequence=4096,
    accumulation=4,
    kernels="liger",
    attention="native",
)
_PARTIAL = Setup(
    model="llama-3-8b",
    machine="hgx-h100",
    devices=8,
    strategy="fsdp2",
    batch_size=1,
    sequence=8192,
    checkpointing="op",
    kernels="compiled",
    loss="float32",
    options={"float32_reduce": True, "optimizer": "foreach"},
)
_MI300X = Setup(
    model="gpt-10b",
    config=gpt(4096, 48, 32),
    machine="mi300x-platform",
    devices=8,
    strategy="deepspeed_zero3",
    batch_size=1,
    sequence=2048,
    attention="eager",
)


def _intern(hosts: int, tokens: float) -> Measurement:
    return Measurement(
        label=f"InternLM-7B on {8 * hosts:,} A100 ({tokens:,.0f} tokens/s)",
        seconds=4 * 2 * 2048 / tokens,
        quantity="step",
        setup=replace(_INTERN, hosts=hosts),
        group="internlm",
        source="InternLM/InternLM, doc/en/train_performance.md",
        assumption="ZeRO-1 over all devices, four micro-batches of 2 sequences of 2,048 tokens, "
        "nothing recomputed; a DGX but for its network",
        alternatives=(
            _FREE,
            Alternative(
                text="eager kernels", setup=replace(_INTERN, hosts=hosts, kernels="eager")
            ),
        ),
    )


def _bert(label: str, rate: float, setup: Setup) -> Measurement:
    sequences = setup.hosts * setup.devices * setup.batch_size * setup.accumulation
    return Measurement(
        label=f"BERT-large on {label} ({rate:,.0f} sequences/s)",
        seconds=sequences / rate,
        quantity="step",
        setup=setup,
        group="bert-pretraining",
        source="NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT/README.md",
        assumption="eager kernels, weights and gradients in float16 but in the row of float32; "
        "AdamW's kernel for LAMB's; a DGX",
        alternatives=(
            _FREE,
            Alternative(text="a fused attention", setup=replace(setup, attention="fused")),
        ),
    )


def _few(label: str, seconds: float, setup: Setup, source: str, assumption: str) -> Measurement:
    return Measurement(
        label=label,
        seconds=seconds,
        quantity="step",
        setup=setup,
        group="few-h100",
        source=source,
        assumption=assumption,
        alternatives=(other_recomputation(setup),),
    )


def _sdma(label: str, milliseconds: float, setup: Setup) -> Measurement:
    return _few(
        label,
        milliseconds / 1e3,
        setup,
        "deepspeedai/DeepSpeed, examples/sdma_allgather",
        "Azure's host; collectives by kernels; eager attention, nothing recomputed",
    )


def _nemo(label: str, seconds: float, setup: Setup) -> Measurement:
    return Measurement(
        label=f"NeMo, {label}",
        seconds=seconds,
        quantity="step",
        setup=setup,
        group="nemo",
        source="NVIDIA/dgxc-benchmarking, ft_llama3/README_8b.md",
        assumption="a DGX H100; ZeRO-1, fused elementwise kernels, cuDNN's attention, nothing "
        "recomputed, four micro-batches of one sequence of 4,096 tokens",
        alternatives=(_FREE,),
    )


def _partial(label: str, tokens: float, setup: Setup) -> Measurement:
    return Measurement(
        label=f"{label} ({tokens:,.0f} tokens/s)",
        seconds=8192 / tokens,
        quantity="step",
        setup=setup,
        group="partial",
        source="pytorch/ao, torchao/float8/README.md: its baselines in bfloat16",
        assumption="tokens per second of one device; one sequence of 8,192 tokens on each, "
        "recomputed by operation, gradients reduced in float32",
        alternatives=(
            Alternative(text="nothing recomputed", setup=replace(setup, checkpointing=False)),
        ),
    )


DATA_PARALLEL: tuple[Measurement, ...] = (
    _intern(1, 4062),
    _intern(8, 3690),
    _intern(32, 3209),
    _intern(128, 2271),
    Measurement(
        label="TinyLlama-1.1B on 16 A100 (24,000 tokens/s)",
        seconds=8 * 8 * 2048 / 24_000,
        quantity="step",
        setup=Setup(model="tinyllama-1.1b", machine="dgx-a100-40", devices=8, hosts=2,
                    strategy="fsdp2", batch_size=8, sequence=2048, accumulation=8,
                    kernels="liger"),
        group="tinyllama",
        source="jzhang38/TinyLlama, README and pretrain/tinyllama.py",
        assumption="two hosts as a DGX A100; eight micro-batches of 8 sequences of 2,048 tokens, "
        "nothing recomputed",
        alternatives=(_FREE,),
    ),
    _bert("1 A100, 128 tokens", 580, replace(_BERT, devices=1, accumulation=32)),
    _bert("256 A100, 128 tokens", 138_294, replace(_BERT, hosts=32)),
    _bert("256 A100, 512 tokens", 49_663,
          replace(_BERT, hosts=32, batch_size=32, sequence=512, accumulation=4)),
    _bert("1 V100, 128 tokens, float32", 50,
          replace(_BERT, machine="dgx-1", devices=1, batch_size=32, accumulation=128,
                  dtype="float32")),
    _bert("8 V100, 512 tokens", 586,
          replace(_BERT, machine="dgx-1", batch_size=8, sequence=512, accumulation=256)),
    _sdma("GPT of 48 layers on 8 MI300X", 697.7, _MI300X),
    _sdma("Qwen3-32B on 8 MI300X", 1402.5,
          replace(_MI300X, model="qwen3-32b", config=None, sequence=1024)),
    _few("GPT of 32 layers on 4 H100", 0.6016,
         Setup(model="gpt-6.7b", config=gpt(4096, 32, 32), machine="hgx-h100", devices=4,
               strategy="deepspeed_zero3", batch_size=1, sequence=512, checkpointing=True,
               attention="eager"),
         "deepspeedai/DeepSpeedExamples, training/bf16_master_weight",
         "H100 SXM; GPT-2's layers, eager, every one recomputed"),
    _few("Granite-7B on 4 A100, FSDP", 10.4,
         Setup(model="llama-2-7b", machine="dgx-a100-80", devices=4, strategy="fsdp2",
               batch_size=8, sequence=4096, checkpointing=True),
         "huggingface/blog, deepspeed-to-fsdp-and-back.md",
         "Llama-2-7B's shapes, SDPA's fused kernel, 8 sequences of 4,096 tokens a device"),
    _nemo("Llama-3-8B on 8 H100", 1.32, _NEMO),
    _nemo("Llama-3-8B on 32 H100", 1.33, replace(_NEMO, hosts=4)),
    _nemo("Llama-3-8B, LoRA, 8 H100", 0.92,
          replace(_NEMO, strategy="lora", options={"lora_rank": 8, "lora_targets": "attention"})),
    _partial("Llama-3-8B on 8 H100", 6150, _PARTIAL),
    _partial("Llama-3-8B on 8 MI300X", 5376.5, replace(_PARTIAL, machine="mi300x-platform")),
)  # fmt: skip
