"""``zenflow tune``: its files can be trained with, its mistakes say a way out."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from autotune.constraints import staleness_of
from autotune.offline.backends import SimulatedBackend
from experiments.cli import main
from experiments.commands.prediction.tune import _planned
from experiments.commands.training.config_file import read_config_file, tuned_for
from experiments.search.measured_backend import MeasuredBackend
from experiments.training.settings.training import TrainSettings
from sim.hardware.catalog import find_machine
from sim.memory.chance import LIKELY, chance_to_fit
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.grid import INTERVALS, KS
from tests.experiments.runs import end, ended, summary, trained, write_text
from zenflow.knobs import Knobs

ROOT = Path(__file__).parents[3]
SIMULATED = ["--model", "qwen2.5-0.5b", "--gpu", "rtx4090", "--batch-size", "2",
             "--largest-staleness", "9"]  # fmt: skip
"""Windows of 8 steps at most: a simulation takes as long as its windows."""
FEW = [*SIMULATED, "--update-interval", "4"]
"""The same with fewer settings, whose memory is looked at before anything else."""
MEASURED = [
    "--backend", "measured", "--model", "own:tiny", "--batch-size", "2", "--sequence", "32",
    "--device", "cpu", "--device-threads", "1",
]  # fmt: skip
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("blank_pictures")]


def tune(*arguments):
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


def tuned(out, *arguments):
    done = tune(*arguments, "--out", out)
    assert done.exit_code == 0, done.output
    return done.output


def rows_of(out):
    return list(csv.DictReader((out / "trials.csv").read_text().splitlines()))


def knobs_of(path):
    settings, knobs = read_config_file(path)
    return settings, knobs, Knobs.of(TrainSettings(**settings, knobs=knobs).config(1))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    out = tmp_path_factory.mktemp("tune") / "out"
    return out, tuned(out, *SIMULATED, "--trials", "14", "--checkpointing", "--hysteresis", "0.2")


def test_the_best_setting_is_a_config_file_of_train(simulated):
    out, _ = simulated
    settings, knobs, best = knobs_of(out / "best.toml")
    found = summary(out)
    assert best == Knobs.from_dict(found["best"][0]["knobs"])
    assert settings["strategy"] == "zenflow"
    assert (settings["batch_size"], settings["sequence"]) == (2, 1024)
    assert settings["checkpointing"] is True
    assert settings["model"] == "Qwen/Qwen2.5-0.5B", "train knows names of the hub"
    assert knobs["hysteresis"] == 0.2
    assert tuned_for(out / "best.toml").endswith(
        "qwen2.5-0.5b on rtx4090-desktop (simulated figures)"
    )


def test_nothing_simulated_is_called_measured(simulated):
    out, text = simulated
    assert "14 simulated" in text
    assert "measured" not in text
    assert summary(out)["num_trials"]["simulated"] == 14


def test_a_run_says_what_its_file_was_tuned_for(simulated, tmp_path):
    out, _ = simulated
    changes = ["--model", "own:tiny", "--sequence", "32", "--steps", "1", "--device", "cpu"]
    command = ["--config", out / "best.toml", *changes, "--no-checkpointing"]
    said = ended(0, *command, "--out", tmp_path / "run")
    assert "tuned for a run of qwen2.5-0.5b on rtx4090-desktop" in said


@pytest.mark.parametrize("name", ["tiny", "llama-2-7b", "./own/config.json"])
def test_the_best_setting_names_the_model_that_was_searched(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/config.json").write_text(json.dumps(find_model("gpt2")[1]))
    machine = ["--gpu", "a100-80gb", "--host-ram", "512", "--checkpointing"]
    tuned("out", "--model", name, *machine, "--trials", "1")
    expected = {
        "tiny": "tiny",
        "llama-2-7b": "meta-llama/Llama-2-7b-hf",
        "./own/config.json": str(tmp_path / "own" / "config.json"),
    }
    assert read_config_file(Path("out/best.toml"))[0]["model"] == expected[name]


@pytest.mark.parametrize(
    ("flags", "way_out"),
    [
        ([], "It fits with --checkpointing --host-ram 128."),
        (["--checkpointing"], "It fits with --host-ram 128."),
        (["--checkpointing", "--host-memory", "64"], None),
    ],
)
def test_a_model_that_does_not_fit_gets_the_flags_with_which_it_would(flags, way_out, tmp_path):
    command = ["--model", "llama-2-7b", "--hardware", "rtx4090-desktop", "--trials", "1"]
    command += FEW[len(SIMULATED) :]
    done = tune(*command, *flags, "--out", tmp_path / "out")
    assert done.exit_code == 3
    said = " ".join(done.output.split())
    assert (way_out in said) if way_out else ("It fits with" not in said)
    if flags == ["--checkpointing"]:
        tuned(tmp_path / "out", *command, *flags, "--host-ram", "128")


def test_figures_are_those_of_the_simulation(simulated):
    out, _ = simulated
    work = Workload.of_config(*find_model("qwen2.5-0.5b"), batch_size=2, checkpointing=True)
    backend = SimulatedBackend(work, find_machine("rtx4090-desktop", 1))
    best = summary(out)["best"][0]
    done = backend.measure(Knobs.from_dict(best["knobs"]))
    assert best["measurement"] == done.to_dict()
    assert summary(out)["figures_are"] == "simulated"


def test_the_best_is_at_least_as_good_as_the_default_and_stands_beside_it(simulated):
    out, text = simulated
    found = summary(out)
    assert found["best"][0]["values"]["goodput"] >= found["default"]["values"]["goodput"]
    assert "default: k=0.1 S=4" in text
    assert "Best settings, simulated" in text
    assert f"zenflow train --config {out}/best.toml" in text
    assert "optuna-dashboard" not in text, "there is no storage to look at"


def test_every_file_is_there_and_can_be_read(simulated):
    out, _ = simulated
    names = ["best.toml", "importance.png", "pareto.png", "summary.json", "trials.csv"]
    assert sorted(path.name for path in out.iterdir()) == names
    rows = rows_of(out)
    found = summary(out)
    assert len(rows) == found["num_trials"]["simulated"] == 14
    best = max(rows, key=lambda row: float(row["goodput"]))
    assert float(best["goodput"]) == found["best"][0]["values"]["goodput"]
    assert {"hardware", "versions", "commit"} <= found.keys()
    assert set(found["importance"]["goodput"]) == set(found["space"])
    for name in ("importance.png", "pareto.png"):
        with Image.open(out / name) as picture:
            picture.verify()


def test_it_says_what_plan_recommends_which_searches_more(simulated):
    loop = ["--trainer", "loop", "--draws", "0", "--json"]
    asked = ["plan", *SIMULATED[:-2], "--checkpointing", *loop]
    own = json.loads(CliRunner().invoke(main, asked).stdout)["recommended"]
    setting = ", ".join([own["strategy"], *own["changes"]])
    assert f"recommends: {setting}, 2 x 1024 tokens to a step" in simulated[1]
    assert f"{own['tokens_per_second']:,.0f} tokens/s" in simulated[1]
    assert "strategy were not searched" in simulated[1]


def test_a_loss_in_chunks_is_named_as_plan_takes_it():
    words = ["--model", "llama-3.1-8b", "--gpu", "rtx4090", "--host-ram", "128", "--out", "unused"]
    context = main.commands["tune"].make_context("tune", words)
    assert "chunked loss, 2 x 1024 tokens" in _planned(context, context.params)


def test_what_plan_tries_is_searched_and_only_what_is_likely_to_fit_is_allowed(simulated):
    found = json.loads((simulated[0] / "summary.json").read_text())
    assert set(KS) <= set(found["space"]["topk_ratio"])
    assert set(INTERVALS) <= set(found["space"]["update_interval"])
    memory = find_machine("rtx4090-desktop").device.memory.value
    limit = found["constraints"]["device_bytes"]
    assert chance_to_fit(limit, memory) == pytest.approx(LIKELY)


def test_a_knob_that_is_given_is_not_searched(tmp_path):
    out = tmp_path / "out"
    tuned(out, *SIMULATED, "--trials", "8", "--queue-depth", "2", "--topk-ratio", "0.3")
    rows = rows_of(out)
    assert {row["topk_ratio"] for row in rows} == {"0.3"}
    assert len({row["update_interval"] for row in rows}) > 1


def test_several_objectives_give_a_front_and_constraints_hold(tmp_path):
    out = tmp_path / "out"
    tuned(
        out, *SIMULATED, "--trials", "12", "--sampler", "nsgaii", "--objective", "step_seconds",
        "--objective", "device_bytes", "--largest-staleness", "6", "--device-memory", "20",
    )  # fmt: skip
    found = summary(out)
    assert found["objectives"] == {"step_seconds": "minimize", "device_bytes": "minimize"}
    times = [item["values"]["step_seconds"] for item in found["best"]]
    sizes = [item["values"]["device_bytes"] for item in found["best"]]
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)
    for row in rows_of(out):
        assert int(row["staleness"]) <= 6
        assert float(row["device_bytes"]) <= 20e9


def test_the_same_command_goes_on_and_the_study_can_be_opened_elsewhere(tmp_path):
    storage = tmp_path / "study.journal"
    command = [*SIMULATED, "--storage", storage, "--study-name", "mine"]
    tuned(tmp_path / "a", *command, "--trials", "4")
    text = tuned(tmp_path / "a", *command, "--trials", "7")
    assert summary(tmp_path / "a")["num_trials"]["simulated"] == 7
    assert f"optuna-dashboard {storage}" in text
    code = (
        "import optuna\nfrom optuna.storages import JournalStorage\n"
        "from optuna.storages.journal import JournalFileBackend\n"
        f"storage = JournalStorage(JournalFileBackend({str(storage)!r}))\n"
        "study = optuna.load_study(study_name='mine', storage=storage)\n"
        "print(study.best_params['topk_ratio'], study.best_value)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    best = summary(tmp_path / "a")["best"][0]
    assert [float(word) for word in printed] == [
        best["knobs"]["topk_ratio"],
        best["values"]["goodput"],
    ]


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    """Return a study of one trial, as a file."""
    folder = tmp_path_factory.mktemp("journal")
    tuned(folder / "out", *FEW, "--storage", folder / "a.journal", "--trials", "1")
    return (folder / "a.journal").read_bytes()


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda text: text + b"junk\n", -1),
        (lambda text: text + b"\xff\xfe\n", -1),
        (lambda text: b"[1]\n" + text, 0),
        (lambda text: text[: len(text) // 2], -1),
    ],
)
def test_a_damaged_journal_is_refused_by_its_line_and_left_as_it_is(
    damage, line, journal, tmp_path
):
    storage, damaged = tmp_path / "a.journal", damage(journal)
    storage.write_bytes(damaged)
    done = tune(*FEW, "--storage", storage, "--trials", "2", "--out", tmp_path / "other")
    assert done.exit_code == 2, done.output
    number = range(1, len(damaged.splitlines()) + 1)[line]
    assert f"line {number}, is no entry" in " ".join(done.output.split())
    assert storage.read_bytes() == damaged


def test_ctrl_c_writes_what_there_is(tmp_path, request):
    out = tmp_path / "out"
    storage = tmp_path / "study.journal"
    command = [
        sys.executable, "-m", "experiments.cli", "tune", *SIMULATED, "--trials", "100000",
        "--sampler", "random", "--storage", str(storage), "--out", str(out),
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    request.addfinalizer(lambda: end(process))
    deadline = time.monotonic() + 60
    while not (storage.exists() and storage.read_text().count('"outcome":"measured"') >= 2):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in text
    found = summary(out)
    assert found["interrupted"]
    assert found["num_trials"]["simulated"] >= 2
    assert "running" not in found["num_trials"]


def test_a_measured_study_trains_and_its_best_can_be_trained_with(tmp_path):
    data, out = write_text(tmp_path / "text.txt"), tmp_path / "out"
    text = tuned(
        out, *MEASURED, "--data", data, "--trials", "2", "--update-interval", "2",
        "--sampler", "random", "--max-grad-norm", "none", "--link-gbps", "0.5,0.25",
    )  # fmt: skip
    assert "Best settings, measured" in text
    found = summary(out)
    assert found["figures_are"] == "measured"
    for item in found["best"]:
        done = item["measurement"]
        assert done["step_seconds"] > 0
        assert 0 < done["captured"] < 1
        assert done["tokens_per_step"] == 64
        assert done["staleness"] == 3
    settings, _, best = knobs_of(out / "best.toml")
    assert best == Knobs.from_dict(found["best"][0]["knobs"])
    assert settings["max_grad_norm"] is None
    assert settings["link"] == (0.5e9, 0.25e9)
    assert settings["data"] == str(data)
    assert settings["model"] == "own:tiny"
    run = trained(tmp_path / "r", "--config", out / "best.toml", "--steps", "3")
    used = json.loads((run / "config.json").read_text())["config"]
    assert used["topk_ratio"] == best.topk_ratio
    assert used["update_interval"] == 2


def test_a_config_file_says_what_is_measured_and_keeps_what_it_says(tmp_path):
    data, out = write_text(tmp_path / "text.txt"), tmp_path / "out"
    config = tmp_path / "mine.toml"
    config.write_text(
        f'model = "own:tiny"\ndata = "{data}"\nbatch_size = 2\nsequence = 32\nlr = 1e-3\n'
        'device = "cpu"\nsteps = 7\n[zenflow]\ntopk_ratio = 0.2\n'
        "update_interval = 1\nhysteresis = 0.3\n"
    )
    tuned(out, "--backend", "measured", "--config", config, "--trials", "5", "--lr", "2e-3")
    settings, knobs, best = knobs_of(out / "best.toml")
    assert (settings["lr"], settings["steps"], knobs["hysteresis"]) == (2e-3, 7, 0.3)
    assert best.topk_ratio == 0.2
    assert len(summary(out)["best"]) == 1, "every knob was given: there is one setting"


def test_needs_of_a_measured_setting_are_known_without_a_run(tmp_path):
    data = write_text(tmp_path / "text.txt")
    settings = TrainSettings(
        model="own:tiny", data=str(data), batch_size=2, sequence=32, device="cpu"
    )
    backend = MeasuredBackend(settings)
    small = Knobs(topk_ratio=0.05, update_interval=2, select_interval=100)
    large = Knobs(topk_ratio=0.5, update_interval=2, select_interval=100)
    assert backend.need(small).device_bytes < backend.need(large).device_bytes
    assert backend.need(small).staleness == staleness_of(small) == 3
    assert backend.need(small).captured is None


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--gpu", "rtx4090"], "a simulation needs a model"),
        (SIMULATED[:2], "one of --gpu, --machine and --profile"),
        ([*FEW, "--update-rule", "published"], "the published rule can't be tuned"),
        ([*FEW, "--sampler", "tpee"], "did you mean 'tpe'"),
        ([*FEW, "--objective", "speed"], "'speed' is unknown"),
        ([*FEW, "--storage", "study.txt"], "write study.journal, or"),
        ([*FEW, "--storage", "sqlite:////nowhere/a.db"], "can't be opened"),
        ([*FEW, "--workers", "2"], "2 workers need a storage"),
        ([*FEW, "--lr", "1e-3"], "--lr is for --backend measured"),
        ([*MEASURED, "--gpu", "rtx4090"], "--gpu is for --backend simulated"),
        ([*MEASURED, "--workers", "2"], "slow each other"),
        ([*MEASURED, "--select-strategy", "epoch"], "can't be tuned"),
        ([*FEW, "--device-memory", "-1"], "positive number of bytes"),
    ],
)  # fmt: skip
def test_mistakes_are_usage_errors_with_a_way_out(arguments, rule, tmp_path):
    done = tune(*arguments, "--out", tmp_path / "out", "--trials", "1")
    assert done.exit_code == 2, done.output
    assert rule in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_constraints_that_no_setting_meets_are_no_mistake_of_usage(tmp_path):
    limits = ("--device-memory", "9.5", "--smallest-captured", "0.6")
    done = tune(*FEW, *limits, "--out", tmp_path / "out", "--trials", "1")
    assert done.exit_code == 3, done.output
    assert "captured energy >= 0.6 needs topk_ratio >= 0.5" in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_help_says_what_there_is():
    done = tune("--help")
    assert done.exit_code == 0
    for name in ("backend", "objective", "storage", "smallest-captured", "gpu", "data"):
        assert f"--{name}" in done.output
    assert "--strategy" not in done.output
