"""What a command writes is tried before its work, and a write that fails is told in a line."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from experiments.cli import main
from experiments.commands.flag_types import OutputFile, OutputFolder
from experiments.output.files import replacing
from experiments.output.target import check_file, check_folder
from zenflow.errors import ConfigError

SIMULATE = ["simulate", "--model", "gpt2", "--gpu", "h100"]
SWEEP = ["sweep", "--model", "gpt2", "--gpu", "h100", "--vary", "S=1,2"]
TUNE = ["tune", "--model", "gpt2", "--gpu", "h100", "--trials", "1"]
FILES = {
    "simulate --trace": [*SIMULATE, "--trace"],
    "simulate --plot": [*SIMULATE, "--plot"],
    "compare --plot": ["compare", "a.json", "a.json", "--plot"],
    "validate --plot": ["validate", "--plot"],
    "calibrate --out": ["calibrate", "--out"],
    "convert --output": ["convert", "a.json", "--output"],
    "report": ["report"],
}
FOLDERS = {
    "sweep --out": [*SWEEP, "--out"],
    "tune --out": [*TUNE, "--out"],
    "validate --out": ["validate", "--out"],
    "study --record": ["study", "whatif", "--record"],
    "study --keep": ["study", "whatif", "--keep"],
    "figures --out": ["figures", "--out"],
    "train --out": ["train", "--out"],
    "finetune --out": ["finetune", "--out"],
}
KINDS = {"plot": ".png", "output": ".toml", "report": ".html"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("mine")


def refused(words, *more):
    done = CliRunner().invoke(main, [*words, *more])
    assert done.exit_code == 2, done.output
    (line,) = (line for line in done.output.splitlines() if line.startswith("Error: "))
    return line


def named(option, stem):
    return stem + next((kind for name, kind in KINDS.items() if name in option), ".json")


@pytest.mark.parametrize("option", FILES)
def test_a_file_that_can_not_be_written_is_refused_at_once(option):
    more = ["a.json"] if option == "report" else []
    name = named(option, "x")
    assert "in a folder that exists" in refused(FILES[option], f"no/such/{name}", *more)
    assert "in a folder that exists" in refused(FILES[option], f"file/{name}", *more)
    assert "folder.png is a directory" in refused(FILES[option], "folder.png", *more)
    assert "can't be written" in refused(FILES[option], f"/proc/{name}", *more)
    assert "can't be written" in refused(FILES[option], named(option, "n" * 245), *more)
    assert sorted(os.listdir()) == ["file", "folder.png"]


@pytest.mark.parametrize("option", [name for name in FILES if "plot" in name])
@pytest.mark.parametrize("name", ["x.xyz", "x", ".png"])
def test_a_picture_of_no_known_kind_is_refused_at_once(option, name):
    assert f".tif, .tiff, .eps or .svgz, but is {name}" in refused(FILES[option], name)


@pytest.mark.parametrize("name", ["x.yaml", "x.yml", "x"])
def test_settings_go_into_toml_or_json_alone(name):
    assert "must end in .toml or .json" in refused(FILES["convert --output"], name)


@pytest.mark.parametrize("option", FOLDERS)
def test_a_folder_that_can_not_be_made_is_refused_at_once(option):
    for place in ("file", "file/below", "/proc/x"):
        line = refused(FOLDERS[option], place)
        assert place.split("/")[0] in line
    assert sorted(os.listdir()) == ["file", "folder.png"]


def test_every_output_of_every_command_is_tried():
    outputs = ("out", "output", "plot", "trace", "record", "keep")
    inputs = {("train", "out"), ("validate", "record")}  # tried by its lock, and one that is read
    for name, command in main.commands.items():
        for parameter in command.params:
            if parameter.name in outputs and (name, parameter.name) not in inputs:
                assert isinstance(parameter.type, OutputFile | OutputFolder), (name, parameter)


def test_folders_without_permission_are_refused(monkeypatch, tmp_path):
    def denied(self, mode):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)
    for check in (check_file, check_folder):
        with pytest.raises(ConfigError, match=r"x\.json can't be written \(Permission denied\)"):
            check(tmp_path / "x.json")


def test_a_device_is_no_target():
    with pytest.raises(ConfigError, match="/dev/null is none"):
        check_file(Path("/dev/null"))


def test_trying_leaves_what_is_there(tmp_path):
    check_file(tmp_path / "file")
    check_folder(tmp_path / "new" / "deep")
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(os.listdir()) == ["file", "folder.png"]


def limited(words, num_bytes):
    """Run a command whose files may not be larger, as if the disk were full."""
    return subprocess.run(
        [sys.executable, "-m", "experiments.cli", *words],
        capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes)),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "name"),
    [(["--trace"], "x.json"), (["--trace"], "x.json.gz"), (["--plot"], "x.png")],
)
def test_a_disk_that_fills_keeps_the_old_file_and_is_told_in_a_line(words, name, tmp_path):
    (tmp_path / name).write_text("old")
    done = limited([*SIMULATE, *words, name], 100)
    assert done.returncode == 1
    assert done.stderr == f"Error: {name}: File too large\n"
    assert (tmp_path / name).read_text() == "old"
    assert sorted(os.listdir()) == ["file", "folder.png", name]


def test_a_page_or_settings_that_do_not_fit_are_told_in_a_line(tmp_path):
    CliRunner().invoke(main, [*SIMULATE, "--trace", "t.json"])
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 4}))
    for words, name in (
        (["report", "x.html", "t.json"], "x.html"),
        (["convert", "ds.json", "--output", "x.toml"], "x.toml"),
    ):
        done = limited(words, 10)
        assert (done.returncode, done.stderr) == (1, f"Error: {name}: File too large\n")


def test_a_draft_that_fails_names_the_file_it_is_for(tmp_path):
    full = OSError(28, "No space left on device")
    with pytest.raises(OSError, match=f"device: '{tmp_path}/x'"), replacing(tmp_path / "x"):
        raise full
