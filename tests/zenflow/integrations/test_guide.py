"""The guide's snippets, run one behind the other."""

from pathlib import Path

import pytest

from tests.test_documents import python_blocks

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "trainers.md"


@pytest.mark.filterwarnings("default")  # those of other packages are not ours
def test_every_snippet_runs_after_those_before_it(tmp_path, monkeypatch):
    for package in ("transformers", "trl", "peft", "lightning"):
        pytest.importorskip(package, reason='needs all trainers: pip install -e ".[dev-all]"')
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "guide"}
    for block in python_blocks(GUIDE):
        exec(compile(block, str(GUIDE), "exec"), names)
    assert (tmp_path / "out" / "last" / "model.safetensors").is_file()
