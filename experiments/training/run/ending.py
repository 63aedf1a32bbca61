"""Words at a run's end: a signal, memory that was refused, how its weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from experiments.training.parts.models.pretrained import has_tokenizer
from zenflow.errors import NoRoomError


def stop_notice(*, saves: bool) -> str:
    """Return the words at the first signal of a run that then saves, or does not."""
    if saves:
        return (
            "Stopping: the step under way is finished, then everything is saved. Ctrl-C again, "
            "after a second, quits at once and loses the steps since the last save."
        )
    return (
        "Stopping: the step under way is finished, and nothing is saved for resuming, as "
        "--no-checkpoint asked. Ctrl-C again, after a second, quits at once."
    )


def out_of_memory(error: Exception) -> NoRoomError | None:
    """Return the message on memory that was refused; None for another error."""
    words = str(error)
    states = ""
    if isinstance(error, torch.OutOfMemoryError):
        place = "the device's"
    elif isinstance(error, MemoryError) or "can't allocate memory" in words:
        place = "the host's"
        states = "states on a drive (--topk-ratio 0 --state-dir FOLDER), "
    else:
        return None
    first = (words.splitlines() or ["MemoryError"])[0]
    return NoRoomError(
        f"{place} memory is too small for this run ({first}): try {states}--checkpointing, a "
        "smaller --batch-size or --sequence with more --grad-accum, or a smaller model; zenflow "
        "plan says what a machine can do"
    )


def how_to_load(model: Path) -> str:
    """Return the lines that load a run's weights, and its tokenizer where it has one."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    is_labelled = "SequenceClassification" in str(config.get("architectures"))
    auto = "AutoModelForSequenceClassification" if is_labelled else "AutoModelForCausalLM"
    lines = [f'model = {auto}.from_pretrained("{model}")']
    if has_tokenizer(model):
        auto += ", AutoTokenizer"
        lines += [f'tokenizer = AutoTokenizer.from_pretrained("{model}")']
    else:
        lines[0] += "  # its tokens are bytes"
    code = [f"from transformers import {auto}", *lines]
    return "Load the model:\n" + "\n".join(f"    {line}" for line in code)
