"""Published times of small models and small batches, which launches bind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.paper.setups import Alternative, Measurement, Setup

LAUNCH_BOUND_GROUPS: Mapping[str, tuple[str, str]] = {
    "bert": (
        "BERT-base on one A100 80 GB, forward and backward",
        "The host has 12 cores, which are not named. Times are rounded to milliseconds. The loss "
        "is a sum of logits: cross entropy's passes are predicted and were not there. Dropout's "
        "kernels are not counted.",
    ),
    "opt": (
        "OPT-350M on one L40S, forward and backward",
        "The host is not named. Times are rounded to milliseconds, and the loss is a sum of "
        "logits.",
    ),
    "course-a100": (
        "A course's decoders on one A100 40 GB",
        "The host is not named. The modules are the course's own: linear layers, attention and "
        "rotary positions go through einops and einx, whose parsing the host does in every call. "
        "How much longer than for Llama's modules the host takes is from a microbenchmark of "
        "such layers on a CPU (`python -m evidence.benchmarks.module_launches`). What more their "
        "kernels move is not predicted.",
    ),
    "course-5090": (
        "A course's decoders on one RTX 5090",
        "The host is not named; the repository speaks of Windows' Linux, where launches are slow. "
        "Steps have the author's own AdamW in a Python loop, about that of PyTorch without "
        "foreach. The first two vary by a tenth from step to step.",
    ),
}
"""Titles and doubts, by group. No term or figure is fitted to these rows."""

_LAUNCHES = (
    Alternative(
        text="launches half as slow",
        values={"device.launch": 12.5e-6, "device.backward_launch": 8.75e-6},
    ),
    Alternative(
        text="twice as slow", values={"device.launch": 50e-6, "device.backward_launch": 35e-6}
    ),
)
_BERT = "huggingface/transformers, docs/source/en/model_doc/bert.md of 2024: training with SDPA"
_OPT = "huggingface/transformers, docs/source/en/model_doc/opt.md of 2024: training with SDPA"
_A100 = "yyin-dev/cs336-a2, data/e2e_benchmark"
_RTX5090 = "luke396/assignment2-systems, result/benchmark_results_rtx5090.md"
_ATTENTIONS = {"sdpa": "fused", "eager": "eager"}
_LAUNCHED = {"float32": (2.6, 1.6), "bfloat16": (3.5, 2.2)}
"""Host's time for layers through einops over Llama's, forward and backward, without and with
automatic casts (record 2026-11-25_module-launches_amd-epyc)."""
_WIDTHS = {"small": (768, 12, 12), "medium": (1024, 24, 16), "large": (1280, 36, 20)}
"""Width, layers and heads of the course's models."""


def _encoder(attention: str, batch: int, sequence: int, seconds: float) -> Measurement:
    return _transformers("bert-base", "dgx-a100-80", "bert", _BERT, attention, batch, sequence,
                         seconds)  # fmt: skip


def _opt(attention: str, batch: int, sequence: int, seconds: float) -> Measurement:
    return _transformers("opt-350m", "l40s-server", "opt", _OPT, attention, batch, sequence,
                         seconds)  # fmt: skip


def _transformers(
    model: str,
    machine: str,
    group: str,
    source: str,
    attention: str,
    batch: int,
    sequence: int,
    seconds: float,
) -> Measurement:
    """Return a row of transformers' tables of SDPA beside eager attention, in float16."""
    return Measurement(
        label=f"{attention}, {batch} x {sequence}",
        seconds=seconds,
        quantity="compute",
        setup=Setup(
            model=model,
            machine=machine,
            devices=1,
            strategy="ddp",
            batch_size=batch,
            sequence=sequence,
            attention=_ATTENTIONS[attention],
            loss="sum",
            dtype="float16",
        ),
        group=group,
        source=source,
        assumption="the table's host; weights in float16; SDPA takes a fused kernel; the masked "
        "or causal language model's head",
        alternatives=_LAUNCHES,
    )


def _course(size: str) -> Mapping[str, Any]:
    """Return the configuration of the course's model of a size: Llama's with 10,000 words."""
    width, layers, heads = _WIDTHS[size]
    return {
        "model_type": "llama",
        "vocab_size": 10_000,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": False,
    }


def _decoder(
    size: str,
    sequence: int,
    milliseconds: float,
    *,
    steps: bool = False,
    dtype: str = "float32",
    is_5090: bool = False,
) -> Measurement:
    """Return a row of the course's benchmark, of batches of 4.

    Args:
        size: Of the model.
        sequence: Tokens.
        milliseconds: Of it.
        steps: Whether AdamW's step is in it.
        dtype: Type of products; with float16 or bfloat16 weights are cast for each.
        is_5090: Whether the device is an RTX 5090; else an A100 of 40 GB.
    """
    what = "a step" if steps else "forward and backward"
    return Measurement(
        label=f"{size}, {sequence} tokens, {what}{'' if dtype == 'float32' else ', ' + dtype}",
        seconds=milliseconds / 1e3,
        quantity="step" if steps else "compute",
        setup=Setup(
            model=f"course-{size}",
            config=_course(size),
            machine="rtx5090-desktop" if is_5090 else "dgx-a100-40",
            devices=1,
            strategy="ddp",
            batch_size=4,
            sequence=sequence,
            attention="eager",
            dtype=dtype,
            launches=(1.0, 1.0) if is_5090 else _LAUNCHED[dtype],
            options={"optimizer": "loop"},
        ),
        group="course-5090" if is_5090 else "course-a100",
        source=_RTX5090 if is_5090 else _A100,
        assumption="the table's host; transformers' eager kernels; plain float32 products where "
        "the row names no type",
        alternatives=_LAUNCHES,
    )


LAUNCH_BOUND: tuple[Measurement, ...] = (
    _encoder("sdpa", 4, 256, 0.017),
    _encoder("sdpa", 4, 512, 0.018),
    _encoder("sdpa", 8, 256, 0.018),
    _encoder("sdpa", 8, 512, 0.025),
    _encoder("sdpa", 16, 256, 0.024),
    _encoder("sdpa", 16, 512, 0.044),
    _encoder("eager", 4, 256, 0.023),
    _encoder("eager", 4, 512, 0.023),
    _encoder("eager", 8, 256, 0.023),
    _encoder("eager", 8, 512, 0.035),
    _encoder("eager", 16, 256, 0.030),
    _encoder("eager", 16, 512, 0.064),
    _opt("sdpa", 1, 128, 0.037),
    _opt("sdpa", 4, 256, 0.038),
    _opt("sdpa", 8, 256, 0.036),
    _opt("sdpa", 8, 512, 0.060),
    _opt("sdpa", 8, 1024, 0.122),
    _opt("eager", 1, 128, 0.047),
    _opt("eager", 4, 256, 0.044),
    _opt("eager", 8, 256, 0.048),
    _decoder("small", 128, 78.0),
    _decoder("small", 256, 82.4),
    _decoder("medium", 128, 156.3),
    _decoder("medium", 256, 222.0),
    _decoder("large", 128, 284.5),
    _decoder("small", 128, 77.4, steps=True, dtype="bfloat16"),
    _decoder("medium", 128, 162.1, steps=True, dtype="bfloat16"),
    _decoder("large", 128, 278.0, steps=True, dtype="bfloat16"),
    _decoder("small", 128, 55.8, steps=True, is_5090=True),
    _decoder("small", 256, 60.7, steps=True, is_5090=True),
    _decoder("medium", 128, 101.2, steps=True, is_5090=True),
    _decoder("medium", 256, 106.9, steps=True, is_5090=True),
    _decoder("large", 128, 164.7, steps=True, is_5090=True),
)
