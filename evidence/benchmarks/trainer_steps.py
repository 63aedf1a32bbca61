"""Host time of trainers' own code in every micro-batch and step, beside a plain loop.

    python -m evidence.benchmarks.trainer_steps [--rounds 9] [--steps 40] [--out FILE]

transformers' Trainer and TRL's SFTTrainer, with their default settings but for recomputation,
train a tiny Llama of one layer on a CPU. A loop does that too, with the same batches, loss,
clipping, AdamW and schedule, so the time that a trainer takes beyond the loop's is Python. More
layers hang on the model and are never called, because the time that they would compute varies by
more than a trainer takes. Runs with and without them, with one micro-batch a step and with
several, tell the parts apart: of a step, of a micro-batch, and of each module in a micro-batch, as
a trainer calls `model.train()` before every one. The simulator takes the parts from here
(`sim.timing.trainers`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from evidence.benchmarks.module_launches import model_of
from evidence.benchmarks.record import setting, take_turns
from experiments.output.files import write_json

LAYERS, MICRO_BATCHES = (1, 33), (1, 4)
"""Layers of the models, and micro-batches of a step."""
PARTS = ("step", "micro_batch", "module")
"""Parts of a trainer's seconds: of a step, of a micro-batch, and of a module in a micro-batch."""
_WARM_STEPS = 5
_LENGTH = 8
_FAMILY = "llama"
_untyped: Any = transformers

Point = tuple[int, int]
"""Layers, and micro-batches of a step."""


class Clock(transformers.TrainerCallback):
    """Notes this thread's time at the end of every step."""

    def __init__(self) -> None:
        """Begin without a time."""
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time."""
        self.times.append(time.thread_time())

    def seconds(self) -> float:
        """Return the mean time of a step behind those that warm up."""
        times = self.times[_WARM_STEPS - 1 :]
        return (times[-1] - times[0]) / (len(times) - 1)


def rows_of(count: int) -> list[dict[str, list[int]]]:
    """Return so many rows of tokens."""
    return [{"input_ids": [1] * _LENGTH, "labels": [1] * _LENGTH} for _ in range(count)]


def tiny(layers: int) -> nn.Module:
    """Return a model that computes with the first of so many layers."""
    model = model_of(_FAMILY, "sdpa", 1)
    if layers > 1:
        model.unused = model_of(_FAMILY, "sdpa", layers - 1)
    return model


def trainer_settings(point: Point, steps: int, folder: str) -> dict[str, Any]:
    """Return the settings that both trainers share."""
    return {
        "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": point[1], "use_cpu": True, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "optim": "adamw_torch",
    }  # fmt: skip


def with_loop(point: Point, steps: int) -> float:
    """Return the seconds of a step of a plain loop."""
    layers, count = point
    model = tiny(layers).train()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    batches = _batches(steps * count)
    clock = Clock()
    for _ in range(steps):
        for batch in islice(batches, count):
            (model(**batch).loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.on_step_end()
    return clock.seconds()


def _batches(count: int) -> Iterator[Any]:
    rows: Any = rows_of(count)
    collate = _untyped.default_data_collator
    return iter(torch.utils.data.DataLoader(rows, shuffle=True, collate_fn=collate))


def with_transformers(point: Point, steps: int) -> float:
    """Return the seconds of a step of transformers' Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(**trainer_settings(point, steps, folder))
        return _trained(transformers.Trainer, point, settings, rows_of(steps * point[1]))


def with_trl(point: Point, steps: int) -> float:
    """Return the seconds of a step of TRL's SFTTrainer."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list(rows_of(steps * point[1]))
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            **trainer_settings(point, steps, folder), bf16=False, gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        return _trained(SFTTrainer, point, settings, rows, processing_class=_tokenizer())


def _trained(trainer: Any, point: Point, settings: Any, rows: Any, **options: Any) -> float:
    clock = Clock()
    made = trainer(
        model=tiny(point[0]), args=settings, train_dataset=rows,
        callbacks=[clock], **options,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        made.train()
    return clock.seconds()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = models.WordLevel({str(token): token for token in range(64)}, unk_token="0")
    return _untyped.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="0", pad_token="0", eos_token="2"
    )


LOOP = "loop"
RUNS: Mapping[str, Callable[[Point, int], float]] = {
    LOOP: with_loop,
    "transformers": with_transformers,
    "trl": with_trl,
}
"""Functions that return the seconds of a step, by the simulator's names of trainers."""


def measure(steps: int, rounds: int) -> dict[str, dict[Point, list[float]]]:
    """Return seconds of a step by trainer and point, of every round; all take turns."""
    points = [(layers, count) for layers in LAYERS for count in MICRO_BATCHES]
    turns = {
        (name, point): partial(run, point, steps)
        for name, run in RUNS.items()
        for point in points
    }  # fmt: skip
    found = take_turns(turns, rounds, warm_rounds=1)
    return {name: {point: found[name, point] for point in points} for name in RUNS}


def parts_of(excess: Mapping[Point, float], modules: Mapping[int, int]) -> dict[str, float]:
    """Return the seconds of `PARTS` that add up to a trainer's excess over a loop, nearest.

    Args:
        excess: Seconds of a step beyond the loop's.
        modules: Number of a model's modules, by its layers.

    >>> points = [(layers, count) for layers in (1, 33) for count in (1, 4)]
    >>> modules = {1: 20, 33: 440}
    >>> found = parts_of({(n, g): 5.0 + g * (3.0 + 2.0 * modules[n]) for n, g in points}, modules)
    >>> {name: round(value, 6) for name, value in found.items()}
    {'step': 5.0, 'micro_batch': 3.0, 'module': 2.0}
    """
    rows = np.array([(1.0, count, count * modules[layers]) for layers, count in excess])
    found = np.linalg.lstsq(rows, np.array(list(excess.values())), rcond=None)[0]
    return dict(zip(PARTS, map(float, found), strict=True))


def summarise(found: Mapping[str, Mapping[Point, Sequence[float]]]) -> dict[str, Any]:
    """Return each trainer's seconds and parts: of the medians over rounds, and of each round."""
    medians = {
        name: {point: statistics.median(seconds) for point, seconds in own.items()}
        for name, own in found.items()
    }
    modules = {layers: sum(1 for _ in tiny(layers).modules()) for layers in LAYERS}
    summary: dict[str, Any] = {}
    for name, own in found.items():
        steps = {
            f"{n} layers, {count} micro-batches": t for (n, count), t in medians[name].items()
        }
        summary[name] = {"step_seconds": steps}
        if name == LOOP:
            continue
        rounds: dict[str, list[float]] = {part: [] for part in PARTS}
        for index in range(len(own[LAYERS[0], MICRO_BATCHES[0]])):
            one = {point: own[point][index] - found[LOOP][point][index] for point in own}
            for part, value in parts_of(one, modules).items():
                rounds[part].append(value)
        excess = {point: medians[name][point] - medians[LOOP][point] for point in own}
        summary[name] |= {"parts": parts_of(excess, modules), "rounds": rounds}
    return summary


def table(summary: Mapping[str, Any]) -> str:
    """Return a line for each trainer, in milliseconds."""
    lines = [f"{'ms beyond a plain loop':24}" + "".join(f"{part:>26}" for part in PARTS)]
    for name, own in summary.items():
        if name != LOOP:
            lines.append(f"{name:24}" + "".join(f"{_cell(own, part):>26}" for part in PARTS))
    for name, own in summary.items():
        times = [f"{1e3 * seconds:.2f}" for seconds in own["step_seconds"].values()]
        lines.append(f"{name:24}" + "".join(f"{each:>12}" for each in times))
    points = ", ".join(next(iter(summary.values()))["step_seconds"])
    lines.append(f"above, the parts: medians and quartiles; below them ms of a step with {points}")
    return "\n".join(lines)


def _cell(own: Mapping[str, Any], part: str) -> str:
    values = [1e3 * value for value in own["rounds"][part]]
    low, high = np.percentile(values, [25, 75])
    return f"{1e3 * own['parts'][part]:.4f} ({low:.4f} to {high:.4f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _untyped.logging.set_verbosity_error()
    summary = summarise(measure(chosen.steps, chosen.rounds))
    print(table(summary))
    if chosen.out is not None:
        facts = setting(rounds=chosen.rounds, steps=chosen.steps)
        write_json(chosen.out, {**facts, "trainers": summary})


if __name__ == "__main__":
    main()
