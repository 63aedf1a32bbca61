"""Losses of tuned runs: the record, its table, and a pair of runs in small."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from experiments.output.progress import Reporter
from experiments.output.provenance import newest_record
from experiments.studies import tuned_loss as tuning_losses
from experiments.studies.tuned_goodput.study import SEEDS
from experiments.studies.tuned_loss import run_all, table
from experiments.training.settings import TrainSettings

SMALL = TrainSettings(
    model="tiny", sequence=32, batch_size=2, steps=6, start_steps=3, eval_batches=2
)


def test_the_committed_record_is_of_runs_that_were_tuned():
    folder = newest_record("tuned_loss", "losses.json")
    record = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    assert [row["seed"] for row in record["losses"]] == list(SEEDS)
    assert all(row["num_decisions"] for row in record["losses"])
    assert (folder / "table.txt").read_text(encoding="utf-8") == table(record) + "\n"


def test_a_pair_of_runs_is_made_once_and_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    reporter = Reporter(Console(quiet=True))
    original = tuning_losses.run

    def interrupted(settings, folder, **rest):
        if settings.strategy == "zenflow":
            raise KeyboardInterrupt
        return original(settings, folder, **rest)

    monkeypatch.setattr(tuning_losses, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all(SMALL, tmp_path, [0], reporter)
    monkeypatch.setattr(tuning_losses, "run", original)
    first = run_all(SMALL, tmp_path, [0], reporter)
    (row,) = first["losses"]
    assert row["excess"] == pytest.approx(row["auto"] / row["on_device"] - 1)
    monkeypatch.setattr(tuning_losses, "run", None)  # nothing is run again
    assert run_all(SMALL, tmp_path, [0], reporter) == first


@pytest.mark.parametrize(
    ("excess", "decisions", "said"),
    [(0.009, 2, "holds"), (0.011, 2, "DOES NOT HOLD"), (0.0, 0, "DOES NOT HOLD")],
)
def test_an_excess_or_a_run_that_nothing_tuned_is_told(excess, decisions, said):
    row = {
        "seed": 0, "on_device": 2.0, "auto": 2.0, "excess": excess, "num_decisions": decisions,
        "final": "",
    }  # fmt: skip
    assert table({"steps": 9, "losses": [row]}).endswith(f": {said}")
