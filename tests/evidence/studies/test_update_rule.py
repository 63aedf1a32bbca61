"""The ablation of the update rule: its design, its arithmetic, what it reuses."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from evidence.studies.update_rule.design import GROUPS, VARIANTS, Group
from evidence.studies.update_rule.study import STUDY, cells_of
from evidence.studies.update_rule.summary import summarise
from experiments.lab import catalogue
from experiments.lab import record as records
from experiments.lab.record import Record
from experiments.lab.runner import Runner
from experiments.lab.study import OWN, Scope, identity
from zenflow.config import ZenFlowConfig


def config_of(variant):
    return ZenFlowConfig.preset(variant.strategy, **variant.knobs).to_dict()


def row(variant, loss, *, seed=0, lr=1e-3, source=OWN, regime="fine-tuning"):
    config = ZenFlowConfig.preset("on_device").to_dict()
    if variant != "on_device":
        config = config_of(VARIANTS[variant])
    return {
        "regime": regime, "variant": variant, "lr": lr, "seed": seed, "steps": 400,
        "source": source, "eval_loss": loss, "captured_energy": 0.25, "config": config,
    }  # fmt: skip


def test_variants_differ_from_the_default_in_one_setting_but_for_the_baselines():
    centre = config_of(VARIANTS["zenflow"])
    for name, variant in VARIANTS.items():
        changed = {k for k, v in config_of(variant).items() if v != centre[k]}
        if variant.strategy == "zenflow":
            assert len(changed) == (name != "zenflow")
    assert config_of(VARIANTS["zenflow_paper"]) == ZenFlowConfig.preset("zenflow_paper").to_dict()


def test_runs_are_all_different_and_every_named_variant_exists():
    cells = cells_of((0, 1, 2), GROUPS)
    assert len({cell.key for cell in cells}) == len({cell.slug for cell in cells}) == len(cells)
    assert {name for group in GROUPS for name in group.variants} == set(VARIANTS)


def test_a_run_of_another_length_is_another_run_and_one_of_a_former_rule_too():
    (_, centre) = cells_of((0,), [Group(regime="fine-tuning", lr=1e-3, variants=("zenflow",))])
    longer = {**centre.settings, "steps": 401}
    former = {**centre.settings, "config": {**centre.settings["config"], "lag": 1}}
    assert len({centre.key, identity(longer), identity(former)}) == 3
    early = {k: value for k, value in centre.settings["config"].items() if k != "queue_depth"}
    assert identity({**centre.settings, "config": early}) == centre.key, "a default is a default"


def test_a_recorded_run_is_not_trained_again_but_what_a_new_one_is_compared_with_is(
    tmp_path, monkeypatch
):
    variants = ("zenflow", "S = 2")
    groups = [Group(regime="fine-tuning", lr=1e-3, variants=variants)]
    cells = cells_of((0,), groups)
    made = []

    def run(cell, job):
        made.append(cell.name)
        return {"eval_loss": 1.0, "captured_energy": 0.2}

    study = replace(STUDY, cells=lambda scope: cells, run=run, draw=lambda data: Figure())
    base, known = cells[0].settings, cells[1].settings
    recorded = [{**base, "eval_loss": 2.0, "variant": "on_device"},
                {**known, "eval_loss": 3.0, "variant": "of another name"}]  # fmt: skip
    header = {"config": {"revision": catalogue.load("accuracy").revision}}
    other = Record(
        folder=Path("2026-01-01_accuracy_cpu"), header=header, rows=recorded, findings=()
    )
    found = {"accuracy": other}
    monkeypatch.setattr(records, "committed", found.get)

    def rows(folder):
        return Runner(
            study=study, scope=Scope(seeds=(0,)), folder=folder, kept=tmp_path / "kept"
        ).run().rows  # fmt: skip

    here = rows(tmp_path / "record")
    assert [(row["variant"], row["source"], row["eval_loss"]) for row in here] == [
        ("on_device", "this study", 1.0), ("S = 2", "this study", 1.0),
        ("on_device", "2026-01-01_accuracy_cpu", 2.0), ("zenflow", "2026-01-01_accuracy_cpu", 3.0),
    ]  # fmt: skip
    assert len(made) == 3  # the model that fine-tuning starts from too
    assert rows(tmp_path / "record") == here
    assert len(made) == 3
    header["config"]["revision"] -= 1
    assert [row["source"] for row in rows(tmp_path / "another")] == ["this study"] * 3, (
        "rows of an earlier rule are none of today's"
    )


def test_a_run_is_compared_with_the_device_of_its_own_origin_seed_and_rate():
    rows = [
        row("on_device", 2.0), row("zenflow", 2.1), row("on_device", 1.0, source="old"),
        row("S = 8", 1.2, source="old"), row("on_device", 4.0, seed=1),
        row("zenflow", 4.4, seed=1),
        row("on_device", 3.0, lr=3e-4), row("zenflow", 3.3, lr=3e-4),
    ]  # fmt: skip
    found = summarise(rows)
    fast = found["groups"][0]["variants"]
    assert fast["zenflow"]["excess"] == pytest.approx(0.075)
    assert fast["S = 8"]["excess"] == pytest.approx(0.2)
    assert found["groups"][1]["variants"]["zenflow"]["excess"] == pytest.approx(0.1)
    assert found["repeated"] == pytest.approx(1.0)


def test_a_change_is_better_only_if_every_seed_says_so():
    rows = [row("on_device", 1.0, seed=seed) for seed in range(3)]
    rows += [row("zenflow", 1.1, seed=seed) for seed in range(3)]
    for seed, (up, down, mixed) in enumerate(
        [(1.2, 1.0, 0.9), (1.15, 1.05, 0.9), (1.12, 1.08, 1.101)]
    ):
        rows += [row("S = 8", up, seed=seed), row("S = 2", down, seed=seed),
                 row("k = 0.3", mixed, seed=seed)]  # fmt: skip
    found = summarise(rows)["groups"][0]["variants"]
    verdicts = {name: variant["verdict"] for name, variant in found.items()}
    assert verdicts == {"zenflow": "", "S = 8": "worse", "S = 2": "better", "k = 0.3": "same"}
