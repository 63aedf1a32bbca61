"""The study of formats on fresh seeds: its runs are those of the other study, but for the seed."""

from dataclasses import replace
from statistics import fmean

import pytest

from evidence.studies import host_state, host_state_seeds
from evidence.studies.host_state import COMPACT, FLOAT, NEAR
from experiments.lab.study import Scope


def key_of(cell):
    return cell.settings["setting"], cell.labels["variant"]


def row(seed, variant, loss, setting="from scratch, long"):
    return {
        "setting": setting, "variant": variant, "lr": 1e-3, "beta2": 0.95, "steps": 2000,
        "seed": seed, "eval_loss": loss,
    }  # fmt: skip


SEEDS, LARGER, SMALL_RATE = host_state_seeds.STUDIES


@pytest.mark.parametrize(
    ("study", "settings"), [(SEEDS, host_state_seeds.ABOVE), (LARGER, host_state_seeds.LARGER)]
)
def test_runs_are_the_other_studys_with_seeds_that_it_does_not_have(study, settings):
    last = host_state.STUDY.seeds[-1]
    fresh = study.cells(Scope(seeds=(last,)))
    others = host_state.STUDY.cells(Scope(seeds=(last,)))
    by_key = {key_of(cell): cell for cell in others}
    shared = [cell for cell in fresh if key_of(cell) in by_key]
    assert {setting for setting, _ in map(key_of, shared)} == set(settings)
    assert all(by_key[key_of(cell)].settings == cell.settings for cell in shared)
    assert all(by_key[key_of(cell)].work == cell.work for cell in shared)
    assert {key_of(cell)[1] for cell in fresh} == set(host_state_seeds.VARIANTS)
    assert set(study.seeds).isdisjoint(host_state.STUDY.seeds)


def test_the_small_rate_is_all_that_differs_from_the_larger_models_other_study():
    ours, others = (study.cells(Scope(seeds=(3,))) for study in (SMALL_RATE, LARGER))
    assert {cell.work.lr for cell in ours} == {4e-4}
    assert [replace(cell.work, lr=1e-3) for cell in ours] == [cell.work for cell in others]
    assert [cell.labels["variant"] for cell in ours] == list(host_state_seeds.VARIANTS)


def test_a_claim_is_of_the_mean_and_tells_its_interval():
    rows = [row(seed, FLOAT, 2.0) for seed in (3, 4, 5)]
    rows += [row(seed, COMPACT, 2.0 + 0.002 * seed) for seed in (3, 4, 5)]
    rows += [row(seed, NEAR, 3.0) for seed in (3, 4, 5)]
    (finding,) = SEEDS.findings({"rows": rows})
    assert finding.measured == pytest.approx(fmean([0.3, 0.4, 0.5]))
    # Student's t of two degrees of freedom, 0.95: 2.92; standard error 0.1 / sqrt(3).
    assert "3 seeds, 90% interval +0.23 to +0.57 %" in finding.note
    assert finding.verdict.value == "does not hold"


def test_runs_of_many_steps_come_last():
    steps = [c.settings["steps"] for c in SEEDS.cells(Scope(seeds=(3, 4)))]
    assert steps == sorted(steps)
    assert steps[-1] == 2000
