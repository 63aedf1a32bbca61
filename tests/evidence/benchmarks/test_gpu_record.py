"""What docs/gpu.md says of a record of `make gpu`, and which records are kept."""

import json

import pytest

from evidence.benchmarks.gpu import setup as gpu_setup
from evidence.benchmarks.gpu import step as gpu_step
from evidence.benchmarks.gpu.keep import keep, main
from evidence.benchmarks.gpu.loan.calls import CALLS, Place, chosen
from evidence.benchmarks.gpu.observations import observations
from evidence.pages.gpu import former_excesses, read_suite
from experiments.output.files import write_json
from experiments.output.provenance import RESULTS
from sim.fitting.refine import predict
from sim.hardware.unknown import generic_gpu
from zenflow.errors import ConfigError
from zenflow.trace.timeline import Timeline

RUNS = [
    "torch_fused",
    "on_device",
    "zero_offload",
    "zenflow",
    "zenflow, S 16",
    "zenflow, keep",
    "on_device again",
]
TESTS = """<testsuites><testsuite tests="9" failures="1" errors="0" skipped="2"/></testsuites>"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """What the suite leaves, its benchmark's part of a tiny model on the CPU."""
    runs = tmp_path_factory.mktemp("gpu")
    series = runs / "presets-1b"
    (part,) = chosen(CALLS[1], ["presets-1b"])
    place = Place(out=series, kept=runs, seconds=part.limit, is_smoke=True)
    _python, _m, _module, *arguments = part.command(place)
    assert gpu_step.main([*arguments, "--runs", *RUNS]) == 0
    (runs / "tests").mkdir()
    (runs / "tests" / "tests.xml").write_text(TESTS)
    (runs / "validation").mkdir()
    (runs / "validation" / "record.json").write_text("{}")
    (runs / ".validation.partial").mkdir()
    record = json.loads((series / "record.json").read_text())
    parts = [
        {"part": "tests", "ended": "failed with code 1", "seconds": 3.0},
        {"part": "presets-1b", "ended": "done", "seconds": 9.0},
    ]
    hardware = record["hardware"] | {"gpu": "NVIDIA H100 80GB HBM3"}
    whole = {"hardware": hardware, "versions": record["versions"], "commit": "0123456789ab"}
    write_json(runs / "suite.json", {**whole, "parts": parts})
    return runs


def test_the_benchmark_runs_whole_on_a_tiny_model(suite):
    series = suite / "presets-1b"
    record = json.loads((series / "record.json").read_text())
    (cell,) = record["cells"]
    assert [run["name"] for run in cell["runs"]] == RUNS[1:]
    assert record["smoke"]
    assert cell["failures"] == {}
    runs = {run["name"]: run for run in cell["runs"]}
    first, ours, kept = runs["on_device"], runs["zenflow"], runs["zenflow, keep"]
    assert first["losses"] == runs["on_device again"]["losses"]
    assert ours["losses"] == kept["losses"]  # both gradient modes take the same steps
    assert first["d2h_bytes_per_step"] == 0
    assert cell["torch_fused"]["tokens_per_second"] > 0
    assert ours["timed_steps"] == gpu_setup.SMOKE["steps"]
    assert runs["zenflow, S 16"]["first_timed_step"] == 33  # two windows have passed
    assert ours["times_floor"] <= ours["times_compute"]
    assert ours["lanes"]["host"]["updated_params_per_second"] > 0
    trace = Timeline.read(series / "tiny_2_x_16_zenflow_keep.trace.json.gz")
    assert trace.busy("d2h") > 0
    shown = (series / "table.txt").read_text()
    assert "tokens/s" in shown
    assert "share of on_device's speed" in shown


def test_runs_are_what_the_calibration_takes(suite):
    path = suite / "presets-1b" / "record.json"
    (cell,) = json.loads(path.read_text())["cells"]
    pairs = zip(cell["runs"], observations(path), strict=True)
    ((run, seen),) = (pair for pair in pairs if pair[0]["name"] == "zenflow")
    assert run["wall_seconds"] > 0
    assert run["garbage_collection"]["count"] >= 0
    assert len(run["step_ends"]) == len(run["losses"])
    assert seen.step_seconds == run["step_seconds"]["median"]
    assert seen.busy_seconds["d2h"] > 0
    assert set(seen.passes) == {"forward", "backward"}
    assert predict(generic_gpu(), seen).step_seconds > 0


def test_a_suites_records_are_kept_and_told(suite, tmp_path):
    folder = keep(suite, tmp_path)
    assert folder.name.endswith("_gpu_nvidia-h100-80gb-hbm3")
    assert (folder / "presets-1b" / "record.json").is_file()
    assert list((folder / "presets-1b").glob("*.trace.json.gz"))
    assert list(tmp_path.glob("*_validation_nvidia-h100-80gb-hbm3/record.json"))
    assert not list(folder.glob("*validation*"))
    found = read_suite(folder)
    assert (folder / "timeline.png").is_file()
    assert found["picture"] == "timeline.png"
    assert (found["gpu"], found["commit"]) == ("NVIDIA H100 80GB HBM3", "0123456789ab")
    assert found["parts"][0] == "tests 6 passed, 1 failed, 2 skipped (failed with code 1)"
    (cell,) = json.loads((folder / "presets-1b" / "record.json").read_text())["cells"]
    fused, *rows = found["rows"]
    assert fused["run"].startswith("torch's fused AdamW")
    assert [row["run"] for row in rows] == [run["name"] for run in cell["runs"]]
    device, ours = cell["runs"][0], next(r for r in cell["runs"] if r["name"] == "zenflow")
    share = ours["tokens_per_second"] / device["tokens_per_second"]
    (row,) = (row for row in rows if row["run"] == "zenflow")
    assert row["ms"] == f"{1e3 * ours['step_seconds']['median']:.1f}"
    assert row["share"] == f"{share:.3f}"
    assert found["first"]["ours"] == share


def test_aims_that_are_missed_are_named(suite, tmp_path):
    folder = keep(suite, tmp_path)
    path = folder / "presets-1b" / "record.json"
    record = json.loads(path.read_text())
    (cell,) = record["cells"]
    (ours,) = (run for run in cell["runs"] if run["name"] == "zenflow")
    ours |= {"tokens_per_second": 1e-3, "lanes": {}, "slowest_position": 1.0}
    cell["does_not_fit"], cell["failures"] = ["delayed"], {"zenflow, keep": "broke"}
    record["not_reached"] = ["1b, 32 x 1024"]
    write_json(path, record)
    found, name = read_suite(folder), cell["cell"]["name"]
    missed = f"{name}: zenflow: share of on_device's speed, at least 0.95: 0.000, MISSED"
    assert missed in found["missed"]
    assert found["applying"] > len(found["missed"])
    ended = {row["run"]: row["ms"] for row in found["rows"][-2:]}
    assert ended == {"delayed": "does not fit", "zenflow, keep": "**failed**"}
    assert found["not_reached"] == ["1b, 32 x 1024"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"commit": "0123456789ab-dirty"}, "commit, then make gpu"),
        ({"hardware": {"gpu": None}}, "must come from a GPU"),
        ({}, "a directory that make gpu has left"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, changes, message):
    if changes:
        whole = {"hardware": {"gpu": "A100"}, "commit": "0123456789ab", "parts": []}
        write_json(tmp_path / "suite.json", whole | changes)
    with pytest.raises(ConfigError, match=message):
        keep(tmp_path, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_folder_without_a_record_ends_the_command(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "make gpu has left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "found"), [({"rolling": True}, [0.25]), ({"update_rule": "exact"}, [])]
)
def test_losses_of_the_former_rule_are_beside_those_of_the_device(config, found):
    device = {"name": "on_device", "config": {}, "losses": [9.0, *[4.0] * 8]}
    ours = {"name": "zenflow, S 2", "config": config, "losses": [9.0, *[5.0] * 8]}
    cells = [{"runs": [device, ours]}, {"runs": [ours]}]
    assert list(former_excesses(cells)) == pytest.approx(found)


def test_observations_of_visits_have_the_layers_that_stayed():
    folder = RESULTS / "2026-11-28_gpu_nvidia-h100-80gb-hbm3" / "presets-8b-visits"
    found = {each.label.rpartition(": ")[2]: each for each in observations(folder / "record.json")}
    assert found["all stay"].strategy.streams is None
    visits = (found[name].strategy.streams for name in ("half visit", "all visit"))
    assert [streams.resident_layers for streams in visits] == [16, 0]
