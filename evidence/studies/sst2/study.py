"""Accuracy of a pretrained encoder on SST-2's sentences, under every strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from evidence.studies.sst2.data import Sentences, cut, made_up, read_folder, read_hub
from evidence.studies.sst2.model import PACKAGED, locate, weights_digest
from evidence.studies.sst2.picture import draw_accuracy
from experiments.lab.columns import Column, Table
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.intervals import (
    CONFIDENCE,
    FAILS,
    HOLDS,
    MARGIN,
    UNKNOWN,
    Comparison,
    compare,
)
from experiments.lab.study import Cell, Data, Job, NeedsInputError, Row, Scope, Study
from experiments.lab.variants import AUTO, BASELINE, STRATEGIES, Variant, parse_variants
from experiments.paper import published as paper
from experiments.training.settings.training import TrainSettings
from zenflow.errors import ConfigError

NUM_TRAIN = 2560
"""Number of training sentences: all strategies and seeds then take about 50 minutes on two
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
_LONG_WINDOWS = "zenflow_paper S=16"
"""The variant of which a loss of accuracy has been published."""
_KEPT = ("variant", "seed", "accuracy", "correct", "eval_loss")
_OF_STUDY = (
    "model", "data", "num_train", "num_test", "epochs", "lr", "warmup", "batch_size",
    "max_grad_norm",
)  # fmt: skip
_POINTS = 100


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


def _cells(scope: Scope) -> Sequence[Cell]:
    return subject(scope).cells(scope.seeds or (0,))


def _run(cell: Cell, job: Job) -> Row:
    from evidence.studies.sst2.run import emulated_link, fine_tune  # they load torch

    settings, sentences = cell.work
    if "part" in cell.settings:
        return {"bytes_per_second": emulated_link(settings, sentences)}
    for link in cell.needs:
        rate = job.row_of(link)["bytes_per_second"]
        settings = replace(settings, link=(rate, rate) if rate else None)
    return fine_tune(settings, sentences, job.folder)


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    order = {name: place for place, name in enumerate(dict.fromkeys(r["variant"] for r in rows))}
    ordered = sorted(rows, key=lambda row: (order[row["variant"]], row["seed"]))
    return {
        "study": {name: config[name] for name in _OF_STUDY},
        "rows": [{name: row[name] for name in _KEPT} for row in ordered],
    }


def _compared(data: Data) -> list[Comparison]:
    return compare(data["rows"], data["study"]["num_test"])


def findings(data: Data) -> Sequence[Finding]:
    """Return which strategies keep the accuracy."""
    compared = _compared(data)
    found = [_kept(comparison) for comparison in compared if comparison.variant != BASELINE]
    return [*found, *(_interval_loss(c) for c in compared if c.variant == _LONG_WINDOWS)]


def _kept(comparison: Comparison) -> Finding:
    """Return whether the accuracy is kept; where the interval can't tell there is no number."""
    low, high = (_POINTS * end for end in comparison.interval)
    undecided = comparison.verdict == UNKNOWN
    basis = "emulated" if comparison.variant == AUTO else "measured"
    return Finding(
        claim=f"{comparison.variant} loses no more than {_POINTS * MARGIN:g} point of accuracy "
        f"beside {BASELINE}",
        source="the paper claims no loss of accuracy; the margin is ours, set beforehand",
        unit="points",
        published=-_POINTS * MARGIN,
        tolerance=Tolerance.at_least(),
        note=f"{_POINTS * comparison.difference:+.2f} points, {CONFIDENCE:.0%} interval "
        f"{low:+.2f} to {high:+.2f}; {_POINTS * comparison.mean:.2f} % on average of "
        f"{len(comparison.seeds)} seeds; paired t-test p = {comparison.p_value:.3f}"
        + ("; the interval holds the margin: can't tell" if undecided else ""),
        **{basis: None if undecided else _POINTS * comparison.difference},
    )


def _interval_loss(comparison: Comparison) -> Finding:
    published = paper.INTERVAL_LOSS
    return Finding(
        claim="Windows of 16 steps lose about 0.02 of accuracy under the published rule",
        source=published.source,
        unit=published.unit,
        published=published.value,
        measured=-comparison.difference,
        tolerance=Tolerance.absolute(MARGIN),
        note="Which task that was is not known.",
    )


def _title(header: Mapping[str, Any]) -> str:
    """Return the comparison in a line."""
    model = str(header["model"]).removeprefix("package:")
    return (
        f"{model} on {header['data']}: {header['num_train']} sentences, {header['epochs']:g} "
        f"epochs, tested on {header['num_test']}"
    )


def _about(data: Data) -> str:
    study, found = data["study"], _compared(data)
    counts = {verdict: 0 for verdict in (HOLDS, FAILS, UNKNOWN)}
    for comparison in found[1:]:
        counts[comparison.verdict] += 1
    losing = [c.variant for c in found[1:] if c.interval[1] < 0]
    parts = [
        f"{_title(study)}. AdamW, learning rate {study['lr']:g} with a warm-up over "
        f"{study['warmup']:.0%} of the steps and a linear decay, batches of "
        f"{study['batch_size']}, clipped at {study['max_grad_norm']:g}. A seed gives every "
        "strategy the same head, batches and dropout; the test is looked at once, when a run has "
        "ended, and nothing was chosen by it.",
        f"The claim is that a strategy loses no more than {_POINTS * MARGIN:g} point of the "
        f"accuracy that {BASELINE} has, a margin set beforehand. It *holds* where the "
        f"{CONFIDENCE:.0%} interval of the difference lies above that loss, *does not hold* where "
        "it lies below, and else these runs *can't tell*. The interval is the wider of two: over "
        "the seeds (Student's t of the paired differences) and over the test sentences (normal, "
        "each with its mean difference over the seeds). p is the paired t-test's; a large one "
        "shows nothing by itself. Each strategy is judged at 5% by itself. *Equal*: the interval "
        f"lies within {_POINTS * MARGIN:g} point either way.",
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        + "."
        + (
            f" A loss of some size is certain at this confidence: {', '.join(losing)}."
            if losing
            else ""
        ),
    ]
    if any(c.variant == AUTO for c in found):
        parts.append(
            f"{AUTO} is tuned over an emulated link by what its steps took, so a repetition may "
            "choose other knobs; the other strategies have no link, as nothing that they compute "
            "depends on it."
        )
    return "\n\n".join(parts)


def _tables(data: Data) -> Sequence[Table]:
    def beside(head: str, show: Callable[[Comparison], str]) -> Column:
        """Return a column that says nothing of the baseline itself."""
        return Column(head=head, show=lambda c: "" if c.variant == BASELINE else show(c))

    columns = [
        Column(head="strategy", show=lambda c: c.variant),
        Column(head="seeds", show=lambda c: str(len(c.seeds))),
        Column(head="accuracy", show=lambda c: f"{c.mean:.2%}"),
        Column(head="spread", show=lambda c: _points(c.spread, "")),
        beside("difference", lambda c: _points(c.difference)),
        beside(f"{CONFIDENCE:.0%} interval", lambda c: " to ".join(map(_points, c.interval))),
        beside("p", lambda c: "" if math.isnan(c.p_value) else f"{c.p_value:.3f}"),
        beside(
            f"loses at most {_POINTS * MARGIN:g} point",
            lambda c: c.verdict + (" (equal)" if c.is_equivalent else ""),
        ),
    ]
    return [Table(columns=columns, rows=_compared(data))]


def _points(value: float, sign: str = "+") -> str:
    return f"{_POINTS * value:{sign}.2f}" if math.isfinite(value) else "unknown"


STUDY = Study(
    name="sst2",
    title="Accuracy of a fine-tuned encoder on SST-2",
    cells=_cells,
    run=_run,
    summarise=_summarise,
    findings=findings,
    about=_about,
    tables=_tables,
    draw=lambda data: draw_accuracy(_compared(data), _title(data["study"])),
    settings=lambda scope: subject(scope).header(),
    seeds=(0, 1, 2, 3),
    minutes=50,
    revision=2,
    uses=frozenset({"data_dir", "dataset", "model"}),
)
