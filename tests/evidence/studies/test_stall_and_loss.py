"""The main job's claims. The slow test measures them: some minutes, on a quiet machine."""

from __future__ import annotations

import pytest

from evidence.studies.stall_and_loss import ALIGNED, STUDY, seconds_by_position
from experiments.lab.finding import Verdict
from experiments.lab.runner import Runner
from experiments.lab.study import Scope
from experiments.training.settings.comparison import COMPARED


def rows(*, stall=6.0, remaining=0.5, loss=2.01, rolling=(1.0, 1.05), aligned=(1.0, 1.5)):
    """Rows of one seed, 10 steps of 1 s each, that fulfil every claim unless told otherwise."""
    stalls = {"zero_offload": stall, "zenflow": remaining}
    losses = {"zenflow": loss}
    places = {"zenflow": rolling, ALIGNED: aligned}
    return [
        {
            "variant": variant,
            "seed": 0,
            "summary": {
                "stall_seconds": stalls.get(variant, 0.0),
                "stall_fraction": stalls.get(variant, 0.0) / 10,
                "steps": 10,
                "eval_loss": losses.get(variant, 2.0),
            },
            "seconds_by_position": list(places.get(variant, (1.0, 1.0))),
        }
        for variant in COMPARED
    ]


def broken(found) -> list[str]:
    findings = STUDY.findings({"rows": found})
    return [finding.claim for finding in findings if finding.verdict is not Verdict.HOLDS]


def test_claims_hold_of_rows_that_fulfil_them():
    assert broken(rows()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stall": 4.9, "remaining": 0.1}, "zero_offload's time"),
        ({"remaining": 0.91}, "stall seconds that zenflow is without"),
        ({"loss": 2.021}, "held-out loss"),
        ({"loss": 1.979}, "held-out loss"),
        ({"rolling": (1.0, 1.11)}, "rolling windows"),
        ({"aligned": (1.0, 1.09)}, "aligned windows"),
    ],
)
def test_each_claim_fails_of_rows_that_break_it(change, words):
    (text,) = broken(rows(**change))
    assert words in text


def test_positions_in_the_window_are_told_apart():
    steps = [{"step": n, "seconds": 3.0 if n % 4 == 2 else 1.0} for n in range(1, 42)]
    assert seconds_by_position(steps, update_interval=4, warm_up=0) == [1.0, 3.0, 1.0, 1.0]
    assert seconds_by_position(steps, update_interval=4, warm_up=1) == [3.0, 1.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_zenflow_removes_the_stall_and_keeps_the_loss_on_three_seeds(tmp_path):
    runner = Runner(
        study=STUDY, scope=STUDY.scope(Scope()), folder=tmp_path / "record", kept=tmp_path / "kept"
    )
    assert broken(runner.run().rows) == []
