"""The study: which runs there are, and carrying out those that are missing."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.lab.variants import Variant
from experiments.output.files import write_json
from experiments.studies.sst2.data import Sentences
from experiments.studies.sst2.run import Task, carry_out, emulated_link, result_of
from experiments.training.settings import TrainSettings

PROTOCOL = TrainSettings(
    strategy="on_device",
    task="classification",
    sequence=64,  # the longest of SST-2's sentences has 67 tokens, and 1 in 1,000 over 60
    batch_size=32,
    epochs=3,
    lr=2e-5,
    betas=(0.9, 0.999),
    weight_decay=0.01,
    schedule="linear",
    warmup=0.1,
    max_grad_norm=1.0,
    device_threads=1,
    host_threads=1,
    timeline_steps=0,
)
"""How every strategy fine-tunes; what BERT's own fine-tuning uses."""

SMOKE = replace(PROTOCOL, model="own:tiny", batch_size=8, epochs=3, lr=3e-3, sequence=48)
"""The same for a model made on the spot from random weights, which takes larger steps."""

_SHARED = (
    "epochs", "lr", "schedule", "warmup", "max_grad_norm", "batch_size", "sequence", "betas",
    "eps", "weight_decay", "dtype",
)  # fmt: skip
"""What a record says of the protocol."""
_LINK = "link.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is compared on what."""

    sentences: Sentences
    variants: Sequence[Variant]
    seeds: Sequence[int]
    protocol: TrainSettings
    """Of every run but for strategy and seed; ``model`` is a place of this machine."""
    model: str
    """What the model is called in records."""
    model_digest: str | None = None

    def tasks(self, folder: Path, link: float | None) -> list[Task]:
        """Return every run: seed by seed, so that a study cut short compares what it has.

        Args:
            folder: Below it each run has a folder of its own.
            link: Bytes/s each way of tuned runs' emulated link; the others have none, as what they
                compute does not depend on it.
        """
        return [
            Task(
                variant=variant.name,
                settings=replace(
                    self.protocol,
                    strategy=variant.strategy,
                    knobs=dict(variant.knobs),
                    controller=variant.controller,
                    link=(link, link) if variant.controller and link else None,
                    seed=seed,
                ),
                sentences=self.sentences,
                folder=folder / f"{variant.name} seed {seed}".replace(" ", "_"),
                identity=self.identity(variant, seed),
            )
            for seed in self.seeds
            for variant in self.variants
        ]

    def header(self) -> dict[str, Any]:
        """Return what all runs share, as plain JSON values."""
        protocol = self.protocol.to_dict()
        return {
            "model": self.model,
            "model_sha256": self.model_digest,
            "data": self.sentences.name,
            "data_sha256": self.sentences.digest(),
            "num_train": len(self.sentences.train),
            "num_test": len(self.sentences.test),
            "num_dropped": self.sentences.num_dropped,
            **{name: protocol[name] for name in _SHARED},
        }

    def identity(self, variant: Variant, seed: int) -> dict[str, Any]:
        """Return what decides one run's result, timing aside."""
        own = {
            "strategy": variant.strategy,
            "knobs": dict(variant.knobs),
            "controller": variant.controller,
            "seed": seed,
        }
        return {**self.header(), **own}


def complete(study: Study, folder: Path, workers: int) -> Iterator[dict[str, Any]]:
    """Yield the row of every run: finished ones at once, the others as they are made.

    Raises:
        ConfigError: The folder holds runs of another study, or a run can't be made.
    """
    found = {task.folder: result_of(task) for task in study.tasks(folder, None)}
    yield from (row for row in found.values() if row is not None)
    if all(found.values()):
        return
    folder.mkdir(parents=True, exist_ok=True)
    is_tuned = any(variant.controller for variant in study.variants)
    tasks = study.tasks(folder, _link(study, folder) if is_tuned else None)
    yield from _made([task for task in tasks if found[task.folder] is None], workers)


def _link(study: Study, folder: Path) -> float | None:
    """Return the link of tuned runs, measured once and then kept for the whole study."""
    path = folder / _LINK
    if not path.is_file():
        settings = replace(study.protocol, seed=study.seeds[0])
        write_json(path, {"bytes_per_second": emulated_link(settings, study.sentences)})
    found: Mapping[str, float | None] = json.loads(path.read_text(encoding="utf-8"))
    return found["bytes_per_second"]


def _made(tasks: Sequence[Task], workers: int) -> Iterator[dict[str, Any]]:
    if workers == 1:
        yield from map(carry_out, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context) as pool:
        try:
            for future in as_completed([pool.submit(carry_out, task) for task in tasks]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()  # a run notes it, ends its step and leaves nothing behind
            raise
