"""Errors of predictions, computed from records alone, and the short runs behind them."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from matplotlib.image import imread
from torch.multiprocessing import ProcessRaisedException, start_processes

from experiments.calibration import compute, plans, ranks, runs
from experiments.calibration.compute import ComputeShapes, fit_compute
from experiments.calibration.plans import (
    CPU_RANK_RUNS,
    CPU_RANK_VALIDATION,
    CPU_RUNS,
    CPU_SHAPES,
    CPU_VALIDATION,
    GPU_RANK_RUNS,
    GPU_RANK_VALIDATION,
    GPU_RUNS,
    GPU_SHAPES,
    GPU_VALIDATION,
    SMOKE_VALIDATION,
)
from experiments.calibration.ranks import CONSTANTS, RankFigures, observe_ranks, refined
from experiments.calibration.runs import observation, observation_of, observe
from experiments.calibration.short_run import short_run
from experiments.cli import main
from experiments.lab import check
from experiments.lab import record as records
from experiments.lab.page import FORMER, page
from experiments.lab.runner import Runner
from experiments.lab.study import Scope
from experiments.output.provenance import RESULTS
from experiments.training.parts.setup import workload_of
from experiments.training.settings.training import TrainSettings
from experiments.validation import study as study_module
from experiments.validation.study import (
    STUDY,
    errors_of,
    newest,
    profile_in,
    rank_correlation,
    read_validation,
    validation,
)
from sim.fitting.device import ComputeTimes
from sim.fitting.left_out import CALIBRATED, Outcome, fit_left_out
from sim.fitting.refine import predict
from sim.hardware.catalog import find_machine
from sim.models.work import Work
from tests.forks import FORKS
from zenflow.errors import ConfigError


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def forked_ranks():
    """Let ranks be forks of a process that has loaded torch, where each would load it anew."""
    spawn = partial(start_processes, start_method=FORKS.get_start_method())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "spawn", spawn)
        yield


def run(measured, predicted, stalls=(0.0, 0.0), host=(0.0, 0.0)):
    sides = [
        {"step_seconds": seconds, "stall_seconds": stall, "busy_seconds": {"host": busy}}
        for seconds, stall, busy in zip((measured, predicted), stalls, host, strict=True)
    ]
    return {"measured": sides[0], "predicted": sides[1], "error": predicted / measured - 1}


def test_errors_by_hand():
    runs = [
        run(1.0, 1.1),
        run(2.0, 1.9, stalls=(1.0, 0.8)),
        run(4.0, 4.0, host=(1.0, 2.0)),
    ]
    found = errors_of(runs)
    assert found["median"] == pytest.approx(0.05)
    assert found["worst"] == pytest.approx(0.1)
    assert found["p90"] == pytest.approx(0.09)
    assert found["rank_correlation"] == pytest.approx(1.0)
    assert found["stall"] == pytest.approx(0.0)
    assert found["lanes"]["host"] == pytest.approx(0.0)
    assert errors_of(runs[1:2])["stall"] == pytest.approx(0.1)
    assert errors_of(runs[2:])["lanes"]["host"] == pytest.approx(0.25)
    with pytest.raises(ConfigError, match="there is none"):
        errors_of([])


def test_ranks_not_values_correlate():
    assert rank_correlation([1, 2, 3], [1, 100, 101]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("calibrated", "predicted"), [(CPU_RUNS, CPU_VALIDATION), (GPU_RUNS, GPU_VALIDATION)]
)
def test_no_run_that_is_predicted_was_used_to_calibrate(calibrated, predicted):
    def key(plan):
        return (plan.strategy, plan.model, plan.batch, plan.sequence, str(plan.knobs),
                str(plan.settings), plan.copy_share)  # fmt: skip

    assert not {key(p) for p in calibrated} & {key(p) for p in predicted}
    assert len({key(p) for p in predicted}) == len(predicted) >= 12
    shapes = {(p.model, p.batch, p.sequence) for p in predicted}
    used = {(p.model, p.batch, p.sequence) for p in calibrated}
    assert not shapes & {*used, *CPU_SHAPES, *GPU_SHAPES}
    assert len({p.model for p in predicted}) >= 3
    assert len({p.strategy for p in predicted}) >= 5


@pytest.mark.parametrize(
    ("calibrated", "predicted"),
    [(CPU_RANK_RUNS, CPU_RANK_VALIDATION), (GPU_RANK_RUNS, GPU_RANK_VALIDATION)],
)
def test_no_run_of_ranks_that_is_predicted_was_used_to_calibrate(calibrated, predicted):
    def shape(plan):
        return plan.model, plan.batch, plan.sequence

    assert not {shape(plan) for plan in calibrated} & {shape(plan) for plan in predicted}
    ways = {plan.settings["parallel"] for plan in predicted}
    assert ways == {plan.settings["parallel"] for plan in calibrated} == {"ddp", "fsdp"}


def test_a_runs_workload_is_known_from_its_settings():
    settings = TrainSettings(model="tiny", batch_size=2, sequence=32, strategy="on_device")
    with short_run(settings) as run:
        assert workload_of(run.setup) == settings.workload()
        params = sum(p.numel() for p in run.setup.model.parameters())
        assert workload_of(run.setup).num_params == params


def test_short_runs_are_observed_in_a_steady_state(tmp_path):
    runs = [
        TrainSettings(model="tiny", batch_size=1, sequence=16, strategy=strategy, link=link)
        for strategy, link in (("zero_offload", (20e6, 20e6)), ("zenflow", None))
    ]
    turns = []
    found = observe(
        runs,
        turns=2,
        windows=1,
        on_turn=lambda: turns.append("turn"),
        between=lambda: turns.append("between"),
        together=1,
    )
    assert turns == ["between", "turn"] * 4
    slow, fast = (run.observation for run in found)
    # Two ways of all split parameters over the emulated link bound the step from below.
    assert slow.step_seconds > 2 * 4 * 0.9e5 / 20e6
    assert slow.stall_seconds > 0.3 * slow.step_seconds
    assert fast.step_seconds < slow.step_seconds
    assert set(slow.busy_seconds) == {"device", "d2h", "h2d", "host"}
    assert set(slow.passes) == {"forward", "backward"}
    assert 0 < sum(slow.passes.values()) < slow.step_seconds - slow.stall_seconds


def test_passes_of_several_ranks_hold_waits_and_say_nothing():
    settings = TrainSettings(model="tiny", batch_size=1, sequence=16, strategy="on_device")
    turns = [(1.0, 0.0, {"device": 0.8, "host": 0.1}, {"forward": 0.3, "backward": 0.5})] * 2
    with short_run(settings) as run:
        setup = run.setup
        shared = replace(setup, settings=replace(settings, parallel="ddp"))
        both = (SimpleNamespace(setup=own) for own in (setup, shared))
        alone, together = (runs._observed(own, turns).observation for own in both)
    assert alone.passes == turns[0][-1]
    assert together.passes == {}


def test_compute_of_two_shapes_is_measured_and_fitted():
    shapes = [
        TrainSettings(model="tiny", batch_size=b, sequence=64, strategy="on_device")
        for b in (1, 16)  # so far apart that no busy machine takes longer for the smaller one
    ]
    compute_shapes = ComputeShapes(shapes)
    for _ in range(3):
        compute_shapes.round()
    times = compute_shapes.times()
    assert times[0].forward < times[1].forward
    fit = fit_compute(times)
    assert fit.fit.median_error < 0.3
    assert min(fit.fit.constants.values()) >= 0
    assert [len(own) for own in compute_shapes._found] == [3, 3]  # those that warm up are dropped
    compute_shapes.forget()
    compute_shapes.round()
    assert [len(own) for own in compute_shapes._found] == [1, 1]


def test_launches_in_a_run_may_take_longer_than_those_of_a_model_by_itself():
    """Constants are chosen, and found again from times that follow from them."""
    launch, more, rate, factor = 2e-5, 5e-6, 1e11, 1.0

    def workload(batch, sequence):
        settings = TrainSettings(model="mini", batch_size=batch, sequence=sequence)
        return settings.workload()

    def kernels(work):
        return sum(own.num_kernels for own in Work(work).all())

    def products(work):
        return sum(own.matmul_flop for own in Work(work).all()) / rate

    shapes = [workload(batch, sequence) for batch, sequence in ((1, 32), (2, 64), (4, 128))]
    times = [
        ComputeTimes(
            label=f"{work.tokens} tokens",
            workload=work,
            forward=products(work) + launch * kernels(work),
            backward=2 * factor * (products(work) + launch * kernels(work)),
        )
        for work in shapes
    ]
    settings = TrainSettings(model="mini", batch_size=3, sequence=64, grad_accum=2)
    work = settings.workload()
    forward = products(work) + (launch + more) * kernels(work)
    run = observation(
        settings, work, step_seconds=1.0, stall_seconds=0.0, busy_seconds={},
        passes={"forward": 2 * forward, "backward": 1.0},
    )  # fmt: skip
    constants = fit_compute(times, [run]).fit.constants
    assert constants["launch"] == pytest.approx(launch, rel=1e-3)
    assert constants["launch in a run"] == pytest.approx(more, rel=1e-2)
    unknown = replace(run, passes={})
    assert "launch in a run" not in fit_compute(times, [unknown]).fit.constants


def test_shapes_of_one_model_share_it():
    common = {"sequence": 64, "strategy": "on_device"}
    shapes = [
        TrainSettings(model=name, batch_size=size, **common)
        for name, size in (("tiny", 1), ("own:tiny", 1), ("tiny", 2))
    ]
    first, other, again = compute._build(shapes)
    assert again.model is first.model
    assert other.model is not first.model
    assert [b.settings for b in (first, other, again)] == shapes


MACHINE = find_machine("dgx-a100-80", 1)
RECORDS = [
    path.parent
    for path in (*RESULTS.glob("*/record.json"), *RESULTS.glob("*/*/record.json"))
    if json.loads(path.read_text(encoding="utf-8")).get("name") == STUDY.key
]


def made(folder, profile=MACHINE):
    study = validation("cpu", profile=profile)
    return Runner(
        study=study, scope=study.scope(Scope(smoke=True)), folder=folder / "record",
        kept=folder / "kept",
    ).run()  # fmt: skip


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Return a record of today's rule."""
    return made(tmp_path_factory.mktemp("validation"))


def test_a_record_has_a_row_of_each_cell_a_picture_and_what_follows_from_its_rows(fresh):
    study = validation("cpu", profile=MACHINE)
    cells = study.cells(study.scope(Scope(smoke=True)))
    assert len({cell.slug for cell in cells}) == len(cells) == len(fresh.rows)
    for cell, row in zip(cells, fresh.rows, strict=True):
        plain = json.loads(json.dumps({**cell.labels, **cell.settings}))
        assert plain.items() <= row.items(), "a row repeats what it is of"
    assert check.rederived(STUDY, fresh) == []
    assert {path.name for path in fresh.folder.iterdir()} == {
        "record.json", "rows.jsonl", "README.md", "picture.png",
    }  # fmt: skip
    assert imread(fresh.folder / "picture.png").std() > 0.02, "nothing is drawn"
    assert not (fresh.folder.parent / "kept").exists()


def test_the_runs_of_a_validation_take_turns(tmp_path, monkeypatch):
    order, real = [], runs._take_turn

    def take_turn(run, length):
        order.append(run.setup.settings.strategy)
        return real(run, length)

    monkeypatch.setattr(runs, "_take_turn", take_turn)
    monkeypatch.setattr(plans, "CPU_VALIDATION", SMOKE_VALIDATION)
    monkeypatch.setattr(study_module, "num_ranks", lambda device: 1)
    study = validation("cpu", turns=2, profile=MACHINE)
    others = {"folder": tmp_path / "record", "kept": tmp_path / "kept"}
    Runner(study=study, scope=study.scope(Scope()), **others).run()
    assert order == [plan.strategy for plan in SMOKE_VALIDATION] * 2


def validate_again(folder, *others):
    done = CliRunner().invoke(main, ["validate", "--record", str(folder), *others])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_records_runs_are_predicted_again_as_todays_simulator_does(fresh, tmp_path):
    def wrong(row):
        runs = [{**run, "predicted": run["measured"], "error": 0.0} for run in row["runs"]]
        return {**row, "runs": runs}

    records.put(tmp_path / "old", STUDY, fresh.header, [*map(wrong, fresh.rows)])
    assert read_validation(tmp_path / "old").rows == fresh.rows
    picture = tmp_path / "errors.png"
    shown = validate_again(tmp_path / "old", "--plot", str(picture))
    assert fresh.data(STUDY)["said"] in shown
    assert "earlier update rule" not in shown
    assert picture.stat().st_size > 10_000


def test_runs_of_the_former_rule_are_shown_as_recorded(fresh, tmp_path):
    header = {**fresh.header, "config": {**fresh.header["config"], "revision": 1}}
    alone, _ = fresh.rows
    settings = {"strategy": "zenflow", "lag": 4}
    gone = [{**run, "training": settings, "error": 0.123} for run in alone["runs"]]
    rows = [{"profile": alone["profile"]}, {"runs": gone}]
    kept = records.put(tmp_path / "former", STUDY, header, rows)
    assert read_validation(kept.folder).rows == rows
    assert "Of an earlier update rule" in validate_again(kept.folder)
    assert FORMER in (kept.folder / records.README).read_text(encoding="utf-8")
    assert FORMER not in (fresh.folder / records.README).read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.parent.name)
def test_a_committed_record_says_what_the_simulator_says_today(folder):
    record = read_validation(folder)
    text = (folder / records.README).read_text(encoding="utf-8")
    found = page(STUDY, record.data(STUDY), (), record.header)
    assert text == found, "made by python -m evidence.pages.predicted_again"


def test_the_newest_record_of_a_kind_of_device_is_found(fresh, tmp_path):
    for name, device in (
        ("01_validation_c", "cpu"), ("02_validation_a", "cpu"), ("03_validation_b", "cuda"),
    ):  # fmt: skip
        header = {**fresh.header, "config": {**fresh.header["config"], "device": device}}
        records.put(tmp_path / name, STUDY, header, fresh.rows)
    assert newest(tmp_path, is_cpu=True).folder.name == "02_validation_a"
    assert newest(tmp_path, is_cpu=False).folder.name == "03_validation_b"
    assert newest(tmp_path / "none", is_cpu=True) is None


def test_runs_of_two_ranks_are_measured_and_predicted(fresh):
    """Each rank has half of the batch, so that a run is predicted as one of two devices."""
    alone, shared = fresh.rows
    figures = RankFigures(**shared["figures"])
    assert (figures.count, figures.backend) == (2, "gloo")
    (run,) = shared["runs"]
    assert run["training"]["parallel"] == "ddp"
    assert run["measured"]["stall_seconds"] is None
    assert set(run["measured"]["busy_seconds"]) == {"d2h", "h2d", "host"}
    machine = figures.of(MACHINE)
    assert machine.total_devices == 2
    assert machine.fabric.latency.value == figures.values["fabric.latency"] > 0
    settings = TrainSettings.from_dict(run["training"])
    workload = replace(settings.workload(), batch_size=1)
    seen = observation(settings, workload, **run["measured"])
    assert predict(machine, seen).step_seconds == run["predicted"]["step_seconds"]
    data = fresh.data(STUDY)
    assert data["ranks"]["errors"]["median"] == abs(run["error"])
    assert len(data["runs"]) == len(alone["runs"])


def test_figures_of_ranks_tell_the_runs_of_a_machine_that_has_others():
    """Figures that collectives alone give are moved until runs are told."""
    profile = profile_in(newest(is_cpu=True).rows[0])
    own = {name: profile.quantities()[name].value for name in CONSTANTS if "overheads" in name}
    truth = {"fabric.bandwidth": 8e8, "fabric.latency": 3e-4, "host.core_sharing": 1.6, **own}
    machine = RankFigures(count=2, backend="gloo", values=truth).of(profile)
    seen = []
    for plan in CPU_RANK_RUNS:
        settings = plan.resolve(profile, TrainSettings(device="cpu"))
        whole = settings.workload()
        workload = replace(whole, batch_size=whole.batch_size // 2)
        unknown = observation(
            settings, workload, step_seconds=1.0, stall_seconds=None, busy_seconds={}
        )
        told = predict(machine, unknown)
        seen.append(replace(unknown, step_seconds=told.step_seconds))
    probed = {"fabric.bandwidth": 1.2e9, "fabric.latency": 1e-4}
    found = refined(RankFigures(count=2, backend="gloo", values=probed), profile, seen)
    assert found.values["host.core_sharing"] == pytest.approx(1.6, rel=0.1)
    for run in seen:
        told = predict(found.of(profile), run)
        assert told.step_seconds == pytest.approx(run.step_seconds, rel=0.03)


def test_an_error_in_a_rank_is_told(monkeypatch):
    settings = TrainSettings(model="tiny", batch_size=3, sequence=16, parallel="ddp", device="cpu")
    with pytest.raises(ProcessRaisedException, match="batch"):
        observe_ranks([settings], count=2, turns=1, windows=1, on_turn=lambda: None)


def test_a_given_profile_is_taken_and_another_one_is_refused(fresh):
    assert profile_in(fresh.rows[0]) == MACHINE
    with pytest.raises(ConfigError, match="profile was"):
        made(fresh.folder.parent, MACHINE.with_values({"host.dram": 1e9}))


def test_what_predictions_of_a_calibrated_machine_leave_out_is_what_the_record_needs():
    """Its ranges hold four of five runs; a machine's fitted figures have next to no spread."""
    runs = newest(is_cpu=True).rows[0]["runs"]
    outcomes = [
        Outcome(
            measured=run["measured"]["step_seconds"],
            low=run["predicted"]["step_seconds"],
            high=run["predicted"]["step_seconds"],
        )
        for run in runs
    ]
    assert pytest.approx(fit_left_out(outcomes), abs=0.01) == CALIBRATED


def test_a_recorded_run_is_an_observation(tmp_path):
    flags = (
        "--steps 14 --model tiny --sequence 16 --batch-size 1 --update-interval 2 --eval-batches 1"
    )
    done = CliRunner().invoke(
        main, ["train", "--out", str(tmp_path / "run"), "--link-gbps", "0.02", *flags.split()]
    )
    assert done.exit_code == 0, done.output
    seen = observation_of(tmp_path / "run")
    assert seen.step_seconds > 0
    assert seen.strategy.config.update_interval == 2
    assert seen.link == (0.02e9, 0.02e9)
    assert 0 < seen.busy_seconds["d2h"] < 2 * seen.step_seconds
    with pytest.raises(ConfigError, match="not a finished run's directory"):
        observation_of(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "--out", "p.json", "--device", "tpu"], "device must be auto, cpu or cuda"),
        (["calibrate", "--out", "p.json", "--from-trace", "."], "name it with --start"),
        (["calibrate", "--out", "p.json", "--link-gbps", "0"], "two positive numbers"),
        (["calibrate", "--out", "no/p.json"], "must be in a folder that exists, but no is none"),
        (["calibrate", "--out", "p.json", "--turns", "0"], "0 is not in the range x>=1"),
        (["validate", "--record", "."], "no record of a study"),
        (["validate", "--out", ".", "--force"], "--force replaces a record"),
        (["validate", "--out", "."], "no record of a study"),
    ],
)
def test_commands_refuse_what_they_can_not_do(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").touch()
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert (tmp_path / "mine.txt").exists()
    assert message in " ".join(done.output.split())
