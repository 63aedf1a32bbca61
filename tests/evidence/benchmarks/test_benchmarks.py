"""The benchmarks' arithmetic, on runs too small to time anything."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evidence.benchmarks import (
    engine_parts,
    host_jobs,
    host_update,
    lightning_tests,
    sim_speed,
    step_overhead,
)
from evidence.benchmarks.gpu import figures as gpu_figures
from evidence.benchmarks.gpu import idle as gpu_idle
from evidence.benchmarks.gpu import setup as gpu_setup
from evidence.benchmarks.gpu import step as gpu_step
from evidence.benchmarks.gpu import suite as gpu_suite
from evidence.benchmarks.gpu.loan.calls import CALLS
from evidence.benchmarks.record import spread
from tests.models import TinyStack, closing
from zenflow import Span, StepReport, Timeline, ZenFlowAdamW, ZenFlowConfig


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
        select_interval=100,
        learning_rates=(1e-3,),
    )


def test_a_spread_of_one_value_is_that_value():
    assert spread([2.0]) == {"median": 2.0, "quartiles": [2.0] * 3, "p95": 2.0, "count": 1}


def test_hooks_are_a_start_and_a_slope_in_microseconds():
    from evidence.benchmarks import framework_hooks  # which loads FSDP2

    points = {count: 2e-4 + 3e-6 * count for count in framework_hooks.COUNTS}
    start, each = framework_hooks.line(points)
    assert (start, each) == (pytest.approx(2e-4), pytest.approx(3e-6))
    shown = framework_hooks.table({"fsdp2": {"forward": [start, each]}}).splitlines()
    assert shown[1].split() == ["fsdp2", "forward", "200", "3.0"]


def test_launches_of_modules_are_counted_and_compared_with_llamas():
    pytest.importorskip("transformers")
    from evidence.benchmarks import module_launches

    found = module_launches.measure(module_launches.cases_of(["llama", "opt"]), 1, rounds=1)
    # Norms of six kernels in 16 bits are four in float32; products, rotary positions and sums.
    assert found["llama sdpa"]["kernels"] == [34, 67]
    assert found["opt sdpa"]["kernels"] == [13, 27]
    layers = {name: {"kernels": [10, 20], "seconds": [1e-4, 2e-4]} for name in found}
    layers["opt sdpa"] = {"kernels": [10, 20], "seconds": [55e-6, 2e-4]}
    rows = [line.split() for line in module_launches.table(layers).splitlines()]
    assert next(row for row in rows if row[:2] == ["opt", "sdpa"]) == (
        ["opt", "sdpa", "10", "+", "20", "55", "+", "200", "0.69", "+", "1.00"]
    )


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
    ("preset", "depth", "bytes_per_param"),
    [
        ("on_device", 1, 0.0),
        ("zero_offload", 1, 28.0),  # one pass a step: gradient, master, moments, weight
        ("zenflow", 4, 8.5),  # in 4 steps one pass: 4 gradients, master, moments, weight
        ("zenflow", 1, 26.5),  # 4 passes with a gradient each, a weight in one of them
        ("zenflow_paper", 1, 16.5),  # 4 gradients summed in 8 + 28, one step of 30
    ],
)
def test_host_bytes_follow_from_the_rule(preset, depth, bytes_per_param):
    config = ZenFlowConfig.preset(preset)
    deferred = 0 if preset == "on_device" else 10
    assert gpu_figures.host_bytes(config, deferred, depth) == deferred * bytes_per_param


def test_floor_bytes_without_important_columns_are_a_read_and_the_copies():
    config = ZenFlowConfig.preset("zero_offload")
    assert step_overhead.floor_bytes(config, 10) == {"training thread": 40, "copy lanes": 160}


def test_gpu_benchmark_says_what_it_needs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_step.main(["--out", str(tmp_path)]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_failed_run_is_named_and_leaves_the_others(monkeypatch, tmp_path, capsys):
    measure = gpu_step.measure

    def broken(bench, run, num_left):
        if run.mode == gpu_step.KEEP:
            raise RuntimeError("broken")
        if "S" in run.name:
            raise torch.OutOfMemoryError
        return measure(bench, run, num_left)

    monkeypatch.setattr(gpu_step, "measure", broken)
    runs = ["zenflow", "zenflow, S 2", "zenflow, S 16", "zenflow, keep"]
    assert gpu_step.main(["--smoke", "--out", str(tmp_path), "--runs", *runs]) == 1
    (cell,) = json.loads((tmp_path / "record.json").read_text())["cells"]
    assert cell["failures"] == {"zenflow, keep": "RuntimeError: broken"}
    assert cell["does_not_fit"] == ["zenflow, S 2", "zenflow, S 16"]
    assert [run["name"] for run in cell["runs"]] == ["zenflow"]
    assert "zenflow, S 16 does not fit" in (tmp_path / "table.txt").read_text()


@pytest.mark.parametrize(
    ("limit", "reached", "left"),
    [
        ("40", ["on_device", "on_device again"], ["tiny, 2 x 16"]),
        ("0.1", ["on_device"], ["tiny, 2 x 16: on_device again", "tiny, 2 x 16"]),
    ],
)
def test_runs_and_cells_that_time_does_not_suffice_for_are_named(
    monkeypatch, tmp_path, limit, reached, left
):
    twice = gpu_setup.SERIES["smoke"] * 2
    monkeypatch.setattr(gpu_step, "SERIES", {"smoke": twice})
    runs = ["on_device", "on_device again"]
    arguments = ["--smoke", "--limit", limit, "--out", str(tmp_path), "--runs", *runs]
    assert gpu_step.main(arguments) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert [run["name"] for cell in record["cells"] for run in cell["runs"]] == reached
    assert record["not_reached"] == left


def test_idle_time_is_that_of_the_stream_that_computes():
    def event(cat, stream, start, seconds):
        own = {"stream": stream}
        return {"ph": "X", "cat": cat, "ts": start, "dur": seconds, "args": own}

    found = gpu_idle.idle_of(
        [
            event("kernel", 7, 100.0, 40.0),
            event("kernel", 7, 130.0, 20.0),  # the two overlap
            event("kernel", 7, 180.0, 20.0),
            event("kernel", 9, 150.0, 30.0),  # another stream's does not count
            event("gpu_memcpy", 7, 150.0, 30.0),
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert found == {"seconds": 100e-6, "idle_seconds": 30e-6, "idle_share": 0.3}
    assert gpu_idle.idle_of([]) is None


def _run(name, **facts):
    common = {
        "name": name,
        "profiled": None,
        "peak_device_bytes": None,
        "tokens_per_second": 100.0,
        "stall_fraction": 0.0,
        "stall_seconds_per_step": {},
        "slowest_position": 1.0,
        "config": {"update_rule": "exact"},
        "lanes": {},
        "losses": [2.0] * 10,
    }
    return {**common, **facts}


def test_aims_follow_from_a_cells_runs():
    busy = {"host": {"busy_share": 0.9}, "h2d": {"busy_share": 0.2}}
    offload = _run("zero_offload", stall_fraction=0.5, stall_seconds_per_step={"host": 1.0})
    ours = _run(
        "zenflow",
        tokens_per_second=90.0,
        stall_seconds_per_step={"host": 0.1},
        profiled={"idle_share": 0.10, "stall_share": 0.07},
        losses=[2.0] * 10 + [9.0],
    )
    crowded = _run("zenflow, S 2", tokens_per_second=50.0, lanes=busy, slowest_position=1.2)
    runs = [_run("on_device"), offload, ours, crowded]
    found = [(aim.text.split(",")[0], aim.holds) for aim in gpu_figures.aims(runs)]
    assert found[:6] == [
        ("zenflow: idle time by the profiler is the stalls", False),
        ("zenflow: share of on_device's speed", False),
        ("zenflow: stalled share", True),
        ("zenflow: loss above on_device's", True),
        ("zenflow: slowest position of a window", True),
        ("zenflow: share of zero_offload's stall gone", True),
    ]
    # The other's host has more to do than its device: speed and stall are not held against it.
    assert [holds for _, holds in found[6:]] == [None, None, True, False, True]
    assert "does not apply" in gpu_figures.shown_aims([_run("on_device"), crowded])


def test_the_slowest_position_is_that_of_a_window():
    seconds = [9.0] * 4 + [1.0, 1.0, 1.0, 2.0] * 3
    reports = [_report(step, value, {}) for step, value in enumerate(seconds, start=1)]
    assert gpu_figures.slowest_position(reports, 5, 4) == 2.0
    assert gpu_figures.slowest_position(reports, 5, 3) == 1.0


def test_every_part_runs_by_itself_and_a_failed_one_leaves_the_others(
    monkeypatch, tmp_path, capsys
):
    def command(code):
        return lambda out, seconds: [sys.executable, "-c", code]

    parts = {
        "good": command("pass"),
        "bad": command("raise SystemExit(3)"),
        "slow": command("import time; time.sleep(60)"),
        "last": command("pass"),
    }
    monkeypatch.setattr(gpu_suite, "PARTS", parts)
    monkeypatch.setattr(gpu_suite, "cuda", SimpleNamespace(is_available=lambda: True))
    assert gpu_suite.main(["--out", str(tmp_path), "--minutes", "0.02"]) == 1
    record = json.loads((tmp_path / "suite.json").read_text())
    assert [part["ended"] for part in record["parts"]] == [
        "done", "failed with code 3", "stopped after 1 s", "done",
    ]  # fmt: skip
    assert "failed with code 3" in capsys.readouterr().out
    assert gpu_suite.main(["last", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "suite.json").read_text())
    assert [part["part"] for part in record["parts"]] == ["good", "bad", "slow", "last"]
    (tmp_path / "suite.json").write_text(json.dumps(record | {"commit": "another"}))
    assert gpu_suite.main(["last", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "suite.json").read_text())
    assert [part["part"] for part in record["parts"]] == ["last"], "one record mixes no commits"
    with pytest.raises(SystemExit):
        gpu_suite.main(["lost", "--out", str(tmp_path)])
    assert "PART must be of good, bad, slow, last" in capsys.readouterr().err


def test_commands_of_parts_are_ones_that_exist(tmp_path):
    for name, command in gpu_suite.PARTS.items():
        arguments = command(tmp_path / name, 570.0)
        assert arguments[:2] == [sys.executable, "-m"]
        assert importlib.util.find_spec(arguments[2]) is not None
    assert gpu_suite.PARTS["presets-3b"](tmp_path, 570.0)[-1] == "525"
    loaned = [part.name for parts in CALLS.values() for part in parts]
    named = {name.removeprefix("presets-") for name in (*gpu_suite.PARTS, *loaned)}
    assert {name.removesuffix("-short") for name in gpu_setup.SERIES} - named == {
        "smoke",
        "smoke-parts",
    }


def test_the_hosts_arithmetic_is_left_out_where_only_the_engine_is_timed():
    model = TinyStack()
    config = ZenFlowConfig(update_interval=1, topk_ratio=0.0, min_split_elements=16)
    with closing(ZenFlowAdamW(model.parameters(), config=config)) as optimizer:
        hosts = [split.host for split in optimizer._engine.layout.splits]

        def moved_by_a_step():
            before = [host.state.exp_avg.clone() for host in hosts]
            model.loss(0).backward()
            optimizer.step()
            optimizer.synchronize()
            return any(
                not torch.equal(old, host.state.exp_avg)
                for old, host in zip(before, hosts, strict=True)
            )

        with step_overhead.idle_host():
            assert not moved_by_a_step()
        assert moved_by_a_step()


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
    assert rows[host_jobs.replay_of(8)]["bytes_per_step"] == 42 / 8
    assert rows[host_jobs.PUBLISHED]["bytes_per_step"] == 66 / 4
    targets = {target["against"]: target for target in record["targets"]}
    assert targets[host_jobs.CAST]["memory_allows"] == pytest.approx(46 / 30)
    ours, cast = (rows[name]["steps_per_second"] for name in (host_jobs.OURS, host_jobs.CAST))
    assert targets[host_jobs.CAST]["ratio"] == pytest.approx(ours / cast)
    assert targets[host_jobs.TRIAD]["memory_allows"] is None


def test_the_simulators_speed_is_measured_beside_its_aims(tmp_path, capsys):
    sim_speed.main(["--smoke", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "sim_speed.json").read_text(encoding="utf-8"))
    assert set(record["rates"]) > {"events zenflow", "machines zenflow", sim_speed.LARGE}
    assert all(rate["median"] > 0 for rate in record["rates"].values())
    assert all(times["median"] > 0 for times in record["times_floor"].values())
    shown = capsys.readouterr().out
    assert "10,000" in shown
    assert "points of machines, SimPy" in shown
    assert shown.strip() == (tmp_path / "sim_speed.txt").read_text(encoding="utf-8").strip()


JUNIT = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="left out"><skipped message="needs a GPU"/></testcase>
<testcase classname="a" name="bad"><failure message="wrong&#10;at line 3"/></testcase>
<testcase classname="a" name="bad"><error message="behind it"/></testcase>
<testcase classname="a" name="late"><error message="a thread is left"/></testcase>
</testsuite></testsuites>"""


def test_a_test_of_lightning_counts_once_and_says_why_it_failed():
    assert lightning_tests.outcome(JUNIT) == {
        "passed": 1,
        "skipped": 1,
        "failed": {"a::bad": "wrong", "a::late": "a thread is left"},
    }


def test_each_class_of_torch_s_has_a_stand_in_of_its_own():
    made = [lightning_tests.standing_in(name, "zenflow") for name in ("SGD", "Adam")]
    assert made[0] is not made[1]
    model = TinyStack(num_layers=2)
    with closing(made[0](model.parameters(), lr=0.5, momentum=0.9)) as optimizer:
        assert optimizer.defaults["lr"] == 0.5
        assert optimizer.memory.host_bytes > 0


def test_memory_is_counted_by_the_system_beside_what_the_plan_says(monkeypatch):
    from evidence.benchmarks import host_memory

    if not Path("/proc/self/status").is_file():
        pytest.skip("counts pages as Linux does")
    monkeypatch.setattr(host_memory, "SIDE", 512)
    rows = {
        kind: host_memory.row_of(host_memory.measure(kind, 4 * 512**2))
        for kind in host_memory.FORMATS
    }
    planned = {kind: row["planned"] for kind, row in rows.items()}
    assert planned["float32"] > planned["8-bit gradients"] > planned["compact"]
    assert planned["compact"] > planned["compact, 8-bit gradients"]
    assert rows["compact"]["state"] == pytest.approx(5.03, abs=0.02)
    assert all(row["trimmed"] <= row["held"] for row in rows.values())
    lines = host_memory.table(rows).splitlines()
    assert lines[1].split()[:2] == ["float32", f"{rows['float32']['state']:.2f}"]


def test_uploads_of_changed_weights_have_the_bytes_of_their_formula():
    from evidence.benchmarks import changed_uploads
    from experiments.training.settings.training import TrainSettings

    knobs = {"min_split_elements": 4096}
    settings = TrainSettings(
        model="mini", batch_size=1, sequence=16, lr=1e-6, steps=7, knobs=knobs
    )
    row = changed_uploads.measure(settings, 1, "float32")
    assert row["whole_share"] == 0
    assert row["upload_bytes_per_weight"] == row["formula_bytes_per_weight"] < 1
    assert all(changed_uploads.verdicts([row]).values())
    worse = {**row, "formula_bytes_per_weight": 1.0}
    assert not all(changed_uploads.verdicts([worse]).values())
    assert "float32" in changed_uploads.table([row])


def test_pages_cost_what_a_process_that_keeps_its_memory_is_faster_by():
    from evidence.benchmarks import host_optimizers

    fresh = {"large: fused": (1.0, 0.0), "large: loop": (7.0, 8.0), "copy": (0.3, 0.0)}
    kept = {"large: fused": (1.0, 0.0), "large: loop": (3.0, 0.0), "copy": (0.3, 0.0)}
    assert host_optimizers.page_nanoseconds(fresh, kept) == {"large: loop": 0.5}
    rows = [line.split() for line in host_optimizers.table(1, fresh, kept).splitlines()[2:]]
    assert rows[1] == ["large:", "loop", "7.000", "3.000", "3.00", "8.00", "0.50"]
    assert rows[2] == ["copy", "0.300", "0.300", "0.00"]


def test_a_trainers_parts_are_of_its_excess_over_the_loop(monkeypatch):
    pytest.importorskip("trl")
    from evidence.benchmarks import trainer_steps

    sizes = {layers: 10 * layers for layers in trainer_steps.LAYERS}
    models = {layers: torch.nn.ModuleList(torch.nn.Identity() for _ in range(size - 1))
              for layers, size in sizes.items()}  # fmt: skip
    monkeypatch.setattr(trainer_steps, "tiny", models.__getitem__)
    points = [(n, count) for n in trainer_steps.LAYERS for count in trainer_steps.MICRO_BATCHES]
    loop = {(n, count): [count * 1e-3 * n] * 3 for n, count in points}
    own = {
        (n, count): [s + 5e-4 + count * (2e-4 + 6e-6 * sizes[n]) for s in seconds]
        for (n, count), seconds in loop.items()
    }
    found = trainer_steps.summarise({"loop": loop, "trl": own})
    assert found["trl"]["parts"] == pytest.approx(
        {"step": 5e-4, "micro_batch": 2e-4, "module": 6e-6}
    )
    lines = trainer_steps.table(found).splitlines()
    assert lines[1].split()[:2] == ["trl", "0.5000"]
    assert "loop" in lines[2]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["loop", "transformers", "trl"])
def test_trainers_of_the_benchmark_run(name):
    pytest.importorskip("trl")
    from evidence.benchmarks import trainer_steps

    torch.set_num_threads(1)
    assert trainer_steps.RUNS[name]((1, 2), 7) > 0
