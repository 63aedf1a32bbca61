import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from autotune.decisions.file import Decision, DecisionLog, read_decisions, read_header
from autotune.online.logged_controller import LoggedController
from experiments.commands.training.config_file import read_config_file, settle_auto
from experiments.output.progress import Reporter
from experiments.training.parts.files.results import remove_results
from experiments.training.settings.comparison import COMPARED
from experiments.training.settings.training import TrainSettings
from experiments.training.settings.tuning import CHOSEN_KNOBS
from tests.experiments.runs import (
    FAST,
    ended,
    equal,
    saved_tensors,
    steps,
    summary,
    trained,
    write_text,
)
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs


@pytest.fixture
def text(tmp_path, blank_pictures):
    return write_text(tmp_path / "text.txt")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--topk-ratio", "0.2"], ["topk_ratio is what controller 'both' chooses", "0.2",
                                   "--smallest-captured"]),
        (["--update-interval", "2"], ["leave it out, or bound it with --largest-staleness"]),
        (["--update-rule", "published"], ["under the exact rule alone", "strategy 'zenflow'"]),
        (["--strategy", "zenflow_paper"], ["under the exact rule alone", "zen-auto"]),
        (["--select-interval", "9", "--select-strategy", "step"], ["breaks 2 rules"]),
        (["--strategy", "on_device"], ["tunes zenflow and zenflow_paper", "'on_device'"]),
        (["--controller", "zen-auto"], ["--auto is --controller both", "leave one"]),
        (["--controller", "oracle"], ["'oracle' is not one of"]),
        (["--device-memory", "much"], ["number of GB", "'much'"]),
        (["--device-memory", "-1"], ["device_memory must be a positive number of bytes"]),
        (["--largest-staleness", "1"], ["largest_staleness must be at least 2"]),
        (["--smallest-captured", "1"], ["smallest_captured is a share", "(0, 1)"]),
        (["--profile", "a.json", "--hardware", "b"], ["give the profile alone"]),
    ],
)  # fmt: skip
def test_a_tuned_run_says_what_it_does_not_take(tmp_path, flags, words):
    said = ended(2, "--out", tmp_path / "run", *FAST, "--auto", *flags)
    for word in words:
        assert word in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--largest-staleness", "4"], "largest_staleness is for the twin: add --auto"),
        (["--controller", "zen-auto", "--host-memory", "4"], "host_memory is for the twin"),
        (["--controller", "zen-auto", "--update-interval", "4"], "update_interval is what"),
    ],
)
def test_bounds_without_the_twin_are_refused(tmp_path, flags, word):
    assert word in ended(2, "--out", tmp_path / "run", *FAST, *flags)


def test_zen_auto_chooses_s_alone_and_starts_at_one():
    given = {"topk_ratio": 0.3, "update_rule": "published", "select_interval": 7}
    assert set(CHOSEN_KNOBS["zen-auto"]) == {"update_interval"}
    config = TrainSettings(controller="zen-auto", knobs=given).config(None)
    assert (config.update_interval, config.topk_ratio, config.is_exact) == (1, 0.3, False)
    assert TrainSettings(controller="both").config(None) == TrainSettings().config(None)


def test_bounds_are_the_flags_and_the_files(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('controller = "both"\ndevice_memory = 24\nlargest_staleness = 8\n')
    settings, knobs = read_config_file(path)
    made = TrainSettings(**settings, knobs=knobs)
    assert (made.controller, made.device_memory, made.largest_staleness) == ("both", 24e9, 8)
    assert TrainSettings.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    path.write_text('controler = "both"\n')
    with pytest.raises(ConfigError, match="did you mean 'controller'"):
        read_config_file(path)


def deepspeed(path, **zenflow):
    """Write a DeepSpeed configuration with this section."""
    offload = {"offload_optimizer": {"device": "cpu"}, "zenflow": zenflow}
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, **offload}}))
    return path


def settled(path, *, flags=None, knobs=None):
    settings, file_knobs = read_config_file(path)
    settings, knobs = settle_auto({**settings, **(flags or {})}, {**file_knobs, **(knobs or {})})
    return TrainSettings(**settings, knobs=knobs)


def test_deepspeeds_auto_is_zen_auto_with_the_files_k(tmp_path):
    path = deepspeed(tmp_path / "ds.json", topk_ratio=0.05, overlap_step=True)
    made = settled(path)
    assert (made.controller, made.strategy) == ("zen-auto", "zenflow_paper")
    config = made.config(steps_per_epoch=40)
    assert (config.topk_ratio, config.update_interval) == (0.05, 1)
    assert config.select_interval_steps == 40  # one selection an epoch


def test_a_number_in_deepspeeds_file_or_on_the_command_line_is_no_controllers(tmp_path):
    path = deepspeed(tmp_path / "ds.json", update_interval=8, overlap_step=True)
    assert settled(path).controller is None
    path = deepspeed(tmp_path / "ds.json", update_interval="auto", overlap_step=True)
    made = settled(path, knobs={"update_interval": 2, "select_interval": 30})
    assert made.controller is None
    assert made.config(None).update_interval == 2
    assert made.config(steps_per_epoch=40).select_interval_steps == 30


def test_auto_takes_what_deepspeeds_file_leaves_open_and_no_more(tmp_path):
    tuned = {"controller": "both", "strategy": "zenflow"}
    path = deepspeed(tmp_path / "ds.json", overlap_step=True)
    assert settled(path, flags=tuned).knobs == {}
    with pytest.raises(ConfigError, match="under the exact rule alone: use strategy 'zenflow'"):
        settled(path, flags={"controller": "both"})
    path = deepspeed(tmp_path / "ds.json", overlap_step=True, topk_ratio=0.05)
    with pytest.raises(ConfigError, match="topk_ratio is what controller 'both' chooses"):
        settled(path, flags=tuned)


def test_our_own_files_may_say_auto_too(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[zenflow]\nupdate_interval = "auto"\ntopk_ratio = 0.2\n')
    assert settled(path).controller == "zen-auto"
    path.write_text('[zenflow]\ntopk_ratio = "auto"\n')
    with pytest.raises(ConfigError, match="topk_ratio is 'auto', but nobody chooses it"):
        settled(path)
    assert settled(path, flags={"controller": "twin"}).knobs == {}


def test_other_strategies_of_a_comparison_are_not_tuned():
    settings = TrainSettings(controller="both", largest_staleness=8, hardware="h200")
    assert settings.label == "auto"
    for name in COMPARED:
        assert settings.with_strategy(name) == TrainSettings(strategy=name)
        assert settings.with_strategy(name).label == name
    assert TrainSettings(controller="zen-auto").label == "zen-auto"


def test_a_tuned_run_records_how_it_was_tuned(tmp_path, text, clock):
    flags = [*FAST, "--data", text, "--auto", "--steps", "9"]
    said = ended(0, "--out", tmp_path / "run", *flags)
    out = tmp_path / "run"
    found = read_decisions(out / "decisions.jsonl")
    told = summary(out)
    assert told["strategy"] == "auto"
    assert told["tuning"]["num_decisions"] == len(found.decisions) == found.end.num_decisions
    assert Knobs.from_dict(told["tuning"]["knobs"]) == found.changes[-1][1]
    assert told["tuning"]["last_decision_step"] == found.changes[-1][0]
    assert told["tuning"]["search_seconds"] == told["tuning"]["search_share"] == 0
    assert found.end.run_seconds == pytest.approx(sum(row["seconds"] for row in steps(out)))
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert settings == found.header.settings
    assert settings["controller"] == "both"
    assert found.header.knobs == Knobs.of(ZenFlowConfig())
    assert found.header.largest_interval == 8
    for decision in found.decisions:
        reason = "(twin: the clock said so)"
        assert f"after step {decision.step}: {decision.new} {reason}" in said
    assert "search 0.0% of the run" in said
    rows = {row["step"]: row for row in steps(out)}
    for step, knobs in found.changes:
        if step < 9:
            assert rows[step + 1]["update_interval"] == knobs.update_interval


def test_a_tuned_run_starts_within_its_bounds_and_says_if_it_can_not(tmp_path, text, clock):
    flags = [*FAST, "--data", text, "--auto", "--steps", "4"]
    out = trained(tmp_path / "run", *flags, "--largest-staleness", "3")
    start = read_header(out / "decisions.jsonl").knobs
    assert start.update_interval + 1 <= 3
    assert json.loads((out / "config.json").read_text())["config"]["update_interval"] == 2
    ended(0, "--resume", out, "--steps", "6")
    assert read_header(out / "decisions.jsonl").knobs == start
    said = ended(3, "--out", tmp_path / "none", *flags, "--host-memory", "0.001")
    assert "can't be met by any setting" in said
    assert not (tmp_path / "none").exists()


def test_a_signal_ends_a_tuned_run_without_an_end_and_it_goes_on(tmp_path, text, clock):
    flags = [*FAST, "--data", text, "--auto", "--steps", "11"]
    clock.stop_after = 5
    ended(130, "--out", tmp_path / "run", *flags)
    out = tmp_path / "run"
    path = out / "decisions.jsonl"
    assert not (out / "tuning.png").exists()
    assert summary(out)["tuning"]["num_decisions"] == 3
    said = ended(2, "--out", tmp_path / "replay", "--replay", path)
    assert f"resume the run in {out}" in said
    ended(0, "--resume", out)
    assert (out / "tuning.png").exists()
    ended(0, "--out", tmp_path / "replay", "--replay", path)
    assert equal(out, tmp_path / "replay")


def test_a_run_becomes_no_tuned_one_by_resuming_it(tmp_path, text, clock):
    out = trained(tmp_path / "run", *FAST, "--data", text, "--steps", "2")
    assert "controller was None, now 'both'" in ended(1, "--resume", out, "--auto", "--steps", "4")


def test_an_untuned_run_is_as_before(tmp_path, text):
    out = trained(tmp_path / "run", *FAST, "--data", text, "--steps", "3")
    assert summary(out)["tuning"] is None
    assert not (out / "decisions.jsonl").exists()


def test_decisions_that_were_not_written_are_noticed(tmp_path, text, clock, monkeypatch):
    append = DecisionLog.append

    def forget(log, record):
        if not isinstance(record, Decision):
            append(log, record)

    monkeypatch.setattr(DecisionLog, "append", forget)
    said = ended(1, "--out", tmp_path / "run", *FAST, "--data", text, "--auto", "--steps", "5")
    assert "could not be repeated from it" in said


def test_controllers_are_closed_with_the_run(tmp_path, text, clock, monkeypatch):
    closed = []

    def close(self):
        closed.append(self)

    monkeypatch.setattr(LoggedController, "close", close, raising=False)
    flags = [*FAST, "--data", text, "--auto", "--steps", "3"]
    trained(tmp_path / "run", *flags)
    assert len(closed) == 1
    path = tmp_path / "run" / "decisions.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    ended(2, "--resume", tmp_path / "run")  # the log can't go on
    assert len(closed) == 2


def test_a_tuned_run_joins_a_comparison(tmp_path, text, clock):
    flags = [*FAST, "--data", text, "--steps", "6", "--start-steps", "2", "--auto"]
    flags += ["--link-gbps", "0.05"]
    said = ended(0, "--compare", "--out", tmp_path / "runs", *flags)
    assert "6/6 auto" in said  # the start is one of them
    record = json.loads((tmp_path / "runs" / "compare.json").read_text())
    assert list(record["runs"]) == [*COMPARED, "auto"]
    assert record["auto"].keys() == record["zenflow"].keys()
    assert record["runs"]["auto"]["tuning"]["num_decisions"] > 0
    assert record["runs"]["zenflow"]["tuning"] is None
    assert read_decisions(tmp_path / "runs" / "auto" / "decisions.jsonl").end is not None
    first = [steps(tmp_path / "runs" / name)[0]["loss"] for name in (*COMPARED, "auto")]
    assert len(set(first)) == 1
    ended(0, "--resume", tmp_path / "runs")
    assert (tmp_path / "runs" / "start").is_dir()
    remove_results(tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_twin_runs_and_what_it_did_can_be_repeated(tmp_path, text):
    flags = [*FAST, "--data", text, "--steps", "40", "--largest-staleness", "8"]
    out = trained(tmp_path / "run", *flags, "--auto")
    found = read_decisions(out / "decisions.jsonl")
    # Steps beside which the searching process is loaded are no window: these may be all.
    assert all(window.step_seconds > 0 for window in found.windows)
    assert found.end.step == 40
    assert found.end.search_seconds == summary(out)["tuning"]["search_seconds"]
    assert (out / "tuning.png").exists()
    again = tmp_path / "replay"
    ended(0, "--out", again, "--replay", out / "decisions.jsonl")
    assert equal(out, again)
    ended(0, "--resume", out, "--steps", "50")
    assert read_decisions(out / "decisions.jsonl").end.step == 50


def test_zen_auto_runs_from_a_deepspeed_file_and_says_why(tmp_path, text):
    path = deepspeed(tmp_path / "ds.json", topk_ratio=0.2, overlap_step=True)
    flags = [*FAST, "--data", text, "--steps", "60", "--lr", "0.01", "--config", path]
    ended(0, "--out", tmp_path / "run", *flags)
    found = read_decisions(tmp_path / "run" / "decisions.jsonl")
    assert found.header.knobs.update_interval == 1
    assert found.header.knobs.topk_ratio == 0.2
    assert {decision.by for decision in found.decisions} <= {"zen-auto"}
    for before, decision in zip((found.header.knobs, *(d.new for d in found.decisions)),
                                found.decisions, strict=False):  # fmt: skip
        assert decision.new == replace(before, update_interval=decision.new.update_interval)
        assert "gradients that wait" in decision.reason
    assert summary(tmp_path / "run")["strategy"] == "zen-auto"


def test_overwriting_a_tuned_run_starts_its_file_anew(tmp_path, text, clock):
    flags = [*FAST, "--data", text, "--auto"]
    out = trained(tmp_path / "run", *flags, "--steps", "6")
    trained(out, "--overwrite", *flags, "--steps", "3")
    assert read_decisions(out / "decisions.jsonl").end.step == 3


def test_the_bar_shows_the_setting_in_force():
    console = Console(record=True, width=150)
    reporter = Reporter(console)
    reporter.start("auto", 0, 2)
    row = {"loss": 1.0, "seconds": 1.0, "stall_seconds": 0.0}
    reporter.show_setting("k=0.1 S=4")
    reporter.step({**row, "step": 2})
    reporter.start("zenflow", 0, 2)
    reporter.step({**row, "step": 2})
    first, second = console.export_text().splitlines()
    assert first.endswith("k=0.1 S=4")
    assert "S=4" not in second


def test_resuming_a_tuned_run_keeps_its_settings(tmp_path, text, clock):
    out = trained(tmp_path / "run", *FAST, "--data", text, "--auto", "--steps", "4")
    before = saved_tensors(out)
    said = ended(1, "--resume", out, "--controller", "zen-auto", "--steps", "8")
    assert "controller was 'both', now 'zen-auto'" in said
    assert read_decisions(out / "decisions.jsonl").end.step == 4  # untouched
    assert all(torch.equal(before[name], tensor) for name, tensor in saved_tensors(out).items())
