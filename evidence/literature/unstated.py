"""What published sources leave open of what a prediction needs, by group of measurements.

- device: kind, power limit or slot of the devices or of their board, or another device than named.
- host: its processor, where it computes or where launches bound the step.
- network: what joins several hosts.
- batch: number or length of sequences, or whether padding is computed.
- recomputation: which layers are recomputed, or what an adapter is on.
- time: what a figure is of, or what it holds beside steps, or a spread of more than a tenth.

Whoever predicts a run of their own knows all of it. Errors of the model are none of these.
"""

from __future__ import annotations

from collections.abc import Mapping

UNSTATED: Mapping[str, tuple[str, ...]] = {
    "llama": ("device", "batch"),
    "thunder": ("device",),
    "slideformer": ("host",),
    "host": ("host",),
    "kernels-apart": ("host",),
    "adapters": ("recomputation",),
    "streamed": ("host",),
    "foundry-h100": ("network",),
    "bert": ("host",),
    "opt": ("host",),
    "course-a100": ("host",),
    "course-5090": ("host", "time"),
    "ddp-gpt2": ("device",),
    "ddp-bert": ("device",),
    "fsdp-400": ("network",),
    "a800": ("device", "time"),
    "titan-rtx": ("host", "time"),
    "desktop-vit": ("host",),
    "cpu-master": ("host", "recomputation"),
    "fsdp-size": ("device", "host", "time"),
    "falcon": ("host", "batch", "recomputation"),
    "gemini": ("host", "time"),
    "jean-zay": ("time",),
    "open-llama": ("host", "network", "batch"),
    "azure": ("batch", "time"),
    "trainer-8k": ("device", "time"),
    "recipes": ("device", "recomputation"),
    "automodel": ("time",),
    "trainer-v100": ("host",),
    "squad-v100": ("device",),
    "tinyllama": ("network",),
    "bert-pretraining": ("batch",),
    "few-h100": ("device", "recomputation"),
    "partial": ("device",),
    "book-gpt2": ("device", "time"),
    "lecture-gpt2": ("device",),
    "engine-layers": ("device",),
    "thunder-7b": ("device",),
    "factory-7b": ("device", "batch"),
    "open-llama-7b": ("batch", "recomputation"),
    "qwen3-ddp": ("batch",),
    "titan-gpt2": ("recomputation",),
    "speedrun-4090": ("device",),
    "p4d": ("device",),
    "titan-a100": ("network",),
    "fairscale": ("host",),
    "bert-8bit": ("host", "time"),
    "llama-405b": ("host", "network"),
    "tune-70b": ("host", "batch"),
    "theta": ("device", "host"),
    "silver": ("host",),
    "sve": ("host",),
}
"""Names of what is open; groups without any state all that a prediction needs."""

LISTED_LATE = ("a800", "squad-v100")
"""Groups that were listed when their errors had been seen: no slot of the devices is given."""
