"""The ablation of the update rule: its design, its arithmetic, clipped steps, and a short run."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from experiments import update_rule
from experiments.step_clip import clipped_steps
from experiments.update_rule import all_rows, main, missing, newest_record, read_rows, tasks_of
from experiments.update_rule_design import GROUPS, LADDER_NAMES, ONE_KNOB, VARIANTS, Group
from experiments.update_rule_report import model_error, summarise
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.optimizer import ZenFlowAdamW

OWN = "this study"


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
    tasks = tasks_of(Path("model"), Path("runs"))
    assert len({task.key for task in tasks}) == len({task.folder for task in tasks}) == len(tasks)
    assert {name for group in GROUPS for name in group.variants} == set(VARIANTS)


def test_a_recorded_run_is_not_trained_again_and_one_that_differs_is():
    groups = [Group(regime="fine-tuning", lr=1e-3, variants=("zenflow", "lag = 2"))]
    tasks = tasks_of(Path("model"), Path("runs"), (0,), groups=groups)
    baseline, centre, lagging = tasks
    known = {centre.key: {}, baseline.key: {}}
    assert missing(tasks, known) == [baseline, lagging]  # what it is compared with is made too
    assert missing(tasks, {**known, lagging.key: {}}) == []
    longer = dataclasses.replace(centre, settings=dataclasses.replace(centre.settings, steps=401))
    clipped = dataclasses.replace(centre, clip=0.25)
    assert len({centre.key, longer.key, clipped.key}) == 3


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


@pytest.mark.usefixtures("short_evaluations", "in_this_process")
def test_the_study_runs_goes_on_and_reads_its_own_record(tmp_path, monkeypatch):
    groups = (
        Group(regime="fine-tuning", lr=1e-3, variants=("zenflow", "host steps clipped at 0.25")),
    )
    monkeypatch.setattr(update_rule, "tasks_of", lambda *a: tasks_of(*a, groups=groups))
    arguments = ["--seeds", "0", "--steps", "6", "--runs", str(tmp_path / "runs")]
    arguments += ["--record", str(tmp_path / "record")]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "record")
    assert [r["variant"] for r in rows] == ["on_device", "zenflow", "host steps clipped at 0.25"]
    assert all(r["source"] == OWN for r in rows)  # records have runs of other lengths alone
    losses = [r["eval_loss"] for r in rows]
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("summary.json")}
    again = CliRunner().invoke(main, [*arguments, "--finished"], catch_exceptions=False)
    assert again.exit_code == 0, again.output
    assert [r["eval_loss"] for r in read_rows(tmp_path / "record")] == losses
    assert kept == {p: p.stat().st_mtime_ns for p in kept}
    assert len(kept) == 4  # the model that fine-tuning starts from too


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--seeds", "a"], "whole numbers"),
        (["--steps", "0"], "range"),
        (["--finished", "--runs", "nowhere"], "no finished run"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(arguments, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0
    assert text in result.output
    assert not list(tmp_path.rglob("summary.json"))


def test_the_committed_record_is_summarised_as_it_says():
    folder = newest_record()
    if folder is None:
        pytest.skip("no record of the study is committed")
    summary = json.loads((folder / "summary.json").read_text())
    assert json.loads(json.dumps(summarise(read_rows(folder)))) == summary


def test_rows_of_earlier_records_keep_their_source():
    groups = [Group(regime="fine-tuning", lr=1e-3, variants=("zenflow",))]
    tasks = tasks_of(Path("model"), Path("runs"), (0,), groups=groups)
    known = {**row("zenflow", 1.5), "source": "old"}
    del known["captured_energy"]
    rows = all_rows(tasks, {tasks[1].key: known}, [row("on_device", 1.0)])
    assert [(r["variant"], r["source"]) for r in rows] == [("on_device", OWN), ("zenflow", "old")]
    assert rows[1]["captured_energy"] is None
