"""The accuracy study: its arithmetic, and all of it on runs of a few steps."""

import json

import pytest
from click.testing import CliRunner

from experiments.accuracy import BASELINE, documentation, excesses, main, regimes, tasks_of
from experiments.sources import stdlib_files


def row(variant, seed, loss, *, regime="r", lr=1e-3):
    return {"regime": regime, "variant": variant, "lr": lr, "seed": seed, "eval_loss": loss}


def test_a_run_is_compared_with_the_baseline_of_its_own_seed_rate_and_regime():
    rows = [
        row(BASELINE, 0, 2.0),
        row(BASELINE, 1, 4.0),
        row(BASELINE, 0, 1.0, lr=1e-4),
        row(BASELINE, 0, 5.0, regime="s"),
        row("zenflow", 1, 5.0),
        row("zenflow", 0, 3.0),
        row("zenflow", 0, 1.1, lr=1e-4),
        row("zenflow", 0, 4.0, regime="s"),
    ]
    found = excesses(rows)
    assert found["r", "zenflow", 1e-3] == pytest.approx([0.25, 0.5])
    assert found["r", "zenflow", 1e-4] == pytest.approx([0.1])
    assert found["s", "zenflow", 1e-3] == pytest.approx([-0.2])


def test_runs_differ_in_nothing_but_strategy_rate_and_seed(tmp_path):
    chosen = regimes(tmp_path / "model")
    tasks = tasks_of(chosen, (0, 1), tmp_path)
    assert len({task.folder for task in tasks}) == len(tasks)
    for regime in chosen:
        own = [task.settings.to_dict() for task in tasks if task.regime == regime.name]
        for settings in own:
            for varied in ("strategy", "knobs", "lr", "seed"):
                del settings[varied]
        assert all(settings == own[0] for settings in own)


def test_the_text_of_fine_tuning_is_not_in_that_of_pretraining():
    assert documentation() not in stdlib_files()


@pytest.mark.usefixtures("short_evaluations")
def test_the_study_runs_whole_and_takes_up_finished_runs(tmp_path, request):
    flags = ["--seeds", "0", "--steps", "2", "--workers", "1", "--runs", str(tmp_path / "runs")]
    result = CliRunner().invoke(main, [*flags, "--out", str(tmp_path / "record")])
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "record/record.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {r["regime"] for r in rows} == {"from scratch", "fine-tuning"}
    assert all(r["eval_loss"] > 0 for r in rows)
    assert (tmp_path / "record/accuracy.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "record/README.md").read_text()
    assert "| 0.0004 |" in text
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/summary.json")}
    request.getfixturevalue("in_this_process")  # nothing is left to train
    again = CliRunner().invoke(main, [*flags, "--out", str(tmp_path / "again")])
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in made} == made
