"""Command lines of the documents are what `zenflow finetune` takes."""

import shlex

import pytest

from experiments.cli import main
from experiments.commands.training.finetune import shared_flags
from experiments.finetuning.settings import settle
from tests.test_documented_commands import DOCUMENTS, ROOT, shell_lines

LINES = {
    line
    for document in DOCUMENTS
    for line in shell_lines((ROOT / document).read_text(encoding="utf-8"))
    if line.startswith("zenflow finetune ")
    and "--replay" not in line  # of a run that is not there
}


def test_there_are_some():
    assert len(LINES) >= 3


@pytest.mark.parametrize("line", sorted(LINES))
def test_flags_and_values_of_a_line_are_right(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)  # which a line goes on with
    context = main.commands["finetune"].make_context("finetune", shlex.split(line)[2:])
    if context.params["resume"] is None:
        assert context.params["out"] is not None
        shared, knobs = shared_flags(context)
        settle(context.params["model"], context.params["data"], shared, knobs, {})
