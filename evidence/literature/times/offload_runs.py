"""Published times of training that offloads, and of the same source's runs that do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from evidence.literature.times.zero3_runs import RELEASED, gpt, offloaded
from experiments.paper.setups import PAGEABLE, Alternative, Measurement, Setup

OFFLOAD_GROUPS: Mapping[str, tuple[str, str]] = {
    "gpt-neo": (
        "GPT-Neo and GPT-J on one RTX 3090, DeepSpeed's offload",
        "The log has the time of a whole run, with the input and the saving of logs. Sequences "
        "have 62 tokens. Copies go through pageable memory, which the set-ups do not say. GPT-2's "
        "layers stand for GPT-Neo's and GPT-J's, which have separate projections, no biases of "
        "them, and rotary positions in the second. Sixteen cores are counted as eight. The "
        "release is 0.5.9, whose CPU step has other passes than that of the simulated 0.19.",
    ),
    "a800": (
        "LLaMA-7B on 8 A800, ZeRO-2 and ZeRO-3",
        "The unit of the throughput is not printed. It is sequences per second of all devices: "
        "tokens would be too few and sequences of one device too many for the devices' peak. Nor "
        "does the source say whether the devices are SXM, how threads are set, or what is pinned.",
    ),
    "titan-rtx": (
        "GPT-2 XL on 1 and 2 Titan RTX, ZeRO-3 and FSDP with offload",
        "Times are of an epoch, with its evaluation, FSDP's in hours to one or two digits. The "
        "number of sequences of the data is taken from a published log of the same script. FSDP's "
        "rows are in float32; on the CPU they run transformers' own AdamW, with two devices on "
        "one thread each, as Accelerate's launcher is `torchrun`. The host has 60 GB and is not "
        "named.",
    ),
    "desktop-vit": (
        "A ViT of 1.1B on one RTX 4070 Ti SUPER",
        "Llama's layers stand for the ViT's, whose attention is not causal and whose norms have "
        "biases. The source calls its DeepSpeed untuned.",
    ),
    "cpu-master": (
        "FSDP2 with its optimizer on the CPU",
        "Neither host is named. prime-rl does not say what it recomputes. Its AdamW has one "
        "thread, as a later change (#3248) says of what was before it: `torchrun`'s default.",
    ),
    "fsdp-size": (
        "Llama-2-13B under FSDP with CPU offload, 2 H100 and 2 A100",
        "A step of the table is one micro-batch of 32: LoRA's time on the same page cannot be of "
        "32. Eight stand for them, so that AdamW is 2 % more of the time. Every matrix is wrapped "
        "for itself, and the configuration asks for deterministic kernels. Neither the hosts are "
        "named nor whether devices are SXM.",
    ),
}
"""Titles and doubts, by group. No term or figure is fitted to these rows."""

# ---- one desktop --------------------------------------------------------------------------------

_NEO = Setup(
    model="gpt-neo-2.7b",
    config=gpt(2560, 32, 20),
    machine="rtx3090-desktop",
    devices=1,
    strategy="deepspeed_zero_offload",
    batch_size=15,
    sequence=62,
    attention="eager",
    dtype="float16",
)
_GPT_J = offloaded(
    replace(_NEO, model="gpt-j-6b", config=gpt(4096, 28, 16, words=50_400, tied=False))
)
VIT = Setup(
    model="vit-giant-dinov2",
    config={
        "model_type": "llama",
        "vocab_size": 45,
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 40,
        "num_attention_heads": 24,
        "tie_word_embeddings": False,
    },
    machine="rtx4070-ti-super-desktop",
    devices=1,
    strategy="ddp",
    batch_size=32,
    sequence=257,
    checkpointing=True,
    loss="classes",
    options={"float32_master": False},
)


def _neo(label: str, seconds: float, steps: int, setup: Setup, *more: Alternative) -> Measurement:
    return Measurement(
        label=label,
        seconds=seconds / steps,
        quantity="step",
        setup=setup,
        group="gpt-neo",
        source="dredwardhyde/gpt-neo-fine-tuning-example, logs of a run; #5 names the host",
        assumption="transformers' eager kernels, nothing recomputed, every sequence padded to 62 "
        "tokens; a desktop's two channels of DDR4",
        alternatives=(PAGEABLE, *more),
    )


def _vit(label: str, seconds: float, setup: Setup) -> Measurement:
    return Measurement(
        label=label,
        seconds=seconds,
        quantity="step",
        setup=setup,
        group="desktop-vit",
        source="pytorch/ao, torchao/optim/README.md and benchmarks/benchmark_low_bit_adam.py",
        assumption="timm's vit_giant_patch14_dinov2 on pictures of 224 x 224: 40 layers of width "
        "1,536, gated, 257 tokens; every layer recomputed; PyTorch's fused AdamW, all in bfloat16 "
        "but DeepSpeed's states; DDR4-3200",
    )


# ---- several devices of one host ----------------------------------------------------------------

_A800 = Setup(
    model="llama-2-7b",
    machine="a800-xeon-8358",
    devices=8,
    strategy="deepspeed_zero2",
    batch_size=1,
    sequence=4096,
    accumulation=8,
)
_CKPT = replace(_A800, checkpointing=True)
_A800_3 = replace(_A800, strategy="deepspeed_zero3", batch_size=2, accumulation=4)
_CKPT_3 = replace(_A800_3, checkpointing=True)


def _a800(label: str, rate: float, setup: Setup, *more: Alternative) -> Measurement:
    sequences = setup.devices * setup.batch_size * setup.accumulation
    return Measurement(
        label=f"LLaMA-7B, {label}",
        seconds=sequences / rate,
        quantity="step",
        setup=setup,
        group="a800",
        source="gist chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a",
        assumption="64 sequences of 4,096 tokens a step over eight devices, or 128; SDPA's fused "
        "kernel; bfloat16",
        alternatives=more,
    )


def _size(device: str, seconds: float, machine: str) -> Measurement:
    setup = Setup(
        model="llama-2-13b",
        machine=machine,
        devices=2,
        strategy="fsdp2_offload",
        batch_size=2,
        sequence=8192,
        accumulation=8,
        checkpointing=True,
        options={"float32_master": False},
    )
    return Measurement(
        label=f"Llama-2-13B, FSDP and CPU offload, 2 {device}",
        seconds=8 * seconds,
        quantity="step",
        setup=setup,
        group="fsdp-size",
        source="ljm565/universal-llm-trainer, docs/gpu_test.md and its configurations",
        assumption="two of an HGX's or DGX's devices; full sequences of 8,192 tokens, SDPA's "
        "fused kernel, every layer recomputed; gradients leave in every micro-batch; on the host "
        "all has 16 bits, in which the model is loaded",
        alternatives=(PAGEABLE,),
    )


# ---- Titan RTX ----------------------------------------------------------------------------------

_TITAN = Setup(
    model="gpt2-xl",
    machine="titan-rtx-server",
    devices=1,
    strategy="fsdp2_offload",
    batch_size=16,
    sequence=128,
    attention="eager",
    dtype="float16",
)
_SEQUENCES = 18_666
"""Sequences in wikitext-2's training part, cut in blocks of 128 tokens."""


def _titan(label: str, epoch: float, setup: Setup, source: str, share: float = 1) -> Measurement:
    steps = share * _SEQUENCES / (setup.batch_size * setup.devices)
    return Measurement(
        label=label,
        seconds=epoch / steps,
        quantity="step",
        setup=setup,
        group="titan-rtx",
        source=f"huggingface/blog, {source}",
        assumption="blocks of 128 tokens, transformers' eager kernels, nothing recomputed; two "
        "Titan RTX without a bridge in a server with two small Xeons",
    )


_FLOAT = replace(_TITAN, dtype="float32", batch_size=10)

OFFLOAD_RUNS: tuple[Measurement, ...] = (
    _neo("GPT-Neo-2.7B, ZeRO-2 and offload", 8040.93, 2013, _NEO),
    _neo("GPT-J-6B, ZeRO-3 and all offloaded", 23887.48, 2340, _GPT_J),
    _a800("ZeRO-2", 5.33, _A800),
    _a800("ZeRO-2, recomputed, optimizer offloaded", 1.81,
          replace(_CKPT, strategy="deepspeed_zero_offload"),
          Alternative(text="copies beside backward", setup=replace(
              _CKPT, strategy="deepspeed_zero_offload", options=RELEASED))),
    _a800("ZeRO-2, recomputed", 4.19, _CKPT),
    _a800("ZeRO-2, recomputed, batch 4", 4.69, replace(_CKPT, batch_size=4, accumulation=2)),
    _a800("ZeRO-3, batch 2", 4.95, _A800_3),
    _a800("ZeRO-3, recomputed, batch 2", 4.45, _CKPT_3),
    _a800("ZeRO-3, recomputed", 4.73, replace(_CKPT_3, batch_size=8, accumulation=1)),
    _a800("ZeRO-3, recomputed, 128 sequences", 4.32,
          replace(_CKPT_3, batch_size=8, accumulation=2)),
    _a800("ZeRO-3, recomputed, optimizer offloaded", 2.05,
          replace(_CKPT_3, strategy="zero3_offload")),
    _a800("ZeRO-3, recomputed, all offloaded", 2.06,
          offloaded(replace(_CKPT, batch_size=4, accumulation=2))),
    _titan("GPT-2 XL on 1 Titan RTX, ZeRO-3 and offload", 6608.35, offloaded(_TITAN),
           "accelerate-deepspeed.md"),
    _titan("GPT-2 XL on 1 Titan RTX, FSDP and offload (3 h)", 3 * 3600, _FLOAT,
           "pytorch-fsdp.md", 0.95),
    _titan("GPT-2 XL on 2 Titan RTX, FSDP and offload (1.16 h)", 1.16 * 3600,
           replace(_FLOAT, devices=2, batch_size=14, host_threads=1), "pytorch-fsdp.md", 0.95),
    _titan("GPT-2 XL on 2 Titan RTX, FSDP (0.6 h)", 0.6 * 3600,
           replace(_FLOAT, devices=2, batch_size=5, strategy="fsdp2",
                   options={"optimizer": "loop"}), "pytorch-fsdp.md", 0.95),
    _vit("ViT, no offload", 1.27, VIT),
    _vit("ViT, DeepSpeed's ZeRO-Offload", 3.13,
         replace(VIT, strategy="deepspeed_zero_offload", options=RELEASED)),
    _vit("ViT, torchao's offload, gradients too", 1.53,
         replace(VIT, strategy="torchao_offload", options={})),
    Measurement(
        label="torchtune, Llama-3.1-70B on 8 A100 (1,568 tokens/s)",
        seconds=8 * 2 * 2048 / 1568,
        quantity="step",
        setup=Setup(model="llama-3.1-70b", machine="dgx-a100-80", devices=8,
                    strategy="fsdp2_offload", batch_size=2, sequence=2048, checkpointing=True,
                    kernels="compiled",
                    options={"optimizer": "fused", "float32_master": False}),
        group="cpu-master",
        source="pytorch/torchtune, README: memory and training speed",
        assumption="a DGX A100; tokens per second of all devices; every layer recomputed; "
        "PyTorch's fused AdamW on the CPU",
    ),
    Measurement(
        label="prime-rl, Qwen3-4B on 1 RTX PRO 6000",
        seconds=5.629,
        quantity="step",
        setup=Setup(model="qwen3-4b", machine="rtx-pro-6000-server", devices=1,
                    strategy="published_zero_offload", batch_size=1, sequence=2048, accumulation=2,
                    checkpointing=True, host_threads=1),
        group="cpu-master",
        source="PrimeIntellect-ai/prime-rl #3210",
        assumption="one socket of EPYC 9654; every layer recomputed; weights stay on the device, "
        "gradients of each micro-batch leave",
    ),
    _size("H100", 9.5, "hgx-h100"),
    _size("A100", 25.4, "dgx-a100-80"),
)  # fmt: skip
