"""Errors of predictions, computed from records alone, and the short runs behind them."""

import json

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from experiments.calibration import compute
from experiments.calibration.compute import fit_compute, measure_compute
from experiments.calibration.plans import (
    CPU_RUNS,
    CPU_SHAPES,
    CPU_VALIDATION,
    GPU_RUNS,
    GPU_SHAPES,
    GPU_VALIDATION,
)
from experiments.calibration.runs import observation_of, observe
from experiments.calibration.short_run import short_run
from experiments.cli import main
from experiments.studies.validation.document import validations
from experiments.studies.validation.study import (
    PICTURE,
    PROFILE,
    TABLE,
    Validated,
    errors_of,
    rank_correlation,
    read_record,
    record_of,
    table,
    validate,
)
from experiments.training.settings import TrainSettings
from experiments.training.setup import workload_of
from sim.fitting.refine import Observation
from sim.hardware.catalog import find_machine
from sim.hardware.file import read_profile, write_profile
from sim.simulate import Prediction, Strategy
from zenflow.errors import ConfigError
from zenflow.trace.timeline import Timeline


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def validated(measured, predicted, stalls=(0.0, 0.0), host=(0.0, 0.0)):
    settings = TrainSettings(strategy="on_device", model="tiny")
    observation = Observation(
        label="run",
        workload=settings.workload(),
        strategy=Strategy.of("on_device"),
        step_seconds=measured,
        stall_seconds=stalls[0],
        busy_seconds={"host": host[0]},
    )
    prediction = Prediction(
        strategy="on_device",
        step_seconds=predicted,
        slowest_step_seconds=predicted,
        stall_seconds=stalls[1],
        d2h_bytes=0.0,
        h2d_bytes=0.0,
        busy_seconds={"host": host[1]},
        timeline=Timeline(),
    )
    return Validated(observation=observation, spread=0.0, prediction=prediction)


def test_errors_by_hand():
    runs = [
        validated(1.0, 1.1),
        validated(2.0, 1.9, stalls=(1.0, 0.8)),
        validated(4.0, 4.0, host=(1.0, 2.0)),
    ]
    found = errors_of(runs)
    assert found.median == pytest.approx(0.05)
    assert found.worst == pytest.approx(0.1)
    assert found.p90 == pytest.approx(0.09)
    assert found.rank_correlation == pytest.approx(1.0)
    assert found.stall_median == pytest.approx(0.0)
    assert found.lanes["host"] == pytest.approx(0.0)
    assert errors_of(runs[1:2]).stall_median == pytest.approx(0.1)
    assert errors_of(runs[2:]).lanes["host"] == pytest.approx(0.25)
    assert "+10.0%" in table(runs)
    with pytest.raises(ConfigError, match="holds none"):
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
    found = observe(runs, turns=2, windows=1, on_turn=lambda: turns.append(1), together=1)
    assert len(turns) == 4
    slow, fast = (run.observation for run in found)
    # Two ways of all split parameters over the emulated link bound the step from below.
    assert slow.step_seconds > 2 * 4 * 0.9e5 / 20e6
    assert slow.stall_seconds > 0.3 * slow.step_seconds
    assert fast.step_seconds < slow.step_seconds
    assert set(slow.busy_seconds) == {"device", "d2h", "h2d", "host"}

    rows = [(run.settings, run.observation, run.spread) for run in found]
    (tmp_path / "runs.json").write_text(json.dumps(record_of(rows, {})), encoding="utf-8")
    again = read_record(tmp_path)
    assert [item for item, _ in again] == [run.observation for run in found]
    assert [spread for _, spread in again] == [run.spread for run in found]


def test_compute_of_two_shapes_is_measured_and_fitted():
    shapes = [
        TrainSettings(model="tiny", batch_size=b, sequence=64, strategy="on_device")
        for b in (1, 16)  # so far apart that no busy machine takes longer for the smaller one
    ]
    times = measure_compute(shapes, rounds=3, on_round=lambda: None)
    assert times[0].forward < times[1].forward
    fit = fit_compute(times)
    assert fit.fit.median_error < 0.3
    assert min(fit.fit.constants.values()) >= 0


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


def cpu_profile(path):
    base = find_machine("dgx-a100-80", 1)
    values = {f"device.flops.{name}": 1e11 for name in base.device.flops}
    profile = base.with_values({**values, "device.bandwidth": 1e10})
    write_profile(profile, path)
    return profile


def test_the_command_predicts_a_records_runs_again(tmp_path):
    profile = cpu_profile(tmp_path / "profile.json")
    settings = TrainSettings(model="tiny", strategy="on_device", dtype="float32")
    seen = validated(1.0, 1.0).observation
    record = record_of([(settings, seen, 0.1)], {})
    (tmp_path / "runs.json").write_text(json.dumps(record), encoding="utf-8")
    picture = tmp_path / "errors.png"
    done = CliRunner().invoke(
        main, ["validate", "--record", str(tmp_path), "--plot", str(picture)]
    )
    assert done.exit_code == 0, done.output
    assert picture.stat().st_size > 10_000
    expected = table(validate(profile, read_record(tmp_path)))
    assert done.output.strip() == expected


def test_tables_and_pictures_say_what_the_simulator_says_today():
    for folder in validations():
        profile = read_profile(folder / PROFILE)
        runs = validate(profile, read_record(folder))
        found = errors_of(runs)
        made = "made by python -m experiments.studies.validation.document"
        assert (folder / TABLE).read_text(encoding="utf-8") == table(runs) + "\n", made
        with Image.open(folder / PICTURE) as picture:
            assert picture.text["Description"] == str(found), made


@pytest.mark.parametrize(
    ("content", "message"),
    [("not JSON", "no record of a validation"), ('{"format": 9}', "format 9"), ("{}", "KeyError")],
)
def test_a_record_that_is_none_is_refused(tmp_path, content, message):
    (tmp_path / "runs.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_record(tmp_path)


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
        (["calibrate", "--out", "no/p.json"], "must be in a folder that exists, but no does not"),
        (["calibrate", "--out", "p.json", "--turns", "0"], "0 is not in the range x>=1"),
        (["validate", "--record", "."], "can't be read"),
    ],
)
def test_commands_refuse_what_they_can_not_do(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
