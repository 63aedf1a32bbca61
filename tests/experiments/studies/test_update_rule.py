"""The ablation of the update rule: its design, its arithmetic, what it reuses, clipped steps."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from experiments.lab import record as records
from experiments.lab.record import Record
from experiments.lab.runner import Runner
from experiments.lab.study import OWN, Scope, identity
from experiments.studies.update_rule.design import GROUPS, LADDER_NAMES, ONE_KNOB, VARIANTS, Group
from experiments.studies.update_rule.step_clip import clipped_steps
from experiments.studies.update_rule.study import STUDY, cells_of
from experiments.studies.update_rule.summary import model_error, summarise
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.optimizer import ZenFlowAdamW

CLIPPED = "host steps clipped at 0.25"


def config_of(variant, steps=400):
    return ZenFlowConfig.preset(variant.strategy, **variant.knobs_over(steps)).to_dict()


def row(variant, loss, *, seed=0, lr=1e-3, source=OWN, regime="fine-tuning"):
    config = ZenFlowConfig.preset("on_device").to_dict()
    if variant != "on_device":
        config = config_of(VARIANTS[variant])
    return {
        "regime": regime, "variant": variant, "lr": lr, "seed": seed, "steps": 400, "clip": None,
        "source": source, "eval_loss": loss, "captured_energy": 0.25, "config": config,
    }  # fmt: skip


def test_one_knob_variants_differ_from_the_default_in_what_they_are_called_after():
    centre = config_of(VARIANTS["zenflow"])
    allowed = {"overlap_step": {"lag", "prediction"}}
    for variant in ONE_KNOB:
        changed = {k for k, v in config_of(variant).items() if v != centre[k]}
        if variant.clip is not None:
            assert changed == set()
        else:
            assert changed - allowed.get(variant.changed, set()) == {variant.changed}


def test_the_ladder_changes_something_at_each_rung_and_ends_at_the_default():
    rungs = [config_of(VARIANTS[name]) for name in LADDER_NAMES]
    for low, high in pairwise(rungs):
        assert sum(low[key] != high[key] for key in low) == 1
    assert rungs[0] == ZenFlowConfig.preset("zenflow_paper").to_dict()
    assert rungs[-1] == ZenFlowConfig().to_dict()


def test_runs_are_all_different_and_every_named_variant_exists():
    cells = cells_of((0, 1, 2), GROUPS)
    assert len({cell.key for cell in cells}) == len({cell.slug for cell in cells}) == len(cells)
    assert {name for group in GROUPS for name in group.variants} == set(VARIANTS)


def test_a_run_of_another_length_or_clipped_is_another_run():
    (_, centre, clipped) = cells_of(
        (0,), [Group(regime="fine-tuning", lr=1e-3, variants=("zenflow", CLIPPED))]
    )
    longer = {**centre.settings, "steps": 401}
    assert len({centre.key, identity(longer), clipped.key}) == 3
    early = {key: value for key, value in centre.settings["config"].items() if key != "prediction"}
    assert identity({**centre.settings, "config": early}) == centre.key, "a default is a default"


def test_a_recorded_run_is_not_trained_again_but_what_a_new_one_is_compared_with_is(
    tmp_path, monkeypatch
):
    variants = ("zenflow", CLIPPED)
    groups = [Group(regime="fine-tuning", lr=1e-3, variants=variants)]
    cells = cells_of((0,), groups)
    made = []

    def run(cell, job):
        made.append(cell.name)
        return {"eval_loss": 1.0, "captured_energy": 0.2}

    study = replace(STUDY, cells=lambda scope: cells, run=run, draw=lambda data: Figure())
    known = {key: value for key, value in cells[1].settings.items() if key != "clip"}
    base = {key: value for key, value in cells[0].settings.items() if key != "clip"}
    recorded = [{**base, "eval_loss": 2.0, "variant": "on_device"},
                {**known, "eval_loss": 3.0, "variant": "of another name"}]  # fmt: skip
    other = Record(folder=Path("2026-01-01_accuracy_cpu"), header={}, rows=recorded, findings=())
    found = {"accuracy": other}
    monkeypatch.setattr(records, "committed", found.get)

    def rows(folder):
        return Runner(
            study=study, scope=Scope(seeds=(0,)), folder=folder, kept=tmp_path / "kept"
        ).run().rows  # fmt: skip

    here = rows(tmp_path / "record")
    assert [(row["variant"], row["source"], row["eval_loss"]) for row in here] == [
        ("on_device", "this study", 1.0), (CLIPPED, "this study", 1.0),
        ("on_device", "2026-01-01_accuracy_cpu", 2.0), ("zenflow", "2026-01-01_accuracy_cpu", 3.0),
    ]  # fmt: skip
    assert len(made) == 3  # the model that fine-tuning starts from too
    assert rows(tmp_path / "record") == here
    assert len(made) == 3


def test_a_run_is_compared_with_the_device_of_its_own_origin_seed_and_rate():
    rows = [
        row("on_device", 2.0), row("zenflow", 2.1), row("on_device", 1.0, source="old"),
        row("lag = 2", 1.2, source="old"), row("on_device", 4.0, seed=1),
        row("zenflow", 4.4, seed=1),
        row("on_device", 3.0, lr=3e-4), row("zenflow", 3.3, lr=3e-4),
    ]  # fmt: skip
    found = summarise(rows)
    fast = found["groups"][0]["variants"]
    assert fast["zenflow"]["excess"] == pytest.approx(0.075)
    assert fast["lag = 2"]["excess"] == pytest.approx(0.2)
    assert found["groups"][1]["variants"]["zenflow"]["excess"] == pytest.approx(0.1)
    assert found["repeated"] == pytest.approx(1.0)


def test_a_change_is_better_only_if_every_seed_says_so():
    rows = [row("on_device", 1.0, seed=seed) for seed in range(3)]
    rows += [row("zenflow", 1.1, seed=seed) for seed in range(3)]
    for seed, (up, down, mixed) in enumerate(
        [(1.2, 1.0, 0.9), (1.15, 1.05, 0.9), (1.12, 1.08, 1.101)]
    ):
        rows += [row("lag = 2", up, seed=seed), row("S = 2", down, seed=seed),
                 row("k = 0.3", mixed, seed=seed)]  # fmt: skip
    verdicts = {c["name"]: c["verdict"] for c in summarise(rows)["defaults"]}
    assert verdicts == {"lag = 2": "worse", "S = 2": "better", "k = 0.3": "same"}


def test_the_tuners_model_is_judged_at_its_own_rate_and_by_measurable_losses():
    def setting(lr, measured, model, extrapolated=False):
        return {"lr": lr, "fitted_lr": 1e-3, "measured": measured, "model": model,
                "extrapolated": extrapolated}  # fmt: skip

    found = [setting(1e-3, 0.8, 0.88), setting(3e-4, 0.9, 0.1), setting(1e-3, 0.1, 0.9, True)]
    assert model_error(found) == pytest.approx(0.1)
    assert model_error(found[1:]) is None


def steps_of(bound, *, num_steps=3):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(32, 64))
    before = weight.detach().clone()
    config = ZenFlowConfig(
        topk_ratio=0.0, update_interval=1, overlap_step=False, lag=None, prediction=0.0,
        rolling=False, min_split_elements=0,
    )  # fmt: skip
    with clipped_steps(bound):
        optimizer = ZenFlowAdamW([weight], lr=0.1, weight_decay=0.0, config=config)
        try:
            for _ in range(num_steps):
                (weight**2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            optimizer.close()
    return before, weight.detach()


def test_clipped_steps_move_no_element_further_than_their_bound():
    before, after = steps_of(0.25)
    assert (after - before).abs().max() == pytest.approx(3 * 0.25 * 0.1, rel=1e-5)
    before, after = steps_of(None)
    assert (after - before).abs().max() > 2 * 0.25 * 0.1 * 3
    assert torch.allclose(steps_of(100.0)[1], after, atol=1e-7)
    with pytest.raises(ConfigError, match="positive"), clipped_steps(0.0):
        pass
