"""Sentences, model and protocol that all runs share.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from evidence.studies.sst2.data import Sentences, cut, made_up, read_folder, read_hub
from evidence.studies.sst2.model import PACKAGED, locate, weights_digest
from experiments.lab.study import Cell, Data, NeedsInputError, Scope
from experiments.lab.variants import STRATEGIES, Variant, parse_variants
from experiments.training.settings.training import TrainSettings
from zenflow.errors import ConfigError

NUM_TRAIN = 2560
"""Number of training sentences: all strategies and seeds then take about 100 minutes on two
cores."""
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
"""Protocol of every strategy's fine-tuning: that of BERT's own."""

SMOKE = replace(PROTOCOL, model="own:tiny", batch_size=8, epochs=3, lr=3e-3, sequence=48)
"""Protocol for a model made on the spot from random weights, which takes larger steps."""

_SHARED = (
    "epochs", "lr", "schedule", "warmup", "max_grad_norm", "batch_size", "sequence", "betas",
    "eps", "weight_decay", "dtype",
)  # fmt: skip
"""Facts of the protocol that a record has."""
_SMOKE_STRATEGIES = "zero_offload,zenflow S=8,auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Model, data and protocol that all runs share."""

    sentences: Sentences
    """Sentences to train and to test on."""
    protocol: TrainSettings
    """Settings of every run but for strategy and seed; ``model`` is a place of this machine."""
    model: str
    """Name of the model in records."""
    model_digest: str | None = None
    """Digest of the model's weights, where they are local."""
    variants: tuple[Variant, ...]
    """Strategies that are compared."""

    def header(self) -> Data:
        """Return everything that decides all runs, timing aside."""
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

    def cells(self, seeds: Sequence[int]) -> list[Cell]:
        """Return every run: seed by seed, so that a study cut short compares what it has.

        Each takes its settings, without a link, and the sentences. Tuned runs need an emulated
        link; the others have none, as what they compute does not depend on it.
        """
        first = replace(self.protocol, seed=seeds[0])
        link = Cell(settings={"part": "link"}, work=(first, self.sentences))
        found = []
        for seed in seeds:
            for variant in self.variants:
                training = replace(
                    self.protocol,
                    strategy=variant.strategy,
                    knobs=dict(variant.knobs),
                    controller=variant.controller,
                    seed=seed,
                )
                cell = Cell(
                    settings={"variant": variant.name, "seed": seed},
                    needs=(link,) if variant.controller else (),
                    work=(training, self.sentences),
                )
                found.append(cell)
        return found


@lru_cache(maxsize=2)
def subject(scope: Scope) -> Subject:
    """Return the model, data and protocol of a scope.

    Raises:
        NeedsInputError: It names no sentences.
        ConfigError: The sentences or the model can't be read.
    """
    if scope.smoke:
        small = replace(SMOKE, epochs=1)
        variants = tuple(parse_variants(_SMOKE_STRATEGIES))
        return Subject(
            sentences=made_up(160, 48), protocol=small, model=SMOKE.model, variants=variants
        )
    found = _sentences(scope)
    model = scope.model or PACKAGED
    location = locate(model)
    return Subject(
        sentences=cut(found, NUM_TRAIN),
        protocol=replace(PROTOCOL, model=location),
        model=model,
        model_digest=weights_digest(location),
        variants=tuple(parse_variants(",".join(STRATEGIES))),
    )


def _sentences(scope: Scope) -> Sentences:
    if scope.data_dir is None and scope.dataset is None:
        raise NeedsInputError(
            "this study trains on SST-2: give --data-dir FOLDER, with train.tsv and test.tsv "
            "(lines of sentence, tab, 0 or 1), or --dataset stanfordnlp/sst2 (or try --smoke, "
            "which needs neither)"
        )
    if scope.data_dir is None:
        assert scope.dataset is not None
        return read_hub(scope.dataset)
    if scope.dataset is not None:
        raise ConfigError("this study reads one data set: give --data-dir or --dataset")
    return read_folder(scope.data_dir.expanduser())
