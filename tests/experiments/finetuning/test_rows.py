"""Rows of all formats become the same tokens, and labels mask what is not to be learnt."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("trl", reason='needs the extra: pip install "zenflow-offload[finetune]"')

import pandas
from datasets import Dataset

from experiments.finetuning.rows import Rows, in_form, read_rows
from experiments.finetuning.settings import settle
from experiments.finetuning.shown import CLOSE, OPEN, marked
from experiments.finetuning.template import templated
from experiments.finetuning.trainer import arguments, make_trainer
from tests.experiments.finetuning.small import MARKED, UNMARKED, chat, tokenizer_of, write_rows
from tests.zenflow.integrations.tiny import decoder
from zenflow.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours
CHAT = {
    "messages": [
        {"role": "user", "content": "w5 w6"},
        {"role": "assistant", "content": "w7"},
        {"role": "user", "content": "w8"},
        {"role": "assistant", "content": "w9 w10"},
    ]
}
END = 2
"""Token that ends an answer; w3 is token 3, and so on."""


def trainer_of(rows, tmp_path, template=MARKED, *, mask_prompts=True, model=None, **given):
    """Return the trainer that the command would make of these rows."""
    tokenizer = tokenizer_of(template)
    own = {key: given.pop(key) for key in ("packing",) if key in given}
    shared = {"device": "cpu", "sequence": 16, **given}
    settings = settle("model", ("rows",), shared, {}, {"mask_prompts": mask_prompts, **own})
    data = templated(rows, tokenizer, mask_prompts=mask_prompts)
    args = arguments(settings, data, tmp_path, torch.device("cpu"))
    return make_trainer(settings, data, args, model or decoder(), tokenizer, None), data


def tokens(rows, tmp_path, *more, **given):
    """Return ids and labels of all rows, as training gets them."""
    trainer, data = trainer_of(rows, tmp_path, *more, **given)
    found = trainer.train_dataset
    return list(zip(found["input_ids"], found["labels"], strict=True)), data


def rows_of(*rows):
    return in_form(Dataset.from_list(list(rows)), "--data rows")


IDS = [3, 5, 6, 4, 7, END, 3, 8, 4, 9, 10, END]


def test_answers_of_a_chat_are_learnt_and_nothing_else(tmp_path):
    ((ids, labels),), data = tokens(rows_of(CHAT), tmp_path)
    assert ids == IDS
    assert labels == [-100] * 4 + [7, END] + [-100] * 3 + [9, 10, END]
    assert data.arguments == {"assistant_only_loss": True}
    shown = marked(tokenizer_of(), ids, labels).splitlines()
    assert "12 tokens, 5 of them learnt" in shown[0]
    assert shown[1] == f"{OPEN}w3 w5 w6 w4{CLOSE} w7 </s>{OPEN} w3 w8 w4{CLOSE} w9 w10 </s>"


def test_without_marks_in_the_template_each_answer_is_a_row(tmp_path):
    found, data = tokens(rows_of(CHAT), tmp_path, UNMARKED)
    assert "row of its own" in data.told
    assert found == [
        (IDS[:6], [-100] * 4 + [7, END]),
        (IDS, [-100] * 9 + [9, 10, END]),
    ]


def test_prompts_are_learnt_where_that_is_asked(tmp_path):
    for rows in (rows_of(CHAT), rows_of({"prompt": "w5", "completion": " w6"})):
        ((ids, labels),), _ = tokens(rows, tmp_path, mask_prompts=False)
        assert labels == ids


def test_prompts_and_completions_are_taken_as_they_are(tmp_path):
    row = {"prompt": "w5 w6", "completion": " w7"}
    ((ids, labels),), _ = tokens(rows_of(row), tmp_path, None)
    assert (ids, labels) == ([5, 6, 7, END], [-100, -100, 7, END])


def test_instructions_are_a_turn_of_the_template_where_there_is_one(tmp_path):
    row = {"instruction": "w5", "input": "w6", "output": "w7"}
    ((ids, labels),), _ = tokens(rows_of(row), tmp_path)
    assert (ids, labels) == (IDS[:6], [-100] * 4 + [7, END])
    ((ids, labels),), _ = tokens(rows_of({**row, "output": " w7"}), tmp_path, None)
    assert (ids, labels) == ([5, 6, 7, END], [-100, -100, 7, END])


def test_no_token_of_a_text_is_lost_and_an_end_follows_it(tmp_path):
    said = " ".join(f"w{5 + n % 40}" for n in range(50))
    found, _ = tokens(rows_of({"text": said}), tmp_path)
    assert all(len(ids) <= 16 and ids == labels for ids, labels in found)
    every = sorted(token for ids, _ in found for token in ids)
    assert every == sorted([5 + n % 40 for n in range(50)] + [END])


def test_rows_that_are_packed_together_do_not_see_each_other(tmp_path):
    rows = rows_of(CHAT, {"messages": chat(3)["messages"][:2]})
    sums = []
    for packing in (True, False):
        trainer, _ = trainer_of(rows, tmp_path, packing=packing, sequence=32)
        batches = [trainer.data_collator([row]) for row in trainer.train_dataset]
        sums.append(
            sum(trainer.compute_loss(trainer.model.eval(), b, num_items_in_batch=1)
                for b in batches)
        )  # fmt: skip
        assert len(batches) == (1 if packing else 2)
    assert torch.allclose(*sums, rtol=1e-5)
    assert sums[0] > 0


FLAT = [{"prompt": f"w{n}", "completion": f"w{n + 1} w5"} for n in range(5, 30)]


@pytest.fixture
def written(tmp_path):
    """Return the same rows in files of all kinds, in a folder and in a saved data set."""
    table = pandas.DataFrame(FLAT)
    write_rows(tmp_path / "rows.jsonl", FLAT)
    (tmp_path / "rows.json").write_text(json.dumps(FLAT))
    table.to_csv(tmp_path / "rows.csv", index=False)
    table.to_csv(tmp_path / "rows.tsv", index=False, sep="\t")
    table.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "parts").mkdir()
    write_rows(tmp_path / "parts" / "a.jsonl", FLAT[:10])
    write_rows(tmp_path / "parts" / "b.jsonl", FLAT[10:])
    write_rows(tmp_path / "parts" / "validation.jsonl", FLAT[:3])
    (tmp_path / "parts" / "README.md").write_text("About the rows.")
    Dataset.from_list(FLAT).save_to_disk(str(tmp_path / "saved"))
    return tmp_path


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "rows.parquet", "parts", "saved"]
)
def test_files_of_all_kinds_have_the_same_rows(written, name):
    found = read_rows([str(written / name)], None, 0.0, 0)
    assert found.train.to_list() == FLAT
    assert (found.held_out is not None) == (name == "parts")


def test_several_sources_are_one_and_a_share_is_held_out(written):
    names = [str(written / "rows.csv"), str(written / "rows.jsonl")]
    found = read_rows(names, None, 0.1, seed=3)
    assert (len(found.train), len(found.held_out)) == (45, 5)
    again = read_rows(names, None, 0.1, seed=3)
    assert again.held_out.to_list() == found.held_out.to_list()
    apart = read_rows(names, str(written / "parts" / "a.jsonl"), 0.1, seed=3)
    assert (len(apart.train), len(apart.held_out)) == (50, 10)


def test_a_text_file_is_one_row_with_its_line_breaks(tmp_path):
    (tmp_path / "play.txt").write_text("w5 w6\n\nw7\n")
    found = read_rows([str(tmp_path / "play.txt")], None, 0.5, 0)
    assert isinstance(found, Rows)
    assert found.train.to_list() == [{"text": "w5 w6\n\nw7\n"}]


def test_chats_under_other_names_are_chats():
    row = {"conversations": [{"from": "human", "value": "w5"}, {"from": "gpt", "value": "w6"}]}
    (found,) = rows_of(row).train.to_list()
    assert [message["content"] for message in found["messages"]] == ["w5", "w6"]
    assert [message["role"] for message in found["messages"]] == ["user", "assistant"]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_a_content_in_parts_is_one_text():
    asked = {"role": "user", "content": parts("w5", " w6")}
    said = {"role": "assistant", "content": parts("w7")}
    joined = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]
    assert rows_of({"messages": [asked, said]}).train.to_list() == [{"messages": joined}]
    (row,) = rows_of({"prompt": [asked], "completion": [said]}).train.to_list()
    assert row["prompt"] + row["completion"] == joined


def test_a_call_of_a_tool_needs_no_content(tmp_path):
    call = {"type": "function", "function": {"name": "w9", "arguments": {"w10": 1}}}
    row = {
        "messages": [
            {"role": "user", "content": "w5"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "w6"},
            {"role": "assistant", "content": "w7"},
        ]
    }
    template = MARKED.replace("m['content'] + ' '", "(m['content'] or 'w8') + ' '")
    ((ids, labels),), _ = tokens(rows_of(row), tmp_path, template)
    assert ids == [3, 5, 4, 8, END, 3, 6, 4, 7, END]
    assert [label for label in labels if label != -100] == [8, END, 7, END]


def test_a_row_that_the_template_refuses_is_shown_before_weights_are_loaded():
    system = {"role": "system", "content": "w11 w12"}
    rows = rows_of(CHAT, {"messages": [system, *CHAT["messages"]]})
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(ConfigError, match=r"\(no system\), .* are system, user,.*'w11 w12'"):
        templated(rows, tokenizer_of(refusing + MARKED), mask_prompts=True)
    held_out = replace(rows_of(CHAT), held_out=rows.train)
    with pytest.raises(ConfigError, match="no system"):
        templated(held_out, tokenizer_of(refusing + MARKED), mask_prompts=True)
