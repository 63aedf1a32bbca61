"""Published measurements of what else people do: adapters, and weights that are streamed."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.paper.setups import Alternative, Measurement, Setup

ALTERNATIVE_GROUPS: Mapping[str, tuple[str, str]] = {
    "adapters": (
        "LoRA and QLoRA, Llama-3.1-8B on one RTX 4090",
        "The recipe compiles its layers, and a 4090 boosts above the clock of its data sheet. "
        "Unpacking 4-bit weights is counted by its bytes at the rate of elementwise kernels: "
        "torchtune's own is slower. These rows are not counted above.",
    ),
    "streamed": (
        "Layers streamed from the host",
        "SlideFormer has fused kernels (Liger). MegaTrain counts 6 FLOP for each parameter and "
        "padded token, from which its time is worked out. Hosts are not named. These rows are not "
        "counted above.",
    ),
}

_FREE = {"device.bandwidth": 1e18}
_FUSED = (Alternative(text="kernels so fused that all but products is free", values=_FREE),)


def _adapters(strategy: str, tokens_per_second: float) -> Measurement:
    setup = Setup(
        model="llama-3.1-8b",
        machine="rtx4090-server",
        devices=1,
        strategy=strategy,
        batch_size=2,
        sequence=2048,
        checkpointing=True,
        kernels="compiled",
        options={"lora_rank": 8},
    )
    return Measurement(
        label=f"torchtune, {strategy} ({tokens_per_second:,.0f} tokens/s)",
        seconds=2 * 2048 / tokens_per_second,
        quantity="step",
        setup=setup,
        group="adapters",
        source="pytorch/torchtune, README: memory and training speed",
        assumption="rank 8 on all matrices of a layer, which the table does not say, and every "
        "layer recomputed; batch 2 of 2048 packed tokens",
        alternatives=_FUSED,
    )


def _slideformer(model: str, seconds: float) -> Measurement:
    setup = Setup(
        model=model,
        machine="rtx4090-server",
        devices=1,
        strategy="slideformer",
        batch_size=64,
        sequence=1024,
        checkpointing=True,
        kernels="liger",
        offloads_activations=True,
    )
    return Measurement(
        label=f"SlideFormer, {model}",
        seconds=seconds,
        quantity="step",
        setup=setup,
        group="streamed",
        source="flagos-ai/Megatron-LM-FL, docs/user-guide/slideformer_megatron_fl.md: SlideFormer "
        "in torch",
        assumption="an RTX 4090 bound to one socket of EPYC 7742, which is not named; 64 "
        "sequences of 1024 tokens, every layer recomputed, activations on the host",
        alternatives=_FUSED,
    )


_MEGATRAIN_PARAMS, _MEGATRAIN_TOKENS = 7_615_616_512, 148 * 1024

ALTERNATIVES: tuple[Measurement, ...] = (
    _adapters("lora", 3083),
    _adapters("qlora", 2413),
    _slideformer("qwen3-4b", 14.4166),
    _slideformer("qwen3-8b", 27.3295),
    _slideformer("qwen3-14b", 46.6349),
    Measurement(
        label="MegaTrain, Qwen2.5-7B (272 TFLOP/s)",
        seconds=6 * _MEGATRAIN_PARAMS * _MEGATRAIN_TOKENS / 272e12,
        quantity="step",
        setup=Setup(
            model="qwen2.5-7b",
            machine="hgx-h100",
            devices=1,
            strategy="megatrain",
            batch_size=148,
            sequence=1024,
            checkpointing=True,
        ),
        group="streamed",
        source="DLYuanGod/MegaTrain, README of April 2026, and arXiv 2604.05091",
        assumption="one H100 SXM bound to one socket of Xeon 8480C, which is not named; 148 "
        "sequences of 1024 tokens, with inputs of every fourth layer kept",
        alternatives=_FUSED,
    ),
)
