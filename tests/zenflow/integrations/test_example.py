"""The fine-tuning scripts that people copy: they learn, from the text as it is."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason='needs the extra: pip install "zenflow-offload[hf]"')

from tests.zenflow.integrations.tiny import decoder, word_tokenizer

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SCRIPT = EXAMPLES / "finetune_causal_lm.py"


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


def character_tokenizer():
    """Return a tokenizer that tells every byte, line breaks too, and has a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")
    fast.chat_template = (
        "{% for said in messages %}<{{ said.role }}>{{ said.content }}{{ eos_token }}{% endfor %}"
    )
    return fast


def test_blocks_are_the_texts_with_line_breaks_and_an_end_behind_each_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = ["First Citizen:\nHear me speak.\n\nAll:\nSpeak, speak.\n", "def f():\n    return 1\n"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    tokenizer = character_tokenizer()
    load_blocks = runpy.run_path(str(SCRIPT))["load_blocks"]
    blocks = load_blocks(str(tmp_path / "*.txt"), tokenizer, 4)
    told = tokenizer.decode([token for block in blocks["input_ids"] for token in block])
    whole = "</s>".join([*texts, ""])
    assert whole.startswith(told)
    assert len(whole) - len(told) < 8  # what fills no block
    assert blocks["labels"] == blocks["input_ids"]


def test_chat_rows_train_through_the_template(tmp_path, monkeypatch, capsys):
    pytest.importorskip("trl", reason='needs TRL: pip install -e ".[dev-all]"')
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = character_tokenizer()
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=0, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "ai", "content": "yes\nno"}]}
        for n in range(32)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        *["finetune_chat.py", "--model", str(tmp_path / "model"), "--train_file"],
        *[str(tmp_path / "chats.jsonl"), "--output_dir", str(tmp_path / "out")],
        *["--max_steps", "20", "--learning_rate", "1e-2", "--logging_steps", "5"],
        *["--save_strategy", "no", "--report_to", "none", "--use_cpu", "--bf16", "False"],
    ]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    runpy.run_path(str(EXAMPLES / "finetune_chat.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "first row: '<user>0?</s><ai>yes\\nno</s>'" in output
    losses = [float(found) for found in re.findall(r"'loss': '?([\d.]+)", output)]
    assert losses[-1] < losses[0] / 2
    assert "zenflow/stall_share" in output
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 0
