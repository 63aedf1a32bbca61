"""The GPU benchmark's models, data, machine and options."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.record import link_bandwidth, scale_bandwidth, spread
from experiments.calibration.parts import synchronize
from experiments.training.data.texts import stdlib_documents
from experiments.training.data.tokens import ByteTokenizer
from experiments.training.models.decoder import INIT_STD, DecoderConfig, LanguageModel
from experiments.training.settings.training import NUM_BYTE_TOKENS, ModelSize
from sim.models.workload import Workload
from zenflow.config import PRESETS
from zenflow.surface.arguments import default_host_threads

DESCRIPTION = "Decoders of 1B and 3B parameters on a GPU under every preset."
VOCAB = 32_000
"""Rows of the embedding; the text's bytes use the first few."""
_NUM_BATCHES = 8
_STRETCHES = 3
"""Number of times that some steps of the fused baseline are timed together."""


MODELS: Mapping[str, DecoderConfig] = {
    name: DecoderConfig.of_size(size, vocab)
    for name, size, vocab in (
        ("1b", ModelSize(hidden=2048, layers=18, heads=16, ffn=5632, tied=False), VOCAB),
        ("3b", ModelSize(hidden=3072, layers=26, heads=24, ffn=8192, tied=False), VOCAB),
        ("tiny", ModelSize(hidden=64, layers=2, heads=2, ffn=96, tied=False), NUM_BYTE_TOKENS),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model and its batch."""

    model: str
    batch: int
    sequence: int
    recomputes: bool = False
    """Whether backward computes activations again."""

    def __str__(self) -> str:
        """Return the cell in a few words, as in '1b, 8 x 1024, recomputed'."""
        again = ", recomputed" if self.recomputes else ""
        return f"{self.model}, {self.batch} x {self.sequence}{again}"

    def workload(self) -> Workload:
        """Return what the simulator takes of it."""
        return Workload.of_config(
            self.model,
            {"model_type": "llama", **MODELS[self.model].to_dict()},
            batch_size=self.batch,
            sequence=self.sequence,
            checkpointing=self.recomputes,
        )


def _series(model: str, sequence: int, *batches: int, recomputed: int) -> tuple[Cell, ...]:
    """Return cells of some batches, and one with activations recomputed.

    They are from link-bound to compute-bound; the most telling come first, should time run out.
    """
    again = Cell(model=model, batch=recomputed, sequence=sequence, recomputes=True)
    first, *others = (Cell(model=model, batch=batch, sequence=sequence) for batch in batches)
    return (first, again, *others)


SERIES: Mapping[str, tuple[Cell, ...]] = {
    "1b": _series("1b", 1024, 16, 8, 1, recomputed=32),
    "1b-long": _series("1b", 4096, 4, 2, recomputed=8),
    "3b": _series("3b", 1024, 8, 1, recomputed=8),
    "3b-long": _series("3b", 4096, 1, recomputed=4),
    "smoke": (Cell(model="tiny", batch=2, sequence=16),),
}
SMOKE = {"steps": 16, "warm_steps": 4, "knobs": {"min_split_elements": 1}}


class Bench:
    """A cell's data, and where it runs."""

    def __init__(
        self, cell: Cell, options: argparse.Namespace, seconds: float, *, end: float
    ) -> None:
        """Put the cell's batches on the device.

        Args:
            cell: What to train.
            options: Of the command.
            seconds: For all runs of the cell together.
            end: When the whole series must be over, on the monotonic clock.
        """
        self.end = end
        self.cell = cell
        self.options = options
        self.device = torch.device("cpu" if options.smoke else "cuda:0")
        self._config = MODELS[cell.model]
        self.batches = [batch.to(self.device) for batch in _real_text(cell)]
        self.tokens = cell.batch * cell.sequence
        self.deadline = time.monotonic() + seconds

    def model(self) -> nn.Module:
        """Return the decoder in bfloat16, with the same weights at every call."""
        with self.device:
            model = LanguageModel(self._config).to(torch.bfloat16)
        model.model.recomputes = self.cell.recomputes
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

    def free(self) -> None:
        """Give the memory of the run before back."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        """Count peak memory from now on, on the device and of this process."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:  # not Linux, or not allowed: the host's peak is then the process's
            return

    def peak_bytes(self) -> int | None:
        """Return the peak of device memory; None on a CPU."""
        on_gpu = self.device.type == "cuda"
        return torch.cuda.max_memory_allocated(self.device) if on_gpu else None

    def describe(self) -> dict[str, Any]:
        """Return the cell, JSON-ready."""
        return {"name": str(self.cell), **asdict(self.cell), "decoder": self._config.to_dict()}


def host_peak_bytes() -> int | None:
    """Return the peak of this process's resident memory; None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return next(found, None)


def _real_text(cell: Cell) -> list[Tensor]:
    """Return batches of one token more than a sequence, (B, L + 1), of Python's own source."""
    shape = (_NUM_BATCHES, cell.batch, cell.sequence + 1)
    needed = _NUM_BATCHES * cell.batch * (cell.sequence + 1)
    tokens = ByteTokenizer().stream(stdlib_documents().train)
    return list(tokens[:needed].long().view(shape))


def compute_seconds(bench: Bench) -> dict[str, Any]:
    """Return the time of forward and backward alone: no optimizer can be faster."""
    bench.free()
    model = bench.model()
    seconds = []
    for step in range(3 + bench.options.compute_steps):
        synchronize(bench.device)
        started = time.perf_counter()
        bench.loss(model, step).backward()
        synchronize(bench.device)
        seconds.append(time.perf_counter() - started)
        for param in model.parameters():
            param.grad = None
    return spread(seconds[3:])


def fused_baseline(bench: Bench, learning_rate: float, max_norm: float) -> dict[str, Any] | None:
    """Return times and memory of steps with torch's fused AdamW, as many people run it.

    Its state has the model's own dtype, and there are no float32 masters. So it moves fewer bytes
    than `on_device`, and rounds more. Steps follow each other without a wait, as in training.

    Returns:
        The record; None where it does not fit.
    """
    bench.free()
    try:
        model = bench.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
        bench.forget_peak()
        seconds = []
        for _ in range(1 + _STRETCHES):
            synchronize(bench.device)
            started = time.perf_counter()
            for step in range(bench.options.compute_steps):
                bench.loss(model, step).backward()
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
            synchronize(bench.device)
            seconds.append((time.perf_counter() - started) / bench.options.compute_steps)
    except torch.OutOfMemoryError:
        return None
    timed = spread(seconds[1:])
    return {
        "step_seconds": timed,
        "tokens_per_second": bench.tokens / timed["median"],
        "peak_device_bytes": bench.peak_bytes(),
    }


def speeds_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the speeds of this machine's link and host memory, which bound a step."""
    size = 1 << (20 if options.smoke else 28)
    threads = torch.get_num_threads()
    torch.set_num_threads(options.host_threads)
    host = scale_bandwidth(4 * size)
    torch.set_num_threads(threads)
    return {
        "link": link_bandwidth(torch.device("cpu" if options.smoke else "cuda:0"), size),
        "host_bytes_per_second": host,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    add = parser.add_argument
    series = [name for name in SERIES if name != "smoke"]
    add("series", nargs="?", choices=series, default="1b", help="cells to measure")
    add("--out", type=Path, default=Path("runs/gpu_step"))
    add("--smoke", action="store_true", help="tiny, on the CPU: tests the script")
    add("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    add("--steps", type=int, default=32, help="timed steps of each run, at most")
    add("--warm-steps", type=int, default=10)
    add("--compute-steps", type=int, default=10)
    add("--limit", type=float, default=500, help="seconds for all cells together")
    add("--host-threads", type=int, default=default_host_threads())
    parser.set_defaults(knobs={})
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(SMOKE, series="smoke")
    return options
