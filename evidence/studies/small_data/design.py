"""Tasks, rules and protocol of the study.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from evidence.studies.sst2.data import Sentences, cut, made_up, read_folder
from evidence.studies.sst2.design import PROTOCOL as OF_BERT
from evidence.studies.sst2.design import SMOKE as OF_BERT_SMOKE
from evidence.studies.sst2.model import PACKAGED, locate, weights_digest
from experiments.lab.study import Cell, Data, NeedsInputError, Scope
from experiments.training.settings.training import TrainSettings
from zenflow.errors import ConfigError

ADAMW = "AdamW"
NUM_TRAIN, NUM_TEST = 1000, 800
"""Numbers of sentences of each task at most."""
POINTS_PER_EPOCH = 2
"""Number of tests in each pass over the sentences."""
PROTOCOL = replace(OF_BERT, lr=1e-4, warmup=0.06, sequence=96)
SMOKE = replace(OF_BERT_SMOKE, epochs=1, knobs={"min_split_elements": 1024})
_SHARED = ("epochs", "lr", "schedule", "warmup", "max_grad_norm", "batch_size", "sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A rule that trains: torch's AdamW, the engine, or a plain loop."""

    name: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the preset `zenflow` that differ."""
    rule: Mapping[str, Any] | None = None
    """Fields of a plain loop's `Rule`; None for the engine's own."""
    most_seeds: int | None = None
    """Number of seeds at most: a cause by itself needs fewer than a claim."""
    rate: float = 1.0
    """Factor on the learning rate."""


_PLAIN = {"delay_share": 0.0, "corrects_bias": False}
"""Rule whose forwards all count alike, and whose leads know no bias correction."""


def _of(interval: int, name: str, *, most_seeds: int | None = 1, **rule: Any) -> Variant:
    return Variant(
        name=f"{name}, S = {interval}", knobs={"update_interval": interval}, rule=rule,
        most_seeds=most_seeds,
    )  # fmt: skip


PLAIN = "plain mean"
"""Name of that rule."""
VARIANTS: Sequence[Variant] = (
    Variant(name=ADAMW),
    *(Variant(name=f"zenflow, S = {s}", knobs={"update_interval": s}) for s in (4, 16)),
    *(_of(s, PLAIN, most_seeds=None, **_PLAIN) for s in (4, 16)),
    Variant(name="zenflow, S = 1", knobs={"update_interval": 1}, most_seeds=2),
    *(Variant(name=f"zenflow, k = {k:g}", knobs={"topk_ratio": k}, most_seeds=2)
      for k in (0.0, 0.5)),
    *(_of(s, "bias correction alone", delay_share=0.0) for s in (4, 16)),
    *(_of(s, "delay alone", corrects_bias=False) for s in (4, 16)),
    *(_of(s, "exact second moment", fresh="exact") for s in (4, 16)),
    Variant(name="AdamW, 1.25 x the rate", rate=1.25, most_seeds=1),
)  # fmt: skip
"""Rules, the most telling first."""
_SMOKE_VARIANTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Model, tasks and protocol that all runs share."""

    tasks: tuple[Sentences, ...]
    """Sentences of each task, to train and to test on."""
    protocol: TrainSettings
    """Settings of every run but for rule and seed; ``model`` is a place of this machine."""
    model: str
    """Name of the model in records."""
    model_digest: str | None = None
    """Digest of the model's weights, where they are local."""

    def header(self) -> Data:
        """Return everything that decides all runs."""
        protocol = self.protocol.to_dict()
        return {
            "model": self.model,
            "model_sha256": self.model_digest,
            "tasks": [
                {
                    "name": task.name, "sha256": task.digest(), "num_train": len(task.train),
                    "num_test": len(task.test),
                }
                for task in self.tasks
            ],
            **{name: protocol[name] for name in _SHARED},
        }  # fmt: skip

    def cells(self, seeds: Sequence[int], variants: Sequence[Variant]) -> list[Cell]:
        """Return every run, those of claims first, seed by seed: a part of them says something."""
        found = []
        for seed, task, variant in product(seeds, self.tasks, variants):
            if seed in seeds[: variant.most_seeds]:
                rate = self.protocol.lr * variant.rate
                training = replace(self.protocol, seed=seed, lr=rate)
                settings = {"task": task.name, "variant": variant.name, "seed": seed}
                found.append(Cell(settings=settings, work=(training, task, variant)))
        return sorted(found, key=lambda cell: cell.work[2].most_seeds is not None)


@lru_cache(maxsize=2)
def subject(scope: Scope) -> Subject:
    """Return the model, tasks and protocol of a scope.

    Raises:
        NeedsInputError: It names no folder.
        ConfigError: A task or the model can't be read.
    """
    if scope.smoke:
        return Subject(tasks=(made_up(40, 16),), protocol=SMOKE, model=SMOKE.model)
    if scope.data_dir is None:
        raise NeedsInputError(
            "this study trains on small tasks: give --data-dir FOLDER, which has a folder of each "
            "task with train.tsv and test.tsv (lines of one or two texts and 0 or 1, tabs between "
            "them), or try --smoke, which needs none"
        )
    model = scope.model or PACKAGED
    location = locate(model)
    return Subject(
        tasks=tuple(_tasks(scope.data_dir.expanduser())),
        protocol=replace(PROTOCOL, model=location),
        model=model,
        model_digest=weights_digest(location),
    )


def _tasks(folder: Path) -> list[Sentences]:
    found = sorted(path.parent for path in folder.glob("*/train.tsv"))
    if not found:
        raise ConfigError(
            f"{folder} must hold a folder of each task with train.tsv and test.tsv, but has none: "
            "check --data-dir"
        )
    return [cut(read_folder(path, most_texts=2), NUM_TRAIN, NUM_TEST) for path in found]


def variants(scope: Scope) -> Sequence[Variant]:
    """Return the rules that a scope compares."""
    return VARIANTS[:_SMOKE_VARIANTS] if scope.smoke else VARIANTS
