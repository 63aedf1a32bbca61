"""Losses with factored second moments, and with changed weights alone: equal runs but for that."""

import pytest

from evidence.studies import changed_weights, factored_moments
from experiments.lab.finding import Verdict
from experiments.lab.study import Scope


def differences(study, names):
    """Return the settings of the update rule in which a seed's runs of one setting differ."""
    found = set()
    cells = study.cells(Scope(seeds=(0,)))
    for setting in {cell.settings["setting"] for cell in cells}:
        own = [cell for cell in cells if cell.settings["setting"] == setting]
        assert {cell.labels["variant"] for cell in own} == names
        assert len({(c.work.lr, c.work.betas, c.work.steps, c.work.seed) for c in own}) == 1
        configs = [cell.settings["config"] for cell in own]
        found |= {name for name in configs[0] if len({c[name] for c in configs}) > 1}
    return found


def test_runs_differ_in_formats_alone():
    names = {"float32", factored_moments.FACTORED, factored_moments.FEW}
    assert differences(factored_moments.STUDY, names) == {
        "second_moment", "host_state", "gradient_link",
    }  # fmt: skip
    names = {changed_weights.ALL, changed_weights.CHANGED, changed_weights.SHORT}
    assert differences(changed_weights.STUDY, names) == {"uploads", "gradient_link"}


def rows(losses):
    """Return a row of each loss, by variant."""
    common = {"setting": "s", "lr": 1e-3, "beta2": 0.95, "steps": 1, "seed": 0}
    return [{**common, "variant": variant, "eval_loss": loss} for variant, loss in losses.items()]


def test_claims_are_of_the_excess_over_the_base():
    losses = {"float32": 2.0, factored_moments.FACTORED: 2.02}
    found = factored_moments.STUDY.findings({"rows": rows(losses)})
    assert [finding.measured for finding in found] == pytest.approx([1.0, 1.0])
    assert [finding.verdict for finding in found] == [Verdict.FAILS, Verdict.HOLDS]
    losses = {changed_weights.ALL: 2.0, changed_weights.CHANGED: 1.998}
    found = changed_weights.STUDY.findings({"rows": rows(losses)})
    assert [finding.measured for finding in found] == pytest.approx([-0.1, -0.1])


def test_bytes_are_over_those_of_all_weights():
    plain = {"d2h_bytes_per_step": 100, "h2d_bytes_per_step": 200}
    less = {"d2h_bytes_per_step": 100, "h2d_bytes_per_step": 50}
    found = changed_weights.shares(
        [
            {"setting": "s", "variant": changed_weights.ALL, **plain},
            {"setting": "s", "variant": changed_weights.CHANGED, **less},
        ]
    )
    assert [row["h2d_bytes_per_step"] for row in found] == [1.0, 0.25]
    assert [row["d2h_bytes_per_step"] for row in found] == [1.0, 1.0]
