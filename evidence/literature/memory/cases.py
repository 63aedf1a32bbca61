"""Published fits, failures and peaks of device memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from evidence.literature.memory.failures import MEMORY_FAILURES
from evidence.literature.times.fine_tuning import FINE_TUNING, LONG, RECIPE
from evidence.literature.times.offload_runs import OFFLOAD_RUNS, VIT
from experiments.paper.setups import Measurement, MemoryCase, Scope, Setup

_GB, _GIB = 1e9, 2**30

_LITGPT = Setup(
    model="llama-2-7b",
    machine="dgx-a100-40",
    devices=1,
    strategy="lora",
    batch_size=1,
    sequence=1304,
    options={"lora_rank": 8, "lora_targets": "attention"},
)


def _litgpt(
    size: str, gigabytes: float | None, *, batch: int = 1, quantises: bool = False
) -> MemoryCase:
    method, model = "qlora" if quantises else "lora", f"llama-2-{size.lower()}"
    setup = replace(_LITGPT, model=model, strategy=method, batch_size=batch)
    if quantises:
        setup = replace(setup, options={**setup.options, "keeps_inputs": True})
    return MemoryCase(
        label=f"LitGPT, {method}, Llama-2-{size}, batch {batch}",
        setup=setup,
        fits=gigabytes is not None,
        peak=None if gigabytes is None else gigabytes * _GB,
        source="Lightning-AI/litgpt, tutorials/resource-tables.md",
        assumption="queries and values alone have adapters there; nothing recomputed; "
        "bitsandbytes 0.41, whose products keep their inputs",
    )


def _torchtune(label: str, gibibytes: float, **changes: Any) -> MemoryCase:
    setup = Setup(
        model="llama-3.1-8b",
        machine="rtx4090-server",
        devices=1,
        strategy="lora",
        batch_size=2,
        sequence=2048,
        checkpointing=True,
        kernels="compiled",
        loss="parts",
        options={"lora_rank": 8},
    )
    return MemoryCase(
        label=f"torchtune, {label}",
        setup=replace(setup, **changes),
        peak=gibibytes * _GIB,
        scope="reserved",
        source="pytorch/torchtune, README: memory and training speed",
        assumption="rank 8 on all matrices of a layer, every layer recomputed; the loss in parts",
    )


_TITAN = Setup(
    model="llama-3.1-8b",
    machine="grand-teton-h100",
    devices=8,
    strategy="fsdp2",
    batch_size=2,
    sequence=8192,
    checkpointing="op",
    loss="float32",
    options={"float32_reduce": True, "optimizer": "foreach"},
)


def _titan(label: str, gibibytes: float, **changes: Any) -> MemoryCase:
    return MemoryCase(
        label=f"torchtitan, Llama-3.1-8B on {label}",
        setup=replace(_TITAN, **changes),
        peak=gibibytes * _GIB,
        scope="reserved",
        source="pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
        assumption="8,192 tokens a sequence and recomputed by operation, the configuration's "
        "defaults; keys and values are not repeated for each query's head, as theirs are",
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
_WHOLE: Mapping[str, Any] = {
    "strategy": "deepspeed_zero3", "devices": 2, "options": {"bucket_elements": 4096**2}
}  # fmt: skip


def _qwen(label: str, gigabytes: float | None, **changes: Any) -> MemoryCase:
    return MemoryCase(
        label=f"Qwen's scripts, {label}",
        setup=replace(_QWEN, **changes),
        fits=gigabytes is not None,
        peak=None if gigabytes is None else gigabytes * _GB,
        scope="device",
        source="QwenLM/Qwen, README: profiling of memory and speed",
        assumption="Qwen1.5's shapes, which are Qwen's; layers recomputed, as the scripts do it; "
        "rank 64 on all matrices of a layer; half of the sum for each device, and ZeRO-3 for full "
        "training, as the page says (a later script has ZeRO-2)",
    )


_A800_PEAKS = {
    "ZeRO-2": 44.8,
    "ZeRO-2, recomputed": 23.5,
    "ZeRO-2, recomputed, optimizer offloaded": 16.9,
    "ZeRO-2, recomputed, batch 4": 38.6,
    "ZeRO-3, batch 2": 75.7,
    "ZeRO-3, recomputed, batch 2": 20.4,
    "ZeRO-3, recomputed, optimizer offloaded": 9.4,
    "ZeRO-3, recomputed, all offloaded": 7.9,
    "ZeRO-3, recomputed": 39.1,
    "ZeRO-3, recomputed, 128 sequences": 63.9,
}
"""GiB by what the row of times is called."""
_QWEN_PEAKS = {
    "Qwen-1.8B, LoRA, 1,024 tokens": 8.4,
    "Qwen-1.8B, LoRA, 8,192 tokens": 21.8,
    "Qwen-1.8B, QLoRA, 8,192 tokens": 15.8,
    "Qwen-1.8B, 512 tokens": 43.5,
    "Qwen-1.8B, 8,192 tokens": 48.3,
}
"""GB by the same."""


def _of_times(row: Measurement, **more: Any) -> MemoryCase:
    """Return a case of a row of times."""
    assert isinstance(row.setup, Setup)
    return MemoryCase(label=row.label, setup=row.setup, source=row.source, **more)


def _peaks_of_times() -> Iterator[MemoryCase]:
    rows = {row.label: row for row in (*OFFLOAD_RUNS, *FINE_TUNING)}
    for name, gibibytes in _A800_PEAKS.items():
        assumed = "GiB, which the page does not say; DeepSpeed's default buckets"
        row = rows[f"LLaMA-7B, {name}"]
        yield _of_times(row, peak=gibibytes * _GIB, assumption=assumed)
    for name, gigabytes in _QWEN_PEAKS.items():
        row = rows[name]
        yield _of_times(row, peak=gigabytes * _GB, scope="device", assumption=row.assumption)


def _alpaca(batch: int, *, fits: bool) -> MemoryCase:
    return MemoryCase(
        label=f"Stanford Alpaca, Llama-7B on 4 A100 40 GB, FSDP offload, batch {batch}",
        setup=Setup(
            model="llama-2-7b",
            machine="dgx-a100-40",
            devices=4,
            strategy="fsdp2_offload",
            batch_size=batch,
            sequence=512,
            attention="eager",
            accumulation=8,
            options={"sync_each_batch": False},
        ),
        fits=fits,
        source="tatsu-lab/stanford_alpaca #280, comments of June 2023",
        assumption="predicted as FSDP2; gradients whole between micro-batches, as the Trainer "
        "keeps them; eager attention over padded sequences of 512 tokens",
    )


def _foundry(size: str, model: str, hosts: int, batch: int, accumulation: int = 1) -> MemoryCase:
    return MemoryCase(
        label=f"llm-foundry, MPT-{size} on {8 * hosts} A100 40 GB",
        setup=Setup(
            model=model,
            machine="dgx-a100-40",
            devices=8,
            hosts=hosts,
            strategy="fsdp2",
            batch_size=batch,
            accumulation=accumulation,
            sequence=2048,
            checkpointing=True,
        ),
        source="mosaicml/llm-foundry, scripts/train/benchmarking/README.md",
        assumption="OPT's shapes; the batch of a row of throughputs, which ran",
    )


_TABLE = "pytorch/torchtune, README: memory and training speed"
_PAGE = "ljm565/universal-llm-trainer, docs/gpu_test.md"
_LOW_BIT = "pytorch/ao, torchao/optim/README.md"


def _narrow(
    label: str, peak: float, setup: Setup, source: str, scope: Scope = "allocated"
) -> MemoryCase:
    return MemoryCase(
        label=label,
        setup=setup,
        peak=peak,
        scope=scope,
        source=source,
        assumption="as the row of its time; weights, gradients and moments in bfloat16",
    )


_TITAN_70B = replace(_TITAN, model="llama-2-70b", machine="dgx-a100-80", hosts=8, sequence=4096)
_TITAN_A100 = "pytorch/torchtitan, docs/performance.md"

MEMORY_CASES: tuple[MemoryCase, ...] = (
    _litgpt("7B", 21.30),
    _litgpt("7B", 29.07, batch=2),
    _litgpt("7B", None, batch=4),
    _litgpt("7B", 13.84, quantises=True),
    _litgpt("13B", 38.12),
    _litgpt("13B", None, batch=2),
    _litgpt("13B", None, batch=4),
    _litgpt("13B", 22.55, quantises=True),
    _torchtune("lora, one RTX 4090", 16.2),
    _torchtune("qlora, one RTX 4090", 7.4, strategy="qlora"),
    _torchtune(
        "70B with offload, 8 A100",
        13.9,
        model="llama-3.1-70b",
        machine="dgx-a100-80",
        devices=8,
        strategy="fsdp2_offload",
        options={"optimizer": "fused", "float32_master": False, "tables_apart": True},
    ),
    _narrow("torchtune, Llama-3.2-3B on one A100, packed", 60.0 * _GIB, RECIPE, _TABLE),
    _narrow("torchtune, Llama-3.2-3B on one A100, compiled", 51.0 * _GIB,
            replace(RECIPE, kernels="compiled"), _TABLE),
    _narrow("universal-llm-trainer, Llama-3.1-8B on one H100", 78 * _GIB, LONG, _PAGE, "device"),
    _narrow("universal-llm-trainer, Llama-3.1-8B on one RTX PRO 6000", 89 * _GIB,
            replace(LONG, machine="rtx-pro-6000-server"), _PAGE, "device"),
    _narrow("ViT of 1.1B on one RTX 4070 Ti SUPER", 9.82 * _GB, VIT, _LOW_BIT),
    _narrow("the same, torchao's offload, gradients too", 4.01 * _GB,
            replace(VIT, strategy="torchao_offload", options={}), _LOW_BIT),
    _titan("8 H100", 82.4),
    _titan("8 H100, compiled", 77.0, kernels="compiled"),
    _titan("128 H100", 67.0, hosts=16),
    _titan("128 H100, compiled", 62.0, hosts=16, kernels="compiled"),
    MemoryCase(
        label="torchao, Llama-3-8B on 8 H100, compiled",
        setup=replace(_TITAN, machine="hgx-h100", batch_size=1, kernels="compiled"),
        peak=47.65 * _GIB,
        scope="reserved",
        source="pytorch/ao, torchao/float8/README.md: its baseline in bfloat16",
        assumption="GiB, which torchtitan's log has, where the page writes GB; as torchtitan's "
        "other rows",
    ),
    _qwen("lora, 7B, 1,024 tokens", 21.5),
    _qwen("lora, 7B, 4,096 tokens", 29.7, sequence=4096),
    _qwen("lora, 7B, 8,192 tokens", 36.6, sequence=8192),
    _qwen("lora, 14B, 1,024 tokens", 35.3, model="qwen1.5-14b"),
    _qwen("lora, 14B, 8,192 tokens", 55.2, model="qwen1.5-14b", sequence=8192),
    _qwen("all of 7B on 2 devices, 512 tokens", 148.0 / 2, sequence=512, **_WHOLE),
    _qwen("all of 7B on 2 devices, 1,024 tokens", 162.0 / 2, **_WHOLE),
    _qwen("all of 7B on 2 devices, 2,048 tokens", None, sequence=2048, **_WHOLE),
    _qwen("lora, 72B on one device", None, model="qwen2.5-72b", sequence=256),
    _alpaca(2, fits=True),
    _alpaca(3, fits=False),
    _foundry("7B", "opt-6.7b", 1, 12, 4),
    _foundry("7B", "opt-6.7b", 2, 16),
    _foundry("7B", "opt-6.7b", 8, 18),
    _foundry("13B", "opt-13b", 1, 4, 16),
    _foundry("13B", "opt-13b", 2, 10),
    _foundry("13B", "opt-13b", 16, 16),
    _foundry("30B", "opt-30b", 4, 4),
    _foundry("30B", "opt-30b", 16, 6),
    MemoryCase(
        label="torchtitan, Llama-2-70B on 64 A100, all recomputed",
        setup=replace(_TITAN_70B, checkpointing=True),
        source=_TITAN_A100,
        assumption="sequences of 4,096 tokens",
    ),
    MemoryCase(
        label="torchtitan, Llama-2-70B on 64 A100, a part recomputed",
        setup=_TITAN_70B,
        fits=False,
        source=_TITAN_A100,
        assumption="sequences of 4,096 tokens; recomputed by operation",
    ),
    MemoryCase(
        label="LLaMA-Factory, Qwen1.5-7B on 8 A100 40 GB, ZeRO-2",
        setup=replace(
            _QWEN,
            machine="dgx-a100-40",
            devices=8,
            strategy="deepspeed_zero2",
            sequence=512,
            accumulation=1,
            options={"optimizer": "foreach"},
        ),
        fits=False,
        source="hiyouga/LLaMA-Factory #4133",
        assumption="layers recomputed, that project's default; PyTorch's AdamW",
    ),
    MemoryCase(
        label="llama-recipes, Llama-2-7B on one A100 80 GB",
        setup=replace(_QWEN, model="llama-2-7b", strategy="published_on_device", options={},
                      accumulation=1, checkpointing=False),
        fits=False,
        source="meta-llama/llama-cookbook #413",
        assumption="one sequence of 1,024 tokens, in bfloat16",
    ),
    *_peaks_of_times(),
    *MEMORY_FAILURES,
)  # fmt: skip
