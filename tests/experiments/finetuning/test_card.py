"""The card of a fine-tuned model."""

from pathlib import Path

import pytest

pytest.importorskip("trl", reason='needs the extra: pip install "zenflow-offload[finetune]"')

from huggingface_hub import ModelCard

from experiments.finetuning.card import card
from experiments.finetuning.settings import settle

HUB = "somebody/a-model"


def made(model=HUB, data=("somebody/rows:a-part",), folder=Path("/somewhere/runs/mine"), *,
         shared=None, knobs=None, own=None):  # fmt: skip
    settings = settle(model, data, shared or {}, knobs or {}, own or {})
    text = card(settings, folder, steps=1200, held_out_loss=1.23456)
    assert "None" not in text
    assert "/somewhere" not in text
    return ModelCard(text)


def test_the_hub_reads_base_and_data_where_they_are_its_own():
    found = made()
    assert found.data.base_model == HUB
    assert found.data.datasets == ["somebody/rows"]
    assert found.data.library_name == "transformers"
    assert f"[{HUB}](https://huggingface.co/{HUB})" in found.text
    assert "| held-out loss | 1.2346 |" in found.text
    assert "| steps | 1,200 |" in found.text


def test_a_folder_and_a_file_are_not_the_hubs(tmp_path):
    model, file = tmp_path / "base", tmp_path / "rows.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    file.write_text("{}")
    found = made(str(model), (str(file), str(tmp_path / "gone.jsonl")))
    assert found.data.base_model is None
    assert found.data.datasets is None
    assert "`base`" in found.text
    assert str(tmp_path) not in found.content


def test_the_model_is_loaded_from_where_it_is_pushed():
    assert 'from_pretrained("mine")' in made().text
    pushed = made(own={"push_to_hub": "me/better"})
    assert 'from_pretrained("me/better")' in pushed.text
    assert pushed.text.lstrip().startswith("# better")


@pytest.mark.parametrize(
    ("shared", "knobs", "words"),
    [
        ({}, {"topk_ratio": 0.05, "update_interval": 2}, "k = 0.05, S = 2."),
        ({}, {}, "(AdamW, states on the host)"),
        ({"strategy": "zenflow_paper"}, {}, "(published rule)"),
        ({"strategy": "on_device"}, {}, "The optimizer was AdamW."),
        ({"controller": "zen-auto"}, {}, "tuned while the model learnt."),
    ],
)
def test_the_optimizer_is_named(shared, knobs, words):
    assert words in made(shared=shared, knobs=knobs).text
