"""A model's file that is none says what it is, in one line and without a traceback."""

import json
import struct

import pytest

from sim.models.table import find_model
from zenflow.errors import ConfigError

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100,
    "num_attention_heads": 8, "num_hidden_layers": 2,
}  # fmt: skip
TEXT = json.dumps(LLAMA)
SAFETENSORS = struct.pack("<Q", 42) + b'{"weight": {"dtype": "BF16"}}'
OTHERS = {
    "empty": (b"", "is empty"),
    "blank": (b" \n", "is empty"),
    "a list": (b"[1]", r"must hold an object, got \[1\]"),
    "a number": (b"7", "must hold an object, got 7"),
    "null": (b"null", "must hold an object, got None"),
    "half of one": (TEXT[:40].encode(), "is not JSON"),
    "UTF-16": (TEXT.encode("utf-16"), "is not JSON"),
    "nested": (b"[" * 100_000, "is not JSON"),
    "digits": (b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
    "comments": (b"// mine\n" + TEXT.encode(), "is not JSON"),
    "twice": (TEXT[:-1].encode() + b', "vocab_size": 7}', "key 'vocab_size' stands there twice"),
    "GGUF": (b"GGUF\x03\0\0\0", "is a GGUF file of llama.cpp"),
    "GGUF, whole": (b"GGUF\x03\0\0\0" + b"\1" * (16 << 20), "is a GGUF file of llama.cpp"),
    "safetensors": (SAFETENSORS, "is a safetensors file of weights"),
    "pickle": (b"\x80\x02}q\x00.", "is a pickle"),
    "zip": (b"PK\x03\x04....", "is an archive, as PyTorch saves weights"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid", "pointer of Git LFS"),
    "a page": (b"<!doctype html><title>401</title>", "is a page of HTML"),
    "large": (b" " * (16 << 20) + b"{}", "is larger than 16 MiB"),
    "no type": (b'{"hidden_size": 64}', "lacks model_type, a family's name such as 'llama': give"),
    "an adapter": (b'{"peft_type": "LORA"}', "seems to be the file of an adapter"),
    "an index": (b'{"weight_map": {}}', "seems to be an index of weights' files"),
    "a tokenizer": (b'{"tokenizer_class": "x"}', "seems to be the file of a tokenizer"),
    "Meta's": (b'{"dim": 4096, "n_layers": 32}', "seems to be a params.json"),
    "DeepSpeed": (b'{"zero_optimization": {}}', "`zenflow convert` reads it"),
}


@pytest.mark.parametrize("content", OTHERS)
def test_a_file_of_another_kind_is_named(content, tmp_path):
    data, words = OTHERS[content]
    file = tmp_path / "model.json"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=words) as told:
        find_model(file)
    assert str(told.value).startswith(str(file))
    assert "config.json" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode("utf-8-sig"),
        TEXT.replace(", ", ",\r\n").encode(),
        TEXT[:-1].encode() + b', "vocab_size": 100}',
        TEXT[:-1].encode() + b', "time_step_limit": [0.0, Infinity], "rope_theta": NaN}',
    ],
    ids=["mark of Windows", "CRLF", "twice the same", "infinity where nothing reads"],
)
def test_what_transformers_or_an_editor_leaves_is_read(data, tmp_path):
    (tmp_path / "config.json").write_bytes(data)
    _, config = find_model(tmp_path)
    assert {key: config[key] for key in LLAMA} == LLAMA


def test_a_directory_without_a_model_names_those_below_it(tmp_path):
    with pytest.raises(ConfigError, match=r"can't be read .*directory that holds one"):
        find_model(tmp_path)
    for name in ("final", "epoch-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(TEXT)
    with pytest.raises(ConfigError, match="has models in epoch-1 and final: give one of them"):
        find_model(tmp_path)
