"""The GPU benchmark's models, data, machine and options."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evidence.benchmarks.record import link_bandwidth, scale_bandwidth
from experiments.training.parts.data.texts import stdlib_documents
from experiments.training.parts.data.tokens import ByteTokenizer
from experiments.training.parts.models.decoder import INIT_STD, DecoderConfig, LanguageModel
from experiments.training.settings.sizes import NUM_BYTE_TOKENS, ModelSize
from sim.models.workload import Workload
from zenflow.surface.arguments import default_host_threads

DESCRIPTION = "Decoders of 1B, 3B and 8B parameters on a GPU under every preset."
VOCAB = 32_000
"""Rows of the embedding; the text's bytes use the first few."""
_NUM_BATCHES = 8
_LOSS_TOKENS = 1024
"""Tokens of a piece, where the loss goes by pieces."""

_SMALL = ModelSize(hidden=256, layers=4, heads=4, ffn=704, tied=False)
_TINY = ModelSize(hidden=64, layers=2, heads=2, ffn=96, tied=False)
_EIGHT = ModelSize(hidden=4096, layers=32, heads=32, ffn=14_336, tied=False)
MODELS: Mapping[str, DecoderConfig] = {
    name: replace(DecoderConfig.of_size(size, vocab), num_key_value_heads=groups)
    for name, size, vocab, groups in (
        ("1b", ModelSize(hidden=2048, layers=18, heads=16, ffn=5632, tied=False), VOCAB, None),
        ("3b", ModelSize(hidden=3072, layers=26, heads=24, ffn=8192, tied=False), VOCAB, None),
        ("8b", _EIGHT, 128_256, 8),  # the shapes of Llama-3.1-8B
        ("3m", _SMALL, NUM_BYTE_TOKENS, None),
        ("tiny", _TINY, NUM_BYTE_TOKENS, None),
        ("tiny-grouped", _TINY, NUM_BYTE_TOKENS, 1),
    )
}
"""Models by name; matrices of their own at both ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model and its batch."""

    model: str
    batch: int
    sequence: int
    recomputes: bool = False
    """Whether backward computes activations again."""
    loss_tokens: int | None = None
    """Tokens of a piece of the loss, whose logits backward computes again; None keeps all."""

    def __str__(self) -> str:
        """Return the cell in a few words, as in '1b, 8 x 1024, recomputed'."""
        again = ", recomputed" if self.recomputes else ""
        return f"{self.model}, {self.batch} x {self.sequence}{again}"

    def workload(self) -> Workload:
        """Return the set-up as the simulator's workload."""
        return Workload.of_config(
            self.model,
            {"model_type": "llama", **MODELS[self.model].to_dict()},
            batch_size=self.batch,
            sequence=self.sequence,
            checkpointing=self.recomputes,
            loss="tokens" if self.loss_tokens is None else "parts",
        )


def _series(model: str, sequence: int, *batches: int, recomputed: int) -> tuple[Cell, ...]:
    """Return cells of some batches, and one with activations recomputed.

    They are from link-bound to compute-bound; the most telling come first, should time run out.
    """
    again = Cell(model=model, batch=recomputed, sequence=sequence, recomputes=True)
    first, *others = (Cell(model=model, batch=batch, sequence=sequence) for batch in batches)
    return (first, again, *others)


def _large(*batches: int) -> tuple[Cell, ...]:
    """Return cells of 8B parameters that keep neither activations nor logits."""
    return tuple(
        Cell(model="8b", batch=batch, sequence=1024, recomputes=True, loss_tokens=_LOSS_TOKENS)
        for batch in batches
    )


SERIES: Mapping[str, tuple[Cell, ...]] = {
    "1b-short": tuple(Cell(model="1b", batch=batch, sequence=1024) for batch in (8, 16, 1)),
    "1b-launches": (Cell(model="1b", batch=8, sequence=1024),),
    "8b-capped": _large(3, 6),
    "8b": _large(8),
    "8b-visits": _large(4, 8),
    "1b": _series("1b", 1024, 16, 8, 1, recomputed=32),
    "1b-long": _series("1b", 4096, 4, 2, recomputed=8),
    "3b": _series("3b", 1024, 8, 1, recomputed=8),
    "3b-long": _series("3b", 4096, 1, recomputed=4),
    "smoke": (Cell(model="tiny", batch=2, sequence=16),),
    "smoke-parts": (
        Cell(model="tiny-grouped", batch=2, sequence=16, recomputes=True, loss_tokens=12),
    ),
}
SMOKE = {"steps": 8, "warm_steps": 4, "compute_steps": 2, "knobs": {"min_split_elements": 1}}


class Bench:
    """A cell's data, and where it runs."""

    def __init__(
        self,
        cell: Cell,
        options: argparse.Namespace,
        seconds: float,
        *,
        end: float,
        device: str | None = None,
    ) -> None:
        """Put the cell's batches on the device.

        Args:
            cell: What to train.
            options: Of the command.
            seconds: For all runs of the cell together.
            end: When the whole series must be over, on the monotonic clock.
            device: Place of model and batches; without one the first GPU, a CPU if all is tiny.
        """
        self.end = end
        self.cell = cell
        self.options = options
        self.device = torch.device(device or ("cpu" if options.smoke else "cuda:0"))
        self._config = MODELS[cell.model]
        self.batches = [batch.to(self.device) for batch in _real_text(cell)]
        self.tokens = cell.batch * cell.sequence
        self.deadline = time.monotonic() + seconds

    def model(self) -> nn.Module:
        """Return the decoder in bfloat16, with the same weights at every call."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # no float32 model has to fit first
        try:
            with self.device:
                model = LanguageModel(self._config)
        finally:
            torch.set_default_dtype(before)
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
        inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
        if self.cell.loss_tokens is None:
            return _cross_entropy(model(inputs).logits.flatten(0, 1), targets, "mean")
        hidden = model.get_submodule("model")(inputs).flatten(0, 1)
        size = self.cell.loss_tokens
        sums = [
            checkpoint(_summed_loss, model.get_submodule("lm_head"), *piece, use_reentrant=False)
            for piece in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        return torch.stack(sums).sum() / len(targets)

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


def _summed_loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross entropy of some tokens by their last hidden states."""
    return _cross_entropy(head(hidden), targets, "sum")


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return functional.cross_entropy(logits.float(), targets, reduction=reduction)


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


def parse(arguments: Sequence[str] | None, runs: Sequence[str]) -> argparse.Namespace:
    """Return the command's options; runs may be chosen by their names."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    add = parser.add_argument
    add("series", nargs="?", choices=list(SERIES), help="cells to measure (default: 1b)")
    add("--out", type=Path, default=Path("runs/gpu_step"))
    add("--smoke", action="store_true", help="tiny, on the CPU: tests the script")
    add("--runs", nargs="+", choices=runs, help="these only")
    add("--steps", type=int, default=32, help="timed steps of each run, at most")
    add("--warm-steps", type=int, default=10)
    add("--compute-steps", type=int, default=10)
    add("--limit", type=float, default=500, help="seconds for all cells together")
    add("--host-threads", type=int, default=default_host_threads())
    add("--device-gib", type=float, help="use no more of the GPU's memory")
    add("--deterministic", action="store_true", help="take kernels that repeat every bit")
    add("--queue-depth", type=int, help="gradients that wait on the host, where it is not S")
    parser.set_defaults(knobs={})
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(SMOKE)
    series = options.series or "1b"
    options.series = series if series.startswith("smoke") or not options.smoke else "smoke"
    return options
