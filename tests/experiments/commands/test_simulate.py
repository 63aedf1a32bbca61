"""``zenflow simulate`` answers for named and own machines, and says what is wrong."""

import json
import re

import pytest
from click.testing import CliRunner

from experiments.cli import main
from experiments.report.trace_view import read_view
from experiments.traces.compare import compare_sides, load, whole_steps
from sim.hardware.catalog import find_machine
from sim.hardware.file import write_profile
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from sim.timing.host_optimizers import HOST_OPTIMIZERS, fresh_bytes
from zenflow.commit import commit
from zenflow.trace.timeline import Timeline

MODEL = ["--model", "qwen2.5-0.5b"]
SMALL = [*MODEL, "--hardware", "dgx-a100-80", "--num-gpus", "1", "--batch-size", "2"]


def run(*arguments):
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_the_figures_are_the_simulators():
    done = run(*SMALL, "--sequence", "512", "--json", "--update-interval", "8")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    workload = Workload.of_config(*find_model("qwen2.5-0.5b"), batch_size=2, sequence=512)
    costs = costs_of(workload, find_machine("dgx-a100-80", 1))
    expected = simulate(costs, Strategy.of("zenflow", update_interval=8))
    assert found["step_seconds"] == expected.step_seconds
    assert found["stall_seconds"] == expected.stall_seconds
    assert found["busy_seconds"] == dict(expected.busy_seconds)
    assert found["tokens_per_second"] == 1024 / expected.step_seconds
    assert found["memory"]["device_bytes"] > workload.model_bytes
    assert found["shortfalls"] == []
    assert found["step_seconds_interval"] is None


def test_a_process_with_one_thread_takes_longer_for_adamw_on_the_host():
    flags = [*SMALL[:4], "--num-gpus", "2", "--strategy", "fsdp2_offload", "--json"]
    one, all_of_them = (
        json.loads(run(*flags, *more).stdout)["busy_seconds"]["host"]
        for more in (["--host-threads", "1"], [])
    )
    host = find_machine("dgx-a100-80", 2).host
    assert all_of_them < one
    costs = costs_of(
        Workload.of_config(*find_model("qwen2.5-0.5b")), find_machine("dgx-a100-80", 2)
    )
    loop = HOST_OPTIMIZERS["loop"].moved * costs.num_params / 2 / host.core_bandwidth.value
    pages = fresh_bytes(costs, "loop", 2, 4) / host.page_bandwidth.value
    assert one == pytest.approx(loop + pages, rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ([], 0),
        (["--no-checkpointing"], 0),
        (["--checkpointing"], 1),
        (["--checkpointing", "1"], 1),
        (["--checkpointing", "1/2"], 0.5),
        (["--checkpointing=18/24"], 0.75),
        (["--checkpointing", "op"], "op"),
        (["--checkpointing", "--no-checkpointing"], 0),
        (["--no-checkpointing", "--checkpointing"], 1),
    ],
)
def test_a_share_of_layers_is_recomputed(flags, share):
    found = json.loads(run(*flags, *SMALL, "--json").stdout)
    workload = Workload.of_config(*find_model("qwen2.5-0.5b"), batch_size=2, checkpointing=share)
    costs = costs_of(workload, find_machine("dgx-a100-80", 1))
    assert found["step_seconds"] == simulate(costs, Strategy.of("zenflow")).step_seconds


@pytest.mark.parametrize(("word", "said"), [("2", "every second one is 1/2"), ("x", "1/2")])
def test_what_is_no_share_of_layers_is_refused(word, said):
    done = run(*SMALL, "--checkpointing", word)
    assert done.exit_code == 2
    assert said in done.output


def test_the_text_names_step_stall_bytes_lanes_and_memory():
    done = run(*SMALL, "--strategy", "zero_offload")
    assert done.exit_code == 0
    for word in ("simulated", "ms", "tokens/s", "stall", "GB down", "host", "memory", "GiB"):
        assert word in done.output
    assert max(map(len, done.output.splitlines())) < 200


def test_several_hosts_and_sharded_weights_are_simulated_as_asked_for():
    flags = [*MODEL, "--machine", "dgx-a100-80", "--num-hosts", "2", "--parallel", "fsdp",
             "--no-reshard-after-forward"]  # fmt: skip
    found = json.loads(run(*flags, "--json").stdout)
    workload = Workload.of_config(*find_model("qwen2.5-0.5b"), batch_size=4)
    machine = find_machine("dgx-a100-80", num_hosts=2)
    strategy = Strategy.of("zenflow", parallel="fsdp", reshards=False)
    expected = simulate(costs_of(workload, machine), strategy)
    assert found["step_seconds"] == expected.step_seconds
    assert found["fabric_bytes_per_step"] == expected.fabric_bytes > 0
    assert (found["num_devices"], found["num_hosts"]) == (16, 2)
    assert found["tokens_per_second"] == 16 * 4096 / expected.step_seconds
    assert "on 16 x dgx-a100-80 in 2 hosts" in run(*flags).output


def test_a_calibrated_profile_and_parts_by_name_are_machines_too(tmp_path):
    write_profile(find_machine("dgx-a100-80", 1), tmp_path / "mine.json")
    own = run(*MODEL, "--hardware", str(tmp_path / "mine.json"), "--json")
    table = run(*MODEL, "--hardware", "dgx-a100-80", "--num-gpus", "1", "--json")
    parts = run(*MODEL, "--gpu", "rtx4090", "--host", "epyc-9654", "--link", "pcie4-x16", "--json")
    assert json.loads(own.stdout)["step_seconds"] == json.loads(table.stdout)["step_seconds"]
    assert parts.exit_code == 0, parts.output


def test_trace_and_picture_are_written(tmp_path):
    trace, picture = tmp_path / "t.json.gz", tmp_path / "t.png"
    done = run(*SMALL, "--trace", str(trace), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    timeline = Timeline.read(trace)
    assert timeline.metadata["source"] == "simulated"
    assert {"device", "d2h", "h2d", "host"} <= set(timeline.lanes)
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("strategy", ["zenflow", "zenflow_paper", "zero_offload"])
def test_text_record_trace_comparison_and_report_say_the_same(tmp_path, strategy):
    path = tmp_path / "t.json.gz"
    flags = [*SMALL, "--strategy", strategy]
    text = run(*flags, "--trace", str(path)).output
    record = json.loads(run(*flags, "--json").stdout)
    # Selections are part of both figures, though no step of the trace shows one.
    assert (record["selection_seconds"] > 0) == strategy.startswith("zenflow")
    view = read_view(path)
    assert view.step_seconds == pytest.approx(record["step_seconds"], rel=1e-3)
    assert view.stall_fraction == pytest.approx(record["stall_fraction"], rel=1e-3)
    side = whole_steps(load(path))
    rows = {(row.group, row.lane, row.name): row.a for row in compare_sides(side, side)}
    assert rows["step", "", ""] == pytest.approx(record["step_seconds"], rel=1e-3)
    assert rows["stall", "device", ""] == pytest.approx(record["stall_seconds"], rel=1e-3)
    if strategy.startswith("zenflow"):
        assert rows["stall", "device", "select"] == pytest.approx(record["selection_seconds"])
    seconds, stalled = re.search(r"^stall +([0-9.]+) ms \(([0-9.]+)%\)", text, re.M).groups()
    assert float(seconds) == pytest.approx(1e3 * rows["stall", "device", ""], rel=0.01, abs=0.06)
    assert float(stalled) == pytest.approx(100 * view.stall_fraction, rel=0.01, abs=0.06)
    assert ("selections of columns" in text) == strategy.startswith("zenflow")


def test_a_trace_says_what_it_is_of(tmp_path):
    path = tmp_path / "t.json"
    run(*SMALL, "--sequence", "512", "--trace", str(path))
    facts = load(path).facts
    workload = Workload.of_config(*find_model("qwen2.5-0.5b"))
    assert (facts.model, facts.num_params) == ("qwen2.5-0.5b", workload.num_params)
    assert (facts.batch_size, facts.sequence, facts.grad_accum) == (2, 512, 1)
    assert (facts.strategy, facts.machine) == ("zenflow", "dgx-a100-80")
    assert facts.commit == commit()


def test_an_interval_holds_the_prediction_and_repeats():
    flags = [*SMALL, "--strategy", "zero_offload", "--draws", "12", "--seed", "3", "--json"]
    first, again = (json.loads(run(*flags).stdout) for _ in range(2))
    assert first == again
    interval = first["step_seconds_interval"]
    assert interval["low"] < first["step_seconds"] < interval["high"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama-2-7b", "--hardware", "dgx-a100-80"], "llama-2-7b"),
        ([*MODEL, "--hardware", "dgx-a10-80"], "dgx-a100-80"),
        ([*MODEL, "--hardware", "dgx-a100-80", "--strategy", "zenfow"], "did you mean 'zenflow'"),
        ([*MODEL], "one of --gpu, --machine and --profile says what the machine is, got none"),
        ([*MODEL, "--hardware", "gh200", "--gpu", "h200"], "got --gpu and --machine"),
        ([*SMALL, "--sequence", "0"], "sequence must be a whole number"),
        ([*SMALL, "--queue-depth", "0"], "queue_depth must be an integer >= 1"),
        ([*SMALL, "--hardware", "missing.json"], "missing.json"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_adapters_and_activations_have_flags():
    flags = [*SMALL, "--strategy", "qlora", "--json"]
    plain, more, away = (
        json.loads(run(*flags, *own).stdout)
        for own in ([], ["--lora-rank", "64"], ["--offload-activations"])
    )
    assert more["memory"]["device_bytes"] > plain["memory"]["device_bytes"]
    assert plain["d2h_bytes_per_step"] == 0 < away["d2h_bytes_per_step"]
    assert "not full fine-tuning" in plain["rule"]
    eager = json.loads(run(*flags, "--attention", "eager").stdout)
    assert eager["step_seconds"] > plain["step_seconds"]


def test_masters_in_float32_have_a_flag():
    flags = [*SMALL, "--strategy", "ddp", "--json"]
    own, wide, narrow = (
        json.loads(run(*flags, *given).stdout)
        for given in ([], ["--float32-master"], ["--no-float32-master"])
    )
    assert own["memory"] == wide["memory"]
    states = (
        own["memory"]["bytes_per_param"]["device"]
        - (narrow["memory"]["bytes_per_param"]["device"])
    )
    assert states == pytest.approx(8 * 1.03, rel=1e-6)  # with the allocator's reserve
    assert narrow["step_seconds"] < own["step_seconds"]
    assert narrow["rule"] == "AdamW, without float32 masters"
    refused = run(*SMALL, "--strategy", "lora", "--no-float32-master")
    assert "lora does not take float32_master" in " ".join(refused.output.split())


def test_a_strategy_without_adapters_takes_no_rank():
    for name in ("zenflow", "superoffload"):
        done = run(*SMALL, "--strategy", name, "--lora-rank", "8")
        assert done.exit_code == 2
        assert "does not take lora_rank" in " ".join(done.output.split())


def test_every_prediction_of_a_quantised_file_says_what_it_takes_the_weights_for(tmp_path):
    config = {**find_model("qwen2.5-0.5b")[1], "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "q.json").write_text(json.dumps(config))
    common = ["--model", str(tmp_path / "q.json"), "--gpu", "h100"]
    out = ["--out", str(tmp_path / "out")]
    for words in (
        ["simulate", *common],
        ["simulate", *common, "--json"],
        ["plan", *common, "--draws", "0"],
        ["sweep", *common, "--vary", "S=2", "--workers", "1", *out],
        ["tune", *common, "--trials", "1", *out],
    ):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        said = " ".join(done.output.split())
        assert "the file of q has fp8 weights (quantization_config); predicted with all" in said
