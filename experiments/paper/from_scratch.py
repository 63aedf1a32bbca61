"""Where ZenFlow loses: a language model from scratch, beside the same model's fine-tuning.

Reads the newest committed record of ``python -m experiments.studies.accuracy``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from experiments.lab.study import Data, Job, NeedsInputError, computed
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.intervals import CONFIDENCE, half_width_over_seeds
from experiments.lab.variants import BASELINE
from experiments.output.provenance import RESULTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARGIN = 1.0
"""Percent of the held-out loss that counts as none lost."""
_PERCENT = 100
_KEPT = ("regime", "variant", "lr", "seed", "eval_loss")


def _make(job: Job) -> Data:
    newest = max(RESULTS.glob("*_accuracy_*/record.jsonl"), default=None)
    if newest is None:
        raise NeedsInputError(
            "this figure reads the record of python -m experiments.studies.accuracy, and there is "
            f"none in {RESULTS}: make it first"
        )
    del job
    origin = json.loads((newest.parent / "provenance.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in newest.read_text(encoding="utf-8").splitlines()]
    return {
        "trained_at": origin["commit"],
        "rows": [{name: row[name] for name in _KEPT} for row in rows],
    }


def _findings(data: Data) -> Sequence[Finding]:
    from experiments.studies.accuracy import excesses

    found = excesses(data["rows"])
    return [
        _finding(regime, variant, rate, [_PERCENT * value for value in values])
        for (regime, variant, rate), values in found.items()
    ]


def _finding(regime: str, variant: str, rate: float, excess: Sequence[float]) -> Finding:
    """Return whether the loss is kept; where the interval can't tell there is no number."""
    mean = fmean(excess)
    half = half_width_over_seeds(excess)
    low, high = mean - half, mean + half
    undecided = low <= _MARGIN < high
    return Finding(
        claim=f"{regime}, learning rate {rate:g}: the held-out loss of {variant} is no more than "
        f"{_MARGIN:g} % above {BASELINE}'s",
        source="the paper claims no loss of accuracy; the margin is ours",
        unit="%",
        published=_MARGIN,
        measured=None if undecided else mean,
        tolerance=Tolerance.at_most(),
        note=f"{mean:+.2f} %, {CONFIDENCE:.0%} interval {low:+.2f} to {high:+.2f}, of "
        f"{len(excess)} seeds" + ("; it holds the margin: can't tell" if undecided else ""),
    )


def _draw(data: Data) -> Figure:
    from experiments.output.plots import draw_excess
    from experiments.studies.accuracy import excesses

    return draw_excess(excesses(data["rows"]))


STUDY = computed(
    group="paper",
    name="from_scratch",
    title="Held-out loss from scratch, where late updates hurt most, and in fine-tuning",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=0.1,
    exact=True,
)
