"""What holds of every command: groups in its help, a pure JSON answer, documented exit codes."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from experiments.cli import GROUPS, main
from experiments.commands.answer import Exit
from experiments.commands.prediction.listing import LISTS
from sim.hardware.catalog import find_machine
from sim.hardware.file import write_profile
from sim.models.table import model_names
from tests.experiments.finetuning.small import FAST as FINETUNED
from tests.experiments.finetuning.small import chat, save_model, write_rows
from tests.experiments.runs import FAST, write_text

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "guides" / "commands.md"
RECORD = max((ROOT / "evidence" / "results").glob("*_validation_*"))
TRAINED = f"train {shlex.join(FAST)} --model tiny --data a.txt"
CARD = "--model gpt2 --gpu rtx4090"
LINES = {
    f"{TRAINED} --steps 2 --out one": ("folder", "eval_loss", "tokens_per_second"),
    f"{TRAINED} --compare --start-steps 2 --steps 2 --out all": ("folder", "runs", "zenflow"),
    f"finetune --model model --data chats.jsonl --steps 2 --out tuned {shlex.join(FINETUNED)}":
        ("folder", "train_loss", "expected_memory"),
    "convert ds.json --output run.toml": ("keys", "python", "command", "output"),
    f"plan {CARD} --draws 0": ("recommended", "command"),
    **{f"plan --list {kind}": (kind,) for kind in LISTS},
    f"simulate {CARD} --trace predicted.json": ("step_seconds", "chance_to_fit"),
    f"sweep {CARD} --vary S=1,2 --workers 1 --out grid": ("folder", "fastest", "statuses"),
    f"sweep {CARD} --vary S=1,2 --find S --rate 100": ("found", "points_looked_at"),
    "sweep --axes": ("axes",),
    f"tune {CARD} --trials 2 --sampler random --out best": ("folder", "best", "plan"),
    "calibrate --from-trace one --start mine.json --out refined.json": ("file", "profile"),
    f"validate --record {shlex.quote(str(RECORD))}": ("record", "findings"),
    "compare one predicted.json --plot both.png": ("rows",),
    "report page.html one": ("page", "bytes", "notes"),
    "study --list": ("studies",),
    "study whatif/pcie5_or_cpu --smoke --record studies": ("studies", "failed"),
    "study stall_and_loss --check": ("studies", "failed"),
    "figures --list": ("studies",),
}  # fmt: skip
"""Lines in an order in which each finds what it reads, with keys of their answers."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workshop")
    write_text(folder / "a.txt")
    save_model(folder / "model")
    write_rows(folder / "chats.jsonl", map(chat, range(4)))
    write_profile(find_machine("rtx4090-desktop"), folder / "mine.json")
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    content = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero,
               "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}  # fmt: skip
    (folder / "ds.json").write_text(json.dumps(content))
    return folder


def run(line):
    return CliRunner().invoke(main, shlex.split(line))


def options():
    return [
        (name, item)
        for name, command in main.commands.items()
        for item in command.params
        if isinstance(item, click.Option) and not item.hidden
    ]


def test_every_flag_of_every_command_has_a_group_and_words():
    for name, item in options():
        assert item.section, f"{name} {item.opts[0]} has no group"
        assert len(item.help) > len("words"), f"{name} {item.opts[0]} has no help"


@pytest.mark.parametrize("name", main.commands)
def test_a_help_has_groups_examples_and_json(name):
    said = run(f"{name} --help").output
    headings = re.findall(r"^([A-Z].*):$", said, re.MULTILINE)
    assert headings[-2:] == ["Output", "Examples"]
    assert "Options" not in headings
    assert "--json" in said
    assert f"\n  zenflow {name} " in said


def test_the_help_of_all_names_each_command_once_with_its_whole_sentence():
    said = " ".join(run("--help").output.split())
    assert "..." not in said.partition("Train:")[2]
    assert [c.name for commands in GROUPS.values() for c in commands] == list(main.commands)
    for command in main.commands.values():
        whole = command.get_short_help_str(limit=500)
        assert f" {command.name} {whole}" in said


def test_every_command_has_a_line_here():
    assert {line.split()[0] for line in LINES} == set(main.commands)


@pytest.mark.parametrize("line", LINES)
def test_json_is_the_answer_and_nothing_else_on_standard_output(line, workshop, monkeypatch):
    if line.startswith("finetune"):
        pytest.importorskip("trl")
    monkeypatch.chdir(workshop)
    ran = run(f"{line} --json")
    assert ran.exit_code == Exit.DONE, ran.output
    answer = json.loads(ran.stdout)  # refuses a word before it or behind it
    assert set(LINES[line]) <= set(answer)


def test_a_process_writes_nothing_else_either(tmp_path):
    write_text(tmp_path / "a.txt")
    words = shlex.split(f"{TRAINED} --steps 2 --out one --json")
    ran = subprocess.run(
        [sys.executable, "-m", "zenflow", *words], check=True, capture_output=True, text=True,
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert json.loads(ran.stdout)["steps"] == 2
    assert "held-out loss" in ran.stderr


def test_a_refusal_leaves_standard_output_empty():
    ran = run("plan --model gpt2 --gpu abacus --json")
    assert (ran.exit_code, ran.stdout) == (Exit.REFUSED, "")
    assert "abacus" in ran.stderr


@pytest.mark.parametrize(
    "line",
    [
        "plan --model llama-3.1-70b --gpu rtx3060",
        "simulate --model llama-3.1-70b --gpu rtx3060",
        "tune --model llama-3.1-70b --gpu rtx3060 --trials 2",
        "sweep --model llama-3.1-70b --vary gpu=t4 --find price_usd --rate 1 --price t4=1",
    ],
)
def test_what_does_not_fit_has_a_code_of_its_own(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(line).exit_code == Exit.NO_ROOM


def test_the_guide_and_the_help_have_every_exit_code():
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", GUIDE.read_text(), re.MULTILINE)
    assert rows == [(str(int(code)), code.meaning) for code in Exit]
    said = " ".join(run("--help").output.split())
    for code in Exit:
        assert f" {int(code)} {code.meaning}" in said


def test_the_lists_have_what_the_flags_take():
    found = json.loads(run("plan --list gpus --json").stdout)["gpus"]
    assert {row["name"]: row["memory_bytes"] for row in found}["rtx4090"] == pytest.approx(
        23.65 * 2**30
    )
    assert len({row["group"] for row in found}) == 4
    models = json.loads(run("plan --list models --json").stdout)["models"]
    assert [row["name"] for row in models if row["group"] == "gpt2"] == [
        name for name in model_names() if name.startswith("gpt2")
    ]
