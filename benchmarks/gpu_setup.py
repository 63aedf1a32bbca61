"""The GPU benchmark's model, data, machine and options."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.record import copy_bandwidth, link_bandwidth, spread, usable_cores
from experiments.models import INIT_STD, DecoderConfig, LanguageModel
from zenflow.config import PRESETS

DESCRIPTION = "A decoder of 1B parameters on a GPU under every preset."
SMOKE = {
    "layers": 2, "hidden": 64, "heads": 2, "ffn": 96, "vocab": 128, "sequence": 16, "batch": 2,
    "steps": 12, "warm_steps": 4, "knobs": {"min_split_elements": 1},
}  # fmt: skip


class Bench:
    """The model's shape, its data, and where it runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cpu" if options.smoke else "cuda:0")
        generator = torch.Generator().manual_seed(1)
        shape = (8, options.batch, options.sequence + 1)
        tokens = torch.randint(options.vocab, shape, generator=generator)
        self.batches = list(tokens.to(self.device))
        self.tokens = options.batch * options.sequence
        self.deadline = time.monotonic() + options.limit

    def model(self) -> nn.Module:
        """Return the decoder in bfloat16, with the same weights at every call."""
        options = self.options
        config = DecoderConfig(
            vocab_size=options.vocab,
            hidden_size=options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            intermediate_size=options.ffn,
            tie_word_embeddings=False,
        )
        with self.device:
            model = LanguageModel(config).to(torch.bfloat16)
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.no_grad():
            for param in model.parameters():
                if param.ndim > 1:
                    param.normal_(0, INIT_STD, generator=generator)
        return model

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Return the mean cross entropy of the step's batch, float32."""
        tokens = self.batches[step % len(self.batches)]
        logits = model(tokens[:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give the memory of the run before back."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        """Count peak memory from now on."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.max_memory_allocated(self.device) if on_gpu else None


def compute_seconds(bench: Bench) -> dict[str, Any]:
    """Return the time of forward and backward alone: no optimizer can be faster."""
    bench.free()
    model = bench.model()
    seconds = []
    for step in range(3 + bench.options.compute_steps):
        bench.synchronize()
        started = time.perf_counter()
        bench.loss(model, step).backward()
        bench.synchronize()
        seconds.append(time.perf_counter() - started)
        for param in model.parameters():
            param.grad = None
    return spread(seconds[3:])


def speeds_of(bench: Bench) -> dict[str, Any]:
    """Return the speeds of this machine that bound a step."""
    size = 1 << (20 if bench.options.smoke else 28)
    threads = torch.get_num_threads()
    torch.set_num_threads(bench.options.host_threads)
    host = copy_bandwidth(4 * size)
    torch.set_num_threads(threads)
    return {
        "link": link_bandwidth(bench.device, size),
        "host_copy_bytes_per_second": host,
        "compute_seconds": compute_seconds(bench),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/gpu_step"))
    add("--smoke", action="store_true", help="tiny, on the CPU: tests the script")
    add("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    add("--steps", type=int, default=32, help="timed steps of each run")
    add("--warm-steps", type=int, default=10)
    add("--compute-steps", type=int, default=10)
    add("--limit", type=float, default=400, help="seconds for all runs together")
    add("--host-threads", type=int, default=max(1, usable_cores() - 1))
    for name, value in (("layers", 18), ("hidden", 2048), ("heads", 16), ("ffn", 5632)):
        add(f"--{name}", type=int, default=value)
    for name, value in (("vocab", 32_000), ("sequence", 1024), ("batch", 8)):
        add(f"--{name}", type=int, default=value)
    parser.set_defaults(knobs={})
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(SMOKE)
    return options
