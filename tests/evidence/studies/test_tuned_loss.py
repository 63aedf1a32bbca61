"""Losses of tuned runs: the record, and what a row must say for the aims to hold."""

from __future__ import annotations

import pytest

from evidence.studies.tuned_loss import STUDY
from experiments.lab.record import needed


def test_the_committed_record_is_of_runs_that_were_tuned():
    rows = needed("tuned_loss").rows
    assert [row["seed"] for row in rows] == list(STUDY.seeds)
    assert all(row["num_decisions"] for row in rows)
    assert all(row["excess"] == pytest.approx(row["auto"] / row["on_device"] - 1) for row in rows)


@pytest.mark.parametrize(
    ("excess", "decisions", "said"),
    [(0.009, 2, ["holds"] * 2), (0.011, 2, ["does not hold", "holds"]),
     (0.0, 0, ["holds", "does not hold"])],
)  # fmt: skip
def test_an_excess_or_a_run_that_nothing_tuned_is_told(excess, decisions, said):
    row = {"seed": 0, "excess": excess, "num_decisions": decisions}
    found = STUDY.findings({"steps": 9, "losses": [row, {**row, "excess": 0.0}]})
    assert [finding.verdict.value for finding in found] == said
