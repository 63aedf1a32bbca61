"""The fine-tuning script that people copy: it learns, with --zenflow and without."""

import json
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason='needs the extra: pip install "zenflow-offload[hf]"')

from tests.zenflow.integrations.tiny import decoder, word_tokenizer

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "finetune_causal_lm.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model, its tokenizer, and a text in which words count up."""
    folder = tmp_path_factory.mktemp("example")
    decoder().save_pretrained(folder / "model")
    word_tokenizer().save_pretrained(folder / "model")
    lines = [" ".join(f"w{3 + (i + j) % 45}" for j in range(16)) for i in range(64)]
    (folder / "texts.txt").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("flags", [[], ["--zenflow"], ["--zenflow", "--keep_gradients"]], ids=str)
def test_it_trains_evaluates_and_saves(folder, flags, tmp_path, monkeypatch, capsys):
    texts = str(folder / "texts.txt")
    command = [
        *[str(SCRIPT), "--model", str(folder / "model"), "--train_file", texts],
        *["--validation_file", texts, "--block_size", "16", "--output_dir", str(tmp_path)],
        *["--max_steps", "30", "--learning_rate", "1e-2", "--logging_steps", "10"],
        *["--save_strategy", "no", "--report_to", "none", "--use_cpu", *flags],
    ]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_loss"] < 0.5
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    assert ("zenflow/stall_share" in capsys.readouterr().out) == bool(flags)
