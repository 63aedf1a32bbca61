"""Published throughputs of training with sharded weights, on one host and on several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from experiments.paper.setups import Alternative, Measurement, Setup
from sim.models.table import find_model

SHARDED_GROUPS: Mapping[str, tuple[str, str]] = {
    "foundry-a100": (
        "MPT under FSDP on 8 to 128 A100",
        "With 13B on eight 40 GB devices memory is all but full, and the allocator may have had "
        "to free and take it again. In this table and the next three collectives hide behind "
        "compute: the rows test that they do, and not how long collectives take.",
    ),
    "foundry-h100": (
        "MPT under FSDP on 8 to 64 H100",
        "Micro-batches of 2 are the worst. The copies around collectives are FSDP2's, where the "
        "source has its forerunner's. Automatic casts and the optimizer's own loop are not "
        "predicted. From 8 to 64 devices the measured speed of each does not fall, and neither "
        "does the predicted.",
    ),
    "titan": (
        "Llama-3.1-8B under FSDP2 on 8 and 128 H100",
        "The devices have HBM2e and a power limit of 500 W, at which nobody has published their "
        "products' rate. From one host to 16 the "
        "measured speed of a device falls by 2.7 %. The predicted one does not fall, as nothing "
        "of what several hosts wait for one another is modelled.",
    ),
    "forge": (
        "Llama-3-8B under FSDP2 on 2 and 4 H200",
        "The source says of its kernels that they are compiled, and no more.",
    ),
}
"""Titles and doubts, by group. No term or figure is fitted to these rows.

In all of them collectives hide behind compute, so that they test whether they do and not how long
collectives take."""

_FREE = {"device.bandwidth": 1e18}
_FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
_SHAPES = (
    "OPT's shapes, which are MPT's but for biases and the vocabulary; no dropout; FlashAttention; "
    "each host as the DGX of its devices"
)


def _foundry(
    label: str,
    tokens: float,
    model: str,
    *,
    hosts: int = 1,
    batch: int,
    accumulation: int = 1,
    recomputes: bool = True,
    is_h100: bool = False,
) -> Measurement:
    """Return a row of the tables of MPT, whose sequences have 2,048 tokens.

    Args:
        label: Of the row.
        tokens: Per second and device.
        model: With the same shapes.
        hosts: Of eight devices each.
        batch: Sequences of a micro-batch on a device.
        accumulation: Micro-batches of a step.
        recomputes: Whether activations are recomputed.
        is_h100: Whether devices are H100; else A100 of 40 GB, with RoCE of 1,600 Gb/s.
    """
    setup = Setup(
        model=model,
        config={**find_model(model)[1], "dropout": 0.0},
        machine="hgx-h100" if is_h100 else "dgx-a100-40",
        devices=8,
        hosts=hosts,
        network="8x-infiniband-ndr" if is_h100 else "8x-roce-200",
        strategy="fsdp2",
        batch_size=batch,
        accumulation=accumulation,
        sequence=2048,
        checkpointing=recomputes,
        # Mixed precision's default reduces in float32, "pure" in 16 bits.
        options={"float32_reduce": is_h100},
    )
    network = (
        "a network of 400 Gb/s for each device, which the page does not name"
        if is_h100
        else "adapters of 200 Gb/s"
    )
    return Measurement(
        label=label,
        seconds=batch * accumulation * 2048 / tokens,
        quantity="step",
        setup=setup,
        group="foundry-h100" if is_h100 else "foundry-a100",
        source=_FOUNDRY,
        assumption=f"{_SHAPES}; {network}",
        alternatives=(Alternative(text="all but products is free", values=_FREE),),
    )


def _titan(label: str, tokens: float, hosts: int) -> Measurement:
    setup = Setup(
        model="llama-3.1-8b",
        machine="grand-teton-h100",
        devices=8,
        hosts=hosts,
        strategy="fsdp2",
        batch_size=2,
        sequence=8192,
        checkpointing="op",
        options={"float32_reduce": True, "optimizer": "foreach"},
    )
    return Measurement(
        label=label,
        seconds=2 * 8192 / tokens,
        quantity="step",
        setup=setup,
        group="titan",
        source="pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3",
        assumption="8,192 tokens a sequence and recomputed by operation, the configuration's "
        "defaults; not compiled",
        alternatives=(
            Alternative(text="nothing recomputed", setup=replace(setup, checkpointing=False)),
            Alternative(
                text="H100 SXM with HBM3 at 700 W", setup=replace(setup, machine="hgx-h100")
            ),
        ),
    )


def _forge(label: str, seconds: float, devices: int) -> Measurement:
    return Measurement(
        label=label,
        seconds=seconds,
        quantity="step",
        setup=Setup(
            model="llama-3.1-8b",
            machine="hgx-h200",
            devices=devices,
            strategy="fsdp2",
            batch_size=4,
            accumulation=2,
            sequence=4096,
            checkpointing=True,
            kernels="compiled",
        ),
        group="forge",
        source="KempnerInstitute/KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md",
        assumption="the table's host; gradients reduced in 16 bits and in both micro-batches",
        alternatives=(Alternative(text="all but products is free", values=_FREE),),
    )


SHARDED: tuple[Measurement, ...] = (
    _foundry("7B on 8 A100", 3679, "opt-6.7b", batch=12, accumulation=4),
    _foundry("7B on 16 A100", 3645, "opt-6.7b", hosts=2, batch=16),
    _foundry("7B on 64 A100", 3665, "opt-6.7b", hosts=8, batch=18),
    _foundry("7B on 128 A100", 3623, "opt-6.7b", hosts=16, batch=18),
    _foundry("13B on 8 A100, 16 micro-batches", 1668, "opt-13b", batch=4, accumulation=16),
    _foundry("13B on 16 A100", 1993, "opt-13b", hosts=2, batch=10),
    _foundry("13B on 128 A100", 1972, "opt-13b", hosts=16, batch=16),
    _foundry("30B on 32 A100", 857, "opt-30b", hosts=4, batch=4),
    _foundry("30B on 128 A100", 865, "opt-30b", hosts=16, batch=6),
    _foundry("7B on 8 H100", 10643, "opt-6.7b", batch=6, recomputes=False, is_h100=True),
    _foundry("13B on 8 H100", 4792, "opt-13b", batch=2, recomputes=False, is_h100=True),
    _foundry("13B on 64 H100", 4800, "opt-13b", hosts=8, batch=2, recomputes=False, is_h100=True),
    _foundry("30B on 16 H100", 2263, "opt-30b", hosts=2, batch=10, accumulation=3, is_h100=True),
    _foundry("30B on 32 H100", 2308, "opt-30b", hosts=4, batch=14, accumulation=3, is_h100=True),
    _titan("8B on 8 H100", 5762, 1),
    _titan("8B on 128 H100", 5605, 16),
    _forge("8B on 2 H200", 3.50, 2),
    _forge("8B on 4 H200", 3.36, 4),
)
