"""The accuracy study's arithmetic, and what its claims are decided by."""

from dataclasses import replace

import pytest

from evidence.studies.accuracy import STUDY, excesses
from evidence.studies.late_updates.design import FORMER
from evidence.studies.regimes import BASELINE, LARGER, documentation
from experiments.lab.finding import Verdict
from experiments.lab.record import needed
from experiments.lab.study import Job, Scope
from experiments.training.parts.data.texts import stdlib_files


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


def test_runs_of_a_regime_differ_in_nothing_but_strategy_rate_and_seed():
    cells = STUDY.cells(Scope(seeds=(0, 1)))
    assert len({cell.key for cell in cells}) == len(cells)
    for regime in {cell.settings["regime"] for cell in cells}:
        own = [c.work.to_dict() for c in cells if c.settings["regime"] == regime]
        for settings in own:
            for varied in ("strategy", "knobs", "lr", "seed", "dtype"):
                del settings[varied]
        assert all(settings == own[0] for settings in own)


def test_the_text_of_fine_tuning_is_not_in_that_of_pretraining():
    assert documentation() not in stdlib_files()


def rows(variant, losses, rate=1e-3):
    return [
        {"regime": "r", "variant": variant, "lr": rate, "seed": seed, "eval_loss": loss}
        for seed, loss in enumerate(losses)
    ]


def test_a_claim_is_decided_by_the_interval_of_the_excess():
    data = {
        "rows": [
            *rows("on_device", (1.0, 2.0, 1.5)),
            *rows("kept", (1.001, 2.004, 1.499)),
            *rows("lost", (1.05, 2.12, 1.58)),
            *rows("either", (0.95, 2.0, 1.6)),
        ]
    }
    found = STUDY.findings(data)
    assert [f.verdict for f in found] == [Verdict.HOLDS, Verdict.FAILS, Verdict.UNKNOWN]
    assert "can't tell" in found[2].note


def test_part_of_the_runs_makes_a_page_too():
    found = [
        *rows("on_device", (2.0,), 4e-4), *rows("zenflow", (2.1,), 4e-4),
        *rows("on_device", (2.0,)), *rows("zenflow", (2.1, 2.2)), *rows("other", (2.0,), 2e-3),
    ]  # fmt: skip
    data = {"rows": [{**row, "steps": 800} for row in found]}
    (table,) = STUDY.tables(data)
    assert [line["lr"] for line in table.rows] == [4e-4, 1e-3]
    assert len(STUDY.findings(data)) == 2
    STUDY.draw(data)


def test_the_record_says_that_from_scratch_the_default_keeps_adamws_loss():
    data = needed("accuracy").data(STUDY)
    found = excesses(data["rows"])
    for rate in (2e-4, 4e-4, 1e-3):
        for interval in (1, 4, 8, 16):
            assert max(found["from scratch", f"zenflow, S = {interval}", rate]) < 0.01
        assert min(found["from scratch", "zenflow_paper", rate]) > 0.1
    STUDY.draw(data)


def test_the_former_rule_is_a_run_of_its_own_by_a_plain_loop(tmp_path):
    cells = STUDY.cells(Scope(seeds=(0, 1)))
    own = [cell for cell in cells if cell.settings["regime"] == LARGER]
    assert {cell.settings["seed"] for cell in own} == {0}
    (former,) = [cell for cell in own if cell.labels["variant"] == FORMER]
    (exact,) = [cell for cell in own if cell.labels["variant"] == "zenflow, S = 4"]
    small = replace(former.work, model="own:tiny", steps=8, eval_batches=1)
    assert small == replace(exact.work, model="own:tiny", steps=8, eval_batches=1)
    losses = [
        STUDY.run(replace(cell, work=small), Job(folder=tmp_path))["eval_loss"]
        for cell in (former, exact)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    assert losses[0] != losses[1]
