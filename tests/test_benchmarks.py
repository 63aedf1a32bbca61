"""The benchmarks' arithmetic, on runs too small to time anything."""

import json

import pytest
import torch

from benchmarks import (
    engine_parts,
    gpu_figures,
    gpu_setup,
    gpu_step,
    host_jobs,
    host_update,
    sim_speed,
    step_overhead,
)
from benchmarks.record import spread
from zenflow import Span, StepReport, Timeline, ZenFlowConfig


def _report(step, seconds, stalls):
    return StepReport(
        step=step,
        seconds=seconds,
        stall_seconds=sum(stalls.values()),
        stalls=stalls,
        d2h_bytes=100,
        h2d_bytes=20,
        staleness=2,
        captured_energy=0.5,
        grad_norm=1.0,
        clip_factor=1.0,
        update_interval=4,
        lag=1,
        topk_ratio=0.1,
        rolling=True,
        select_interval=100,
        learning_rates=(1e-3,),
    )


def test_a_spread_of_one_value_is_that_value():
    assert spread([2.0]) == {"median": 2.0, "quartiles": [2.0] * 3, "p95": 2.0, "count": 1}


def test_step_figures_leave_the_warm_up_out_and_share_stalls_by_all_timed_seconds():
    reports = [_report(1, 9.0, {"host": 9.0}), _report(2, 1.0, {"host": 0.5}), _report(3, 3.0, {})]
    figures = gpu_figures.figures(reports, first=2, tokens=8)
    assert figures["timed_steps"] == 2
    assert figures["step_seconds"]["median"] == 2.0
    assert figures["stall_seconds_per_step"] == {"host": 0.25}
    assert figures["stall_fraction"] == 0.125
    assert figures["d2h_bytes_per_step"] == 100
    assert figures["tokens_per_second"] == 4.0


def test_a_lanes_speed_counts_only_the_time_in_which_it_copied():
    spans = (
        Span("device", "backward", 0.0, 2.0, 1),
        Span("d2h", "grads", 1.0, 2.0, 1, 30),
        Span("d2h", "grads", 3.0, 4.0, 1, 10),
    )
    lanes = gpu_figures.lane_figures(Timeline(spans))
    assert lanes["d2h"]["bytes_per_second"] == 20.0
    assert lanes["d2h"]["busy_share"] == 0.5
    assert lanes["d2h"]["behind_compute_share"] == 0.5
    assert "bytes_per_second" not in lanes["device"]


@pytest.mark.parametrize(
    ("preset", "bytes_per_param"),
    [
        ("on_device", 0.0),
        ("zero_offload", 28.0),  # one update a step: gradient, master, moments, weight
        ("zenflow", 20.5),  # in 4 steps: 3 gradients that move moments, 18 each, one update of 28
        ("zenflow_paper", 16.5),  # 4 gradients summed in 8 + 28, one update of 30
    ],
)
def test_host_bytes_follow_from_the_rule(preset, bytes_per_param):
    config = ZenFlowConfig.preset(preset)
    deferred = 0 if preset == "on_device" else 10
    assert gpu_figures.host_bytes(config, deferred) == deferred * bytes_per_param


def test_floor_bytes_without_important_columns_are_a_read_and_the_copies():
    config = ZenFlowConfig.preset("zero_offload")
    assert step_overhead.floor_bytes(config, 10) == {"training thread": 40, "copy lanes": 160}


def test_gpu_benchmark_runs_whole_on_a_tiny_model(tmp_path, capsys):
    arguments = ["--smoke", "--out", str(tmp_path), "--presets", "on_device", "zenflow"]
    assert gpu_step.main(arguments) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    names = ["on_device", "zenflow", "zenflow, keep", "on_device again"]
    assert [run["name"] for run in record["runs"]] == names
    assert record["smoke"]
    assert record["failures"] == {}
    first, ours, kept, again = record["runs"]
    assert first["losses"] == again["losses"]
    assert ours["losses"] == kept["losses"]  # both gradient modes take the same steps
    assert first["d2h_bytes_per_step"] == 0
    assert ours["timed_steps"] == gpu_setup.SMOKE["steps"]
    assert ours["times_floor"] <= ours["times_compute"]
    assert ours["lanes"]["host"]["updated_params_per_second"] > 0
    assert Timeline.read(tmp_path / "zenflow_keep.trace.json").busy("d2h") > 0
    assert "tokens/s" in capsys.readouterr().out


def test_gpu_benchmark_says_what_it_needs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_step.main(["--out", str(tmp_path)]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_failed_run_is_named_and_leaves_the_others(monkeypatch, tmp_path, capsys):
    measure = gpu_step.measure

    def broken(bench, run, num_left):
        if run.mode == gpu_step.KEEP:
            raise RuntimeError("no memory")
        return measure(bench, run, num_left)

    monkeypatch.setattr(gpu_step, "measure", broken)
    assert gpu_step.main(["--smoke", "--out", str(tmp_path), "--presets", "zenflow"]) == 1
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["failures"] == {"zenflow, keep": "RuntimeError: no memory"}
    assert [run["name"] for run in record["runs"]] == ["zenflow"]


def test_step_overhead_counts_shares_of_the_foreach_step():
    config = ZenFlowConfig(min_split_elements=1)
    record = step_overhead.measure(4, 16, repeats=3, bandwidth=1e9, config=config)
    rows = record["contenders"]
    assert list(rows) == [
        step_overhead.FOREACH,
        step_overhead.FUSED,
        step_overhead.KEEP,
        step_overhead.RELEASE,
    ]
    foreach, ours = rows[step_overhead.FOREACH], rows[step_overhead.KEEP]
    assert foreach["cpu_ratio"] == foreach["wall_ratio"] == 1.0
    assert ours["wall_ratio"] == ours["wall"]["median"] / foreach["wall"]["median"]
    assert ours["cpu"]["count"] == 3
    for parts in record["parts"].values():
        assert parts["energies"] > 0
        assert parts["device AdamW"] > 0
    for part, count in record["floor_bytes"].items():
        assert record["floor_seconds"][part] == count / 1e9


def test_nested_parts_are_counted_once():
    spent = {"outer": 0.0, "inner": 0.0}
    clock = iter([0.0, 1.0, 3.0, 10.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_parts.time, "thread_time", lambda: next(clock))
        watch = engine_parts.Stopwatch()
        watch.seconds = spent
        inner = watch.measures("inner", lambda: None)
        watch.measures("outer", inner)()
    assert spent == {"outer": 8.0, "inner": 2.0}


def test_the_host_benchmark_says_what_memory_would_allow():
    record = host_update.measure(1 << 16, threads=1, repeats=2)
    rows = record["jobs"]
    assert rows[host_jobs.OURS]["params_per_second"] > 0
    assert rows[host_jobs.MOMENTS]["params_per_second"] > 0
    targets = {target["against"]: target for target in record["targets"]}
    assert targets[host_jobs.CAST]["memory_allows"] == pytest.approx(46 / 30)
    ours, cast = (rows[name]["params_per_second"] for name in (host_jobs.OURS, host_jobs.CAST))
    assert targets[host_jobs.CAST]["ratio"] == pytest.approx(ours / cast)
    assert targets[host_jobs.TRIAD]["memory_allows"] is None


def test_the_simulators_speed_is_measured_beside_its_aims(tmp_path, capsys):
    sim_speed.main(["--smoke", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "sim_speed.json").read_text(encoding="utf-8"))
    assert set(record["rates"]) > {"events zenflow", "closed form zenflow"}
    assert all(rate["median"] > 0 for rate in record["rates"].values())
    assert all(times["median"] > 0 for times in record["times_floor"].values())
    shown = capsys.readouterr().out
    assert "100,000" in shown
    assert shown.strip() == (tmp_path / "sim_speed.txt").read_text(encoding="utf-8").strip()
