"""Accuracy of a pretrained encoder on SST-2's sentences, under every strategy.

Without --data-dir the newest committed record of ``python -m experiments.studies.sst2`` is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.lab.study import Data, Job, NeedsInputError, computed
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.intervals import CONFIDENCE, MARGIN, UNKNOWN, Comparison, compare
from experiments.lab.variants import AUTO, BASELINE
from experiments.literature import zenflow as paper
from experiments.output.provenance import RESULTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.studies.sst2.study import Study

_POINTS = 100
_LONG_WINDOWS = "zenflow_paper S=16"
"""The variant of which a loss of accuracy has been published."""
_KEPT = ("variant", "seed", "accuracy", "correct", "eval_loss")


def _make(job: Job) -> Data:
    if job.data_dir is None and not job.smoke:
        return _recorded(job)
    from experiments.output.provenance import provenance
    from experiments.studies.sst2.command import in_order
    from experiments.studies.sst2.study import complete
    from zenflow.host.limits import usable_cores

    study = _study(job)
    total = len(study.variants) * len(study.seeds)
    rows = []
    for row in complete(study, job.folder, 1 if job.smoke else usable_cores()):
        rows.append(row)
        job.progress(len(rows) / total, f"{row['variant']} seed {row['seed']}")
    return _data(study.header(), in_order(study, rows), provenance()["commit"])


def _study(job: Job) -> Study:
    from experiments.studies.sst2.command import NUM_TRAIN, SEEDS, full_study, smoke_study
    from experiments.studies.sst2.data import cut, read_folder
    from experiments.studies.sst2.model import PACKAGED

    if job.smoke:
        return smoke_study()
    assert job.data_dir is not None
    found = read_folder(job.data_dir)
    sentences = cut(found, min(NUM_TRAIN, len(found.train)), None)
    return full_study(sentences, job.model or PACKAGED, [job.seed + seed for seed in SEEDS])


def _recorded(job: Job) -> Data:
    """Return the committed study's numbers.

    Raises:
        NeedsInputError: There are none, or others are asked for.
    """
    from experiments.studies.sst2.report import ROWS, read_record

    newest = max(RESULTS.glob(f"*_sst2_*/{ROWS}"), default=None)
    if newest is None or job.model is not None or job.seed:
        raise NeedsInputError(
            "the accuracy figure trains on SST-2: give --data-dir FOLDER, with train.tsv and "
            "test.tsv (lines of sentence, tab, 0 or 1)"
        )
    header, rows = read_record(newest.parent)
    return _data(header, rows, header["commit"])


def _data(header: dict[str, Any], rows: Sequence[dict[str, Any]], commit: str | None) -> Data:
    shared = {name: header[name] for name in ("model", "data", "num_train", "num_test", "epochs")}
    kept = [{name: row[name] for name in _KEPT} for row in rows]
    return {"study": shared, "trained_at": commit, "rows": kept}


def _findings(data: Data) -> Sequence[Finding]:
    compared = compare(data["rows"], data["study"]["num_test"])
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


def _draw(data: Data) -> Figure:
    from experiments.studies.sst2.picture import draw_accuracy
    from experiments.studies.sst2.report import title

    study = data["study"]
    return draw_accuracy(compare(data["rows"], study["num_test"]), title(study))


STUDY = computed(
    group="paper",
    name="accuracy",
    title="Accuracy of a fine-tuned encoder on SST-2",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=50,
    uses=frozenset({"data_dir", "model"}),
)
