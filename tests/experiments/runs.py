"""A small text to train on, and runs of the command line in this process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import Tensor

from experiments.cli import main
from experiments.training.parts.files.checkpoint import latest_checkpoint

FAST = (
    "--model", "own:tiny", "--batch-size", "2", "--sequence", "32", "--eval-batches", "2",
    "--device", "cpu", "--device-threads", "1", "--schedule", "constant",
)  # fmt: skip
"""Flags of a run whose steps take milliseconds."""

MEASURED = "/window_sketch"
"""End of the names of what only a run has whose controller asks for measurements."""


def write_text(path: Path, num_lines: int = 400) -> Path:
    """Write a text that a byte model can learn something from."""
    path.write_text(
        "".join(f"line {n} says {n * n}, which is odd: {n % 2}\n" for n in range(num_lines))
    )
    return path


def train(*flags: object) -> Result:
    """Run ``zenflow train`` with these flags."""
    return CliRunner().invoke(main, ["train", *map(str, flags)])


def ended(code: int, *flags: object) -> str:
    """Run ``zenflow train``, which must end with this code; return what it said, in one line."""
    result = train(*flags)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def trained(out: Path, *flags: object) -> Path:
    """Run ``zenflow train`` into ``out`` and return it; the run must succeed."""
    ended(0, "--out", out, *flags)
    return out


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that a test may have left behind."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def summary(out: Path) -> dict[str, Any]:
    """Return a run's summary."""
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def saved_tensors(out: Path) -> dict[str, Tensor]:
    """Return every tensor of a run's checkpoint, the optimizer's included."""
    path = latest_checkpoint(out / "checkpoint")
    assert path is not None
    return load_file(path / "tensors.safetensors")


def equal(first: Path, second: Path) -> bool:
    """Return whether two runs ended with the same bits in weights and optimizer state.

    What only a run has whose controller asks for measurements does not count.
    """
    ours, theirs = (
        {name: own for name, own in saved_tensors(out).items() if not name.endswith(MEASURED)}
        for out in (first, second)
    )
    return ours.keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


def steps(out: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's steps.jsonl."""
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
