"""Data that is no text is refused at once, with the way to go; text is read as ever."""

import gzip
import json

import pytest

from experiments.training.parts.data.batches import read_source
from experiments.training.parts.data.texts import path_documents
from experiments.training.parts.first_checks import check_data
from experiments.training.settings.training import TrainSettings
from zenflow.errors import ConfigError

CHAT = [{"messages": [{"role": "user", "content": f"hi {n}"}]} for n in range(40)]
ALPACA = [{"instruction": "add", "input": "1, 2", "output": "3"}] * 40


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


ROWS = {
    "chat.jsonl": (lines(CHAT), "chat rows .JSON lines with messages"),
    "CHAT.JSONL": (lines(CHAT), "chat rows"),
    "chat.txt": (lines(CHAT), "chat rows .JSON lines"),
    "chat": (lines(CHAT), "chat rows"),
    "marked.md": (b"\xef\xbb\xbf" + lines(CHAT), "chat rows"),
    "sharegpt.json": (json.dumps([{"conversations": []}] * 9).encode(), "chat rows .JSON with"),
    "alpaca.json": (json.dumps(ALPACA, indent=2).encode(), "instruction rows"),
    "one.txt": (json.dumps(ALPACA).encode(), "instruction rows .JSON"),
    "cut.jsonl": (b'{"prompt": "' + b"x" * 99_999, "rows of a table .JSON lines with prompt"),
    "pairs.ndjson": (lines([{"prompt": "a", "completion": "b"}] * 9), "instruction rows"),
    "dpo.jsonl": (lines([{"chosen": "a", "rejected": "b"}] * 9), "preference pairs"),
    "a.csv": (b"text,label\r\ngood,1\r\n", "rows of a table .CSV with text, label"),
    "table.txt": (b"prompt\tcompletion\na\tb\n", "instruction rows .a table"),
    "a.parquet": (b"PAR1" + bytes(50), "Parquet"),
    "parquet.txt": (b"PAR1" + bytes(50), "Parquet"),
    "a.arrow": (b"\xff\xff\xff\xff" + bytes(50), "Arrow"),
    "a.json.gz": (gzip.compress(lines(CHAT)), "JSON packed by gzip"),
    "a.jsonl.zst": (b"\x28\xb5\x2f\xfd" + bytes(9), "JSON lines packed by zstandard"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_refused_with_what_they_look_like_and_the_way_to_go(tmp_path, name):
    content, words = ROWS[name]
    (tmp_path / name).write_bytes(content)
    for flags in ({"data": str(tmp_path / name)}, {"eval_data": str(tmp_path / name)}):
        with pytest.raises(ConfigError, match=words) as refused:
            check_data(TrainSettings(**flags))
        assert "Trainer(model=MODEL" in str(refused.value)
        assert 'load_dataset("' in str(refused.value)
        assert "docs/guides/trainers.md" in str(refused.value)
    with pytest.raises(ConfigError, match=words):  # whoever reads it without that check
        read_source(TrainSettings(data=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt.gz", gzip.compress(b"text", mtime=0), "packed by gzip.*unpack"),
        ("a.txt", gzip.compress(b"text", mtime=0), "packed by gzip.*unpack"),
        ("a.zip", b"PK\3\4", "packed by zip.*unpack"),
        ("a.docx", b"PK\3\4", "a Word document.*text"),
        ("a.txt", b"%PDF-1.7", "PDF.*text"),
    ],
)
def test_archives_and_documents_are_refused_with_what_to_do(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        check_data(TrainSettings(data=str(tmp_path / name)))


TEXTS = {
    "a.txt": "First Citizen:\nBefore we proceed any further, hear me speak.\n",
    "a.md": "[1] A link, and `{\"key\": 1}` in a line.\n{'a': 1} is a dict.\n",
    "a.py": 'SETTINGS = {"key": 1}\n',
    "a.js": "{\n  let a = 1;\n}\n",
    "a.toml": '[table]\nkey = "value"\n',
    "Title": "Text, and what a label is: a long sentence with commas,\ntwo lines of it.\n",
    "A.TXT": "loud\n",
    "log.log": "[2026-01-01] {step} started\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_code_and_plain_text_are_read(tmp_path, name):
    (tmp_path / name).write_text(TEXTS[name] * 20)
    check_data(TrainSettings(data=str(tmp_path / name)))
    documents = path_documents(tmp_path / name)
    assert "".join((*documents.train, *documents.held_out)) == TEXTS[name] * 20


def test_a_folder_of_rows_alone_is_refused(tmp_path):
    (tmp_path / "chat.jsonl").write_bytes(lines(CHAT))
    (tmp_path / "README.md").write_text("A data set of chats.")
    with pytest.raises(ConfigError, match=r"chat\.jsonl looks like chat rows"):
        check_data(TrainSettings(data=str(tmp_path)))


def test_a_folder_says_what_it_reads_and_what_it_passes_over(tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    (tmp_path / "LOUD.TXT").write_text("text loud")
    (tmp_path / "chat.jsonl").write_bytes(lines(CHAT))
    (tmp_path / "hidden.txt").write_bytes(lines(CHAT))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "blank.txt").write_text("\n")
    check_data(TrainSettings(data=str(tmp_path)))
    documents = path_documents(tmp_path)
    (note,) = documents.notes
    assert note.startswith("61 text files read; passed over: ")
    passed = ("chat.jsonl (JSON lines", "hidden.txt (JSON", "picture.png (", "blank.txt (empty")
    assert all(words in note for words in passed)
    assert not any("messages" in text for text in (*documents.train, *documents.held_out))


@pytest.mark.parametrize("column", ["text_column", "label_column"])
def test_a_column_beside_plain_text_is_an_error(tmp_path, column):
    (tmp_path / "a.txt").write_text("text " * 99)
    for data in (str(tmp_path / "a.txt"), None):
        with pytest.raises(ConfigError, match=f"--{column.replace('_', '-')} body"):
            check_data(TrainSettings(data=data, **{column: "body"}))


PAIR = "One sentence.\tAnother one.\t1\n"
TABLES = {
    "pairs": (PAIR * 30, "3 columns.*awk"),
    "RTE": ("index\tsentence1\tsentence2\tlabel\n" + f"0\t{PAIR}" * 9, "sentence1.*awk"),
    "MRPC": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + "1\t2\t3\ta\tb\n", "Quality"),
    "label first": ("label\ttext\n" + "1\tgood\n0\tbad\n" * 9, "put the label last"),
    "answers": ("prompt\tcompletion\n" + "a\tb\nc\td\n" * 9, "SFTTrainer"),
    "no header": ("".join(f"ask {n}\tanswer {n}\n" for n in range(30)), "30 values.*30 lines"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_tsv_of_other_columns_is_refused(tmp_path, name):
    content, words = TABLES[name]
    (tmp_path / "train.tsv").write_text(content, encoding="utf-8")
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    for data, task in (("train.tsv", "auto"), ("", "auto"), ("a.txt", "classification")):
        settings = TrainSettings(data=str(tmp_path / data), task=task)
        with pytest.raises(ConfigError, match=words):
            check_data(settings)
        if data:
            with pytest.raises(ConfigError, match=words):
                read_source(settings)


@pytest.mark.parametrize("header", ["", "sentence\tlabel\n", "text\tsentiment\n"])
def test_lines_of_text_and_label_are_read(tmp_path, header):
    rows = "".join(f"a film, number {n}\t{n % 2}\n" for n in range(200))
    (tmp_path / "A.TSV").write_text(header + rows + "text\twith a tab\t1\n")
    settings = TrainSettings(data=str(tmp_path / "A.TSV"))
    check_data(settings)
    source = read_source(settings)
    assert source.classes == ("0", "1")
    assert len(source.train) + len(source.held_out) == 201


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves rows as a data set and reads a column of it."""
    datasets = pytest.importorskip("datasets")

    def read(rows, **flags):
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "set")
        return read_source(TrainSettings(data=str(tmp_path / "set"), **flags))

    return read


@pytest.mark.parametrize(
    ("rows", "flags", "words"),
    [
        (CHAT, {}, "chat rows"),
        (CHAT, {"text_column": "messages"}, "chat rows"),
        ([{"conversations": [{"from": "human"}]}] * 9, {}, "chat rows"),
        ([{"prompt": "a", "completion": "b"}] * 9, {}, "instruction rows"),
        ([{"question": "a", "answer": "b"}] * 9, {}, "instruction rows"),
        ([{"text": "a", "meta": {"b": 1}}] * 9, {"text_column": "meta"}, "holds dicts"),
        ([{"text": "a", "parts": ["b"]}] * 9, {"text_column": "parts"}, "holds lists"),
        ([{"text": "a", "n": 1}] * 9, {"text_column": "n"}, "holds ints"),
        ([{"sentence": "a", "question": "b", "label": 1}] * 9, {}, "several columns of text"),
    ],
)  # fmt: skip
def test_a_data_set_without_a_column_of_text_is_refused(saved, rows, flags, words):
    with pytest.raises(ConfigError, match=words):
        saved(rows, **flags)


def test_a_data_sets_column_of_text_is_read_beside_others(saved):
    rows = [{"messages": [{"role": "user", "content": "x"}], "text": f"{n}"} for n in range(99)]
    source = saved(rows)
    assert {*source.train, *source.held_out} == {f"{n}" for n in range(99)}
