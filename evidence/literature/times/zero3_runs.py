"""Published times of ZeRO-3 and its like on several devices, with and without offload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.paper.setups import Alternative, Measurement, Setup

ZERO3_GROUPS: Mapping[str, tuple[str, str]] = {
    "falcon": (
        "Falcon-7B on 8 A100 40 GB",
        "The batch is not given, nor what is recomputed, nor the host. Llama's layers stand for "
        "Falcon's, which have one key head, no gate and one norm: the feed-forward has as many "
        "parameters.",
    ),
    "gemini": (
        "GPT-2 on 1, 4 and 8 A100 40 GB, Lightning with DeepSpeed and DDP",
        "The first two are means of three steps, with all that the first one needs. Automatic "
        "casts are not predicted, nor that DDP's gradients are float32 under them. The host has "
        "500 GB and is not named.",
    ),
    "jean-zay": (
        "GPT-2 of 25B and 52B on 16 and 64 V100, ZeRO-3",
        "The source says that times vary by up to 40 % with what else the network carries. Its "
        "own all-reduces reach an eighth of a host's 400 Gb/s. For 25B the table says that all is "
        "offloaded and the script that the optimizer is; the script is taken. So is its launcher, "
        "`torch.distributed.launch`, which gives each process one thread.",
    ),
    "open-llama": (
        "LLaMA on 48 A100, DeepSpeed's stages 1 and 3",
        "The network between the hosts is not named. The accumulation of 12 is the "
        "configuration's default, which the source gives for 7B alone. Nothing is said of what "
        "the 64 cores of a host are.",
    ),
    "azure": (
        "GPT of 175B and 1T under ZeRO-3 on 256 and 1,024 A100",
        "The rate is worked back into time by the source's own formula, which counts "
        "recomputation and no causal mask. The rows are of Megatron's layers, whose masked "
        "softmax and biased GELU are fused kernels.",
    ),
}
"""Titles and doubts, by group. No term or figure is fitted to these rows."""

RELEASED = {"overlap_comm": True}
"""Options of DeepSpeed's ZeRO-Offload at its best."""


def offloaded(setup: Setup) -> Setup:
    """Return the set-up under ZeRO-3 with weights and optimizer on the host."""
    return replace(setup, strategy="zero3_offload", options={"offload": "all"})


def gpt(width: int, layers: int, heads: int, *, words: int = 50_257, tied: bool = True) -> Any:
    """Return the configuration of a GPT-2 of these shapes."""
    return {
        "model_type": "gpt2",
        "vocab_size": words,
        "n_positions": 2048,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "tie_word_embeddings": tied,
    }


def other_recomputation(setup: Setup) -> Alternative:
    """Return the set-up with the other recomputation."""
    text = "nothing recomputed" if setup.checkpointing else "every layer recomputed"
    return Alternative(text=text, setup=replace(setup, checkpointing=not setup.checkpointing))


# ---- one host -----------------------------------------------------------------------------------

_FALCON = Setup(
    model="falcon-7b",
    config={
        "model_type": "llama",
        "vocab_size": 65_024,
        "hidden_size": 4544,
        "intermediate_size": 12_117,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    machine="dgx-a100-40",
    devices=8,
    strategy="deepspeed_zero3",
    batch_size=1,
    sequence=4096,
    checkpointing=True,
)
_GEMINI = Setup(
    model="gpt2-12b",
    config=gpt(4096, 60, 16),
    machine="dgx-a100-40",
    devices=8,
    strategy="deepspeed_zero3",
    batch_size=1,
    sequence=1024,
    checkpointing=True,
    attention="eager",
    dtype="float16",
)


def _falcon(label: str, seconds: float, strategy: str) -> Measurement:
    setup = replace(_FALCON, strategy=strategy)
    if strategy == "zero3_offload":
        setup = offloaded(setup)
    return Measurement(
        label=f"Falcon-7B, {label}",
        seconds=seconds,
        quantity="step",
        setup=setup,
        group="falcon",
        source="deepspeedai/DeepSpeed #3901",
        assumption="one sequence of 4,096 tokens for each device, every layer recomputed; a DGX",
        alternatives=(
            other_recomputation(setup),
            Alternative(text="2 sequences a device", setup=replace(setup, batch_size=2)),
        ),
    )


def _gemini(label: str, seconds: float, setup: Setup, *more: Alternative) -> Measurement:
    return Measurement(
        label=label,
        seconds=seconds,
        quantity="step",
        setup=setup,
        group="gemini",
        source="hpcaitech/ColossalAI-Pytorch-lightning, benchmark/gpt/README.md and train.py",
        assumption="transformers' GPT-2, eager, every layer recomputed, sequences of 1,024 "
        "tokens; a DGX A100",
        alternatives=more,
    )


# ---- several hosts ------------------------------------------------------------------------------

_JEAN_ZAY = Setup(
    model="gpt2-52b",
    config=gpt(8192, 64, 32),
    machine="jean-zay-v100",
    devices=4,
    hosts=16,
    strategy="deepspeed_zero3",
    batch_size=8,
    sequence=1024,
    checkpointing=True,
    attention="eager",
    dtype="float16",
    host_threads=1,
)


def _jean_zay(label: str, seconds: float, setup: Setup) -> Measurement:
    shared = Alternative(
        text="a network of 50 Gb/s for each host, as its all-reduces reach",
        values={"network.bandwidth": 1.6e9},
    )
    return Measurement(
        label=label,
        seconds=seconds,
        quantity="step",
        setup=setup,
        group="jean-zay",
        source="bigscience-workshop/bigscience, experiments/gpt2.md",
        assumption="transformers' GPT-2, eager, every layer recomputed, one micro-batch of "
        "sequences of 1,024 tokens; no switch of PCIe",
        alternatives=(shared,),
    )


def _open_llama(
    label: str,
    tokens: float,
    shape: tuple[int, int, int, int],
    *,
    batch: int = 12,
    strategy: str = "deepspeed_zero3",
    recomputes: bool = True,
) -> Measurement:
    """Return a row of LLaMA with these width, inner width, layers and heads."""
    width, inner, layers, heads = shape
    setup = Setup(
        model=f"open-llama-{label.split(maxsplit=1)[0]}",
        config={
            "model_type": "llama",
            "vocab_size": 68_762,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "tie_word_embeddings": False,
        },
        machine="dgx-a100-80",
        devices=8,
        hosts=6,
        strategy=strategy,
        batch_size=batch,
        sequence=2048,
        accumulation=12,
        checkpointing=recomputes,
    )
    if strategy == "zero3_offload":
        setup = offloaded(setup)
    narrow = replace(setup, network="4x-roce-100")
    return Measurement(
        label=f"LLaMA {label} ({tokens:,.0f} tokens/s)",
        seconds=batch * 12 * 2048 / tokens,
        quantity="step",
        setup=setup,
        group="open-llama",
        source="s-JoL/Open-Llama, README and #60",
        assumption="six hosts as a DGX A100; xformers' attention, else eager kernels; 12 "
        "micro-batches a step",
        alternatives=(Alternative(text="400 Gb/s for each host", setup=narrow),),
    )


def _azure(
    label: str,
    teraflops: float,
    shape: tuple[int, int, int],
    batch: int,
    sequence: int,
    hosts: int,
) -> Measurement:
    """Return a row of a GPT with these width, layers and heads; the rate is of one device."""
    width, layers, heads = shape
    words = 51_200
    more = 1 + sequence / (6 * width) + words / (16 * layers * width)
    return Measurement(
        label=f"{label} ({teraflops:g} TFLOP/s)",
        seconds=96 * batch * sequence * layers * width**2 * more / (teraflops * 1e12),
        quantity="step",
        setup=Setup(
            model=f"gpt-{label.split(maxsplit=1)[0]}",
            config=gpt(width, layers, heads, words=words),
            machine="dgx-a100-80",
            devices=8,
            hosts=hosts,
            strategy="deepspeed_zero3",
            batch_size=batch,
            sequence=sequence,
            checkpointing=True,
            attention="eager",
            dtype="float16",
        ),
        group="azure",
        source="deepspeedai/DeepSpeed, docs/_posts/2022-07-26-deepspeed-azure.md",
        assumption="one micro-batch a step, every layer recomputed, Megatron's vocabulary of "
        "51,200; a DGX, whose network is as the hosts' 8 x 200 Gb/s",
    )


ZERO3_RUNS: tuple[Measurement, ...] = (
    _falcon("FSDP", 2.93, "fsdp2"),
    _falcon("ZeRO-3", 2.86, "deepspeed_zero3"),
    _falcon("ZeRO-3, all offloaded", 13.70, "zero3_offload"),
    _falcon("ZeRO-2, optimizer offloaded", 9.60, "deepspeed_zero_offload"),
    _gemini(
        "18B on 1 A100, ZeRO-3 and offload",
        39.32,
        offloaded(replace(_GEMINI, model="gpt2-18b", config=gpt(4096, 90, 16), devices=1)),
    ),
    _gemini("12B on 8 A100, ZeRO-3", 9.06, _GEMINI),
    _gemini("1.6B on 4 A100, ZeRO-3", 160 / 18.18,
            replace(_GEMINI, model="gpt2-xl", config=None, devices=4, batch_size=40)),
    _gemini("1.6B on 4 A100, DDP", 24 / 11.76,
            replace(_GEMINI, model="gpt2-xl", config=None, devices=4, batch_size=6,
                    strategy="ddp")),
    _jean_zay("52B on 64 V100", 118, _JEAN_ZAY),
    _jean_zay("52B on 64 V100, optimizer offloaded", 175,
              replace(_JEAN_ZAY, batch_size=12, strategy="zero3_offload")),
    _jean_zay("52B on 64 V100, all offloaded", 177,
              offloaded(replace(_JEAN_ZAY, batch_size=12))),
    _jean_zay("25B on 16 V100, optimizer offloaded", 58,
              replace(_JEAN_ZAY, model="gpt2-25b", config=gpt(7168, 40, 32), hosts=4,
                      batch_size=4, strategy="zero3_offload")),
    _open_llama("7B on 48 A100, stage 1", 3620, (4096, 11_008, 32, 32), batch=2,
                strategy="published_on_device", recomputes=False),
    _open_llama("13B on 48 A100, stage 3", 1856, (5120, 13_824, 40, 40), batch=24),
    _open_llama("33B on 48 A100, stage 3", 708, (6656, 17_920, 60, 52)),
    _open_llama("65B on 48 A100, stage 3, all offloaded", 369, (8192, 22_016, 80, 64),
                strategy="zero3_offload"),
    _azure("175B on 256 A100", 204.49, (12_288, 96, 96), batch=32, sequence=512,
           hosts=32),
    _azure("1T on 1,024 A100", 165.36, (25_600, 128, 160), batch=8, sequence=1024,
           hosts=128),
)  # fmt: skip
