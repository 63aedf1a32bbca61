"""Calibration from end to end, on runs too small to say anything, and what it writes."""

import io
import re
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from experiments.calibration import calibrate as calibration
from experiments.calibration import parts, plans
from experiments.calibration import runs as runs_module
from experiments.calibration.compute import ComputeFit
from experiments.calibration.parts import measure_host, measure_parts, timed
from experiments.calibration.profile import cpu_of, fitted_device, overheads_of
from experiments.calibration.runs import observation
from experiments.cli import main
from experiments.lab import record as records
from experiments.output import bar as bar_module
from experiments.output import stages
from experiments.output.outlook import PlannedRun
from experiments.training.settings.training import TrainSettings
from experiments.validation import study as validation_study
from experiments.validation.study import profile_in
from sim.fitting.device import ComputeTimes, pass_seconds
from sim.fitting.fit import Fit
from sim.hardware.catalog import find_device
from sim.hardware.file import read_profile
from zenflow.host.pool import HostPool

TINY_SHAPES = (("tiny", 1, 32), ("tiny", 4, 32), ("tiny", 2, 96))
TINY_RUNS = (
    plans.RunPlan("on_device", "tiny", 1, 32),
    plans.RunPlan("zenflow", "tiny", 2, 32, copy_share=1.0),
)
TINY_VALIDATION = (plans.RunPlan("zero_offload", "tiny", 1, 48, copy_share=2.0),)


@pytest.fixture
def tiny(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(plans, "CPU_SHAPES", TINY_SHAPES)
    monkeypatch.setattr(plans, "CPU_RUNS", TINY_RUNS)
    monkeypatch.setattr(plans, "CPU_VALIDATION", TINY_VALIDATION)
    monkeypatch.setattr(plans, "CPU_SELECTION", "tiny")
    monkeypatch.setattr(validation_study, "num_ranks", lambda device: 1)
    monkeypatch.setattr(calibration, "measure_sharing", lambda settings: 1.3)
    yield
    torch.set_num_threads(before)


def run(*arguments):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_machine_is_calibrated_and_its_runs_are_predicted(tiny, tmp_path):
    path = tmp_path / "profile.json"
    shown = run("calibrate", "--device", "cpu", "--out", path, "--turns", 1)
    profile = read_profile(path)
    assert profile.device.is_cpu
    assert profile.overheads.select.kind == "measured"
    assert 1e-6 <= profile.overheads.select.value < 0.1
    facts = profile.metadata["calibration"]
    assert facts["emulated_link"] is True
    assert len(facts["compute"]) == len(TINY_SHAPES)
    assert len(facts["compute_residuals"]) == 2 * len(TINY_SHAPES) + len(TINY_RUNS)
    assert len(facts["runs"]) == len(TINY_RUNS)
    assert set(facts["constant_residuals"]) == set(facts["refined_over_probed"])
    assert facts["error_after"] <= facts["error_before"]
    assert facts["host_bytes_per_second_by_threads"]["1"] > 0
    assert profile.host.core_update.kind == "measured"
    assert facts["host_steps_per_second"] > 0
    assert set(facts["part_median_errors"]) == set(parts.PARTS)
    fitted = [name for name in facts["compute_residuals"] if name.startswith(("on_", "zen"))]
    assert len(fitted) == len(TINY_RUNS)  # forward of each run
    assert {"hardware", "versions", "commit"} <= profile.metadata.keys()
    assert "gradients packed for the host" in shown
    assert re.search(r"AdamW on the device +[0-9.]+ [GM]param/s", shown)
    assert re.search(r"AdamW on important columns +[0-9.]+ [GM]param/s", shown)
    assert "To do: compute by layer shape" in shown
    assert "That takes " in shown
    assert shown.count("all done in") == 5

    record = tmp_path / "record"
    same = ("validate", "--device", "cpu", "--profile", path, "--out", record, "--turns", 1)
    shown = run(*same)
    assert "1 runs: step time off by" in shown
    (row,) = records.read(record).rows
    assert profile_in(row) == profile
    assert row["runs"][0]["measured"]["busy_seconds"]["d2h"] > 0
    assert run("validate", "--record", record) in shown
    assert "Done already" in run(*same)
    assert records.read(record).rows == [row]
    assert "Done already" not in run(*same, "--force")
    assert records.read(record).rows != [row]

    # A recorded run refines the profile further.
    run(
        "train", "--model", "tiny", "--sequence", 32, "--batch-size", 1, "--steps", 12,
        "--update-interval", 2, "--eval-batches", 1, "--out", tmp_path / "run",
    )  # fmt: skip
    again = tmp_path / "again.json"
    run("calibrate", "--from-trace", tmp_path / "run", "--start", path, "--out", again)
    assert read_profile(again).device == profile.device


def test_runs_that_calibrate_nothing_take_turns_with_those_that_do(tiny, monkeypatch):
    found, order, real = {}, [], calibration.refine
    take_turn = runs_module._take_turn

    def refine(profile, seen, **others):
        found["labels"] = [run.label for run in seen]
        return real(profile, seen, **others)

    def take(run, length):
        order.append(run.setup.settings.strategy)
        return take_turn(run, length)

    monkeypatch.setattr(calibration, "refine", refine)
    monkeypatch.setattr(runs_module, "_take_turn", take)
    options = calibration.CalibrationOptions(device=torch.device("cpu"), turns=2)
    silent = stages.Stages(Console(quiet=True))
    done = calibration.calibrate(options, silent, TINY_VALIDATION)
    (other,) = done.others
    assert order[-6:] == ["on_device", "zenflow", "zero_offload"] * 2
    assert other.observation.label.startswith("zero_offload")
    assert [label.split()[0] for label in found["labels"]] == ["on_device", "zenflow"]
    assert not any(name.startswith("zero") for name in done.compute_fit.residuals)


def test_a_plans_link_follows_from_the_predicted_compute():
    profile = profile_in(records.needed("validation").rows[0])
    plan = plans.RunPlan("zenflow", "mini", 2, 64, copy_share=0.5, up_share=2.0)
    base = calibration.CalibrationOptions(device=torch.device("cpu")).settings
    settings = plan.resolve(profile, base)
    from sim.timing.costs import costs_of

    costs = costs_of(settings.workload(), profile)
    down, up = settings.link
    assert costs.num_params * 4 / down == pytest.approx(0.5 * costs.compute_seconds)
    assert down / up == pytest.approx(4.0)
    assert settings.knobs["select_interval"] == 0


def test_parts_take_longer_the_more_they_move():
    rates = measure_host(1, torch.device("cpu"))
    assert rates.by_threads.keys() == {1}
    assert 1e8 < rates.by_threads[1] < 1e12
    assert 1e7 < rates.steps < 1e11
    assert 0 < rates.coding < 50
    overheads = overheads_of(measure_parts(torch.device("cpu"), torch.float32), is_cpu=True)
    rates = ("pack_bandwidth", "unpack_bandwidth", "intake_bandwidth", "device_update",
             "column_update")  # fmt: skip
    for name in rates:
        rate = getattr(overheads, name)
        assert 1e6 < rate.value <= 1e12
        assert rate.kind == "measured"
    assert overheads.column_update.value < overheads.device_update.value


@pytest.mark.parametrize("has_pool", [True, False])
def test_a_host_pass_takes_every_row_once_on_the_engines_pool(monkeypatch, has_pool):
    opened, real = [], HostPool.open

    def opens(num_helpers):
        opened.append(num_helpers)
        return real(num_helpers) if has_pool else None

    monkeypatch.setattr(HostPool, "open", opens)
    replay = parts._replay_of_zeros(1 << 14, 2)
    for step in replay.steps:
        step.grad.fill_(1.0)
    with parts._host_pass(replay, 3) as run:
        run()
    assert opened == [2]
    assert replay.step.eq(2).all()
    torch.testing.assert_close(replay.exp_avg, torch.full(replay.master.shape, 0.19))


def test_a_call_is_timed_by_its_median(monkeypatch):
    now = 0.0
    lengths = iter([9.0, 1.0, 1.0, 4.0, 2.0, 3.0])  # the first is not counted

    def wait():
        nonlocal now
        now += next(lengths)

    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("experiments.calibration.parts.time", clock)
    assert timed(wait, torch.device("cpu"), repeats=5) == 2.0


def test_what_comes_before_a_call_is_not_timed(monkeypatch):
    now = 0.0

    def wait(seconds):
        nonlocal now
        now += seconds

    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("experiments.calibration.parts.time", clock)
    device = torch.device("cpu")
    assert timed(lambda: wait(1.0), device, before=lambda: wait(5.0)) == 1.0


def test_a_constant_too_small_to_see_becomes_a_bound():
    constants = {"matmul": 1e-11, "attention": 0.0, "elementwise": 0.0, "launch": 0.0}
    fit = Fit({**constants, "backward launch": 0.0, "gradient": 0.0}, {})
    device = cpu_of(ComputeFit(fit, 0.9), "float32")
    assert device.flops["float32"].value == pytest.approx(1e11)
    assert device.attention_efficiency.value == 1.0
    assert device.bandwidth.value >= 1e12
    assert device.backward_factor.value == 0.9


def test_launches_of_a_profile_are_those_in_a_run():
    constants = dict.fromkeys(("matmul", "attention", "elementwise", "gradient"), 1e-11)
    fit = Fit({**constants, "launch": 2e-5, "launch in a run": 3e-5, "backward launch": 1e-5}, {})
    device = cpu_of(ComputeFit(fit, 1.0), "float32")
    assert device.launch.value == pytest.approx(5e-5)
    assert device.backward_launch.value == pytest.approx(1e-5)


def test_a_gpu_is_fitted_from_the_tables_card_to_models_and_to_forward_of_runs(monkeypatch):
    found = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=85e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    settings = TrainSettings(model="large", dtype="bfloat16", batch_size=2, grad_accum=2)
    work, card = settings.workload(), find_device("h100")
    forward, backward = pass_seconds(card, work)
    alone = ComputeTimes(label="large", workload=work, forward=forward, backward=backward)
    slow = observation(
        settings, work, step_seconds=1.0, stall_seconds=0.0, busy_seconds={},
        passes={"forward": 2 * 1.5 * forward, "backward": 1.0},
    )  # fmt: skip
    fits = [
        fitted_device(torch.device("cuda"), [alone], "bfloat16", runs) for runs in ((), (slow,))
    ]
    assert [fit.device.name for fit in fits] == [found.name] * 2
    assert fits[0].device.memory.value == found.total_memory
    assert fits[0].worst_error < 1e-3
    assert len(fits[1].residuals) == 3
    assert fits[1].device.launch.value > 1.1 * fits[0].device.launch.value


@pytest.mark.parametrize("is_terminal", [True, False])
def test_planned_stages_share_one_bar_and_an_estimate(monkeypatch, is_terminal):
    bars = []

    class Counted(bar_module.Progress):
        def __init__(self, *columns, **others):
            super().__init__(*columns, **others)
            bars.append(self)

    monkeypatch.setattr(bar_module, "Progress", Counted)
    told = io.StringIO()
    shown = stages.Stages(
        Console(file=told, force_terminal=is_terminal, width=150, highlight=False)
    )
    planned = [PlannedRun("first", 2, 100.0), PlannedRun("second", 2, 50.0)]
    with shown.planned(planned, is_guessed=True):
        for name in ("first", "second"):
            with shown.stage(name, 2) as advance:
                advance()
    (bar,) = bars
    assert "To do: first, second. That takes about 5 min on two quiet cores." in told.getvalue()
    if is_terminal:
        (task,) = bar.tasks
        # A stage that ends early, as a search that has found its end, counts as done.
        assert task.fields["text"] == "all done in less than 10 s"
        assert task.completed == pytest.approx(1.0)
    else:
        lines = told.getvalue().splitlines()
        assert [line.split(":")[0] for line in lines[1:]] == ["1/2 first", "2/2 second"]
    with shown.stage("another", 1) as advance:
        advance()
    assert len(bars) == 2
