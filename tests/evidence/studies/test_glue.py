"""Tasks of GLUE: scores, equivalence, a decoder's last token, and tasks and models as data."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from evidence.studies.glue import study
from evidence.studies.glue.design import (
    DECODER,
    ENCODER,
    FILES,
    JUDGED,
    KINDS,
    SMOKE,
    TASKS,
    VARIANTS,
    Model,
    Subject,
    subject,
)
from evidence.studies.language_model import model as language
from evidence.studies.scores import accuracy, matthews
from evidence.studies.small_data.design import ADAMW
from evidence.studies.sst2.data import made_up
from evidence.studies.sst2.run import workbench
from experiments.lab.finding import Verdict
from experiments.lab.intervals import FAILS, HOLDS, UNKNOWN, Equivalence, student_quantile
from experiments.lab.study import NeedsInputError, Scope
from experiments.training.run.evaluation import forward

MADE = made_up(40, 16)


def test_matthews_is_pearsons_correlation_of_two_binary_variables():
    draw = random.Random(0)
    for count in (5, 40, 1000):
        labels = [int(draw.random() < 0.7) for _ in range(count)]
        predicted = [label if draw.random() < 0.6 else 1 - label for label in labels]
        expected = np.corrcoef(predicted, labels)[0, 1]
        assert matthews(predicted, labels) == pytest.approx(expected, abs=1e-12)
    assert matthews([1, 1, 1], [0, 1, 1]) == 0
    assert matthews([0, 1], [0, 1]) == 1
    assert matthews([1, 0], [0, 1]) == -1
    assert accuracy([1, 0, 1, 1], [1, 1, 1, 0]) == 0.5


def test_both_tests_reject_at_5_percent_just_where_the_interval_lies_within_the_margin():
    draw = random.Random(1)
    seen = set()
    for _ in range(200):
        center, spread = draw.uniform(-2, 2), draw.uniform(0.1, 2)
        test = Equivalence.of([draw.gauss(center, spread) for _ in range(5)], 1.0)
        seen.add(test.verdict)
        assert (test.verdict == HOLDS) == (test.p_value < 0.05)
    assert seen == {HOLDS, FAILS, UNKNOWN}


def test_the_p_value_of_a_known_case():
    # Mean 0, standard error s: t is the margin over s, so a margin of t s has the tail behind t.
    differences = [-1.0, 0.0, 1.0]
    error = 1 / math.sqrt(3)
    margin = student_quantile(2, 0.9) * error
    assert Equivalence.of(differences, margin).p_value == pytest.approx(0.05)
    assert math.isnan(Equivalence.of([0.0], 1.0).p_value)
    assert Equivalence.of([0.0], 1.0).verdict == UNKNOWN


def test_a_decoders_head_reads_the_last_token_whatever_pads_a_row():
    pytest.importorskip("transformers")
    settings = replace(SMOKE.protocol, model="tiny")
    bench = workbench(settings, MADE)
    batch = bench.data.held_out.batch(0)
    assert int(batch.mask.sum()) < batch.mask.numel(), "some row is padded"
    bench.model.eval()
    with torch.no_grad():
        together = forward(bench.model, batch)
        for row in range(len(batch.targets)):
            length = int(batch.mask[row].sum())
            alone = replace(
                batch, inputs=batch.inputs[row : row + 1, :length], mask=None,
                targets=batch.targets[row : row + 1],
            )  # fmt: skip
            assert torch.allclose(forward(bench.model, alone)[0], together[row], atol=1e-5)


def folder_of(path, *, pair):
    for name in FILES:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        rows = (
            f"{name} {place}{pair * ('glue/rte' in name)}\t{place % 2}\n" for place in range(6)
        )
        (path / name).write_text("".join(rows))
    return path


def saved(path, architecture):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_tasks_and_models_are_data(tmp_path):
    pytest.importorskip("transformers")
    folder = folder_of(tmp_path / "data", pair="\tindeed")
    names = [saved(tmp_path / "e", "BertModel"), saved(tmp_path / "d", "LlamaForCausalLM")]
    own = subject(Scope(data_dir=folder, model=",".join(map(str, names))))
    encoder, decoder = own.models
    assert (encoder.kind, decoder.kind) == (KINDS["encoder"], KINDS["decoder"])
    rte = TASKS[-1]
    assert "\tindeed" in own.sentences_for(encoder, rte).test[0][0]
    assert own.sentences_for(decoder, rte).test[0][0].endswith("\nindeed")
    assert own.header()["tasks"]["CoLA"]["metric"] == "Matthews correlation"
    (folder / FILES[0]).unlink()
    with pytest.raises(NeedsInputError, match=FILES[0]):
        subject(Scope(data_dir=folder, model=str(names[0]), seeds=(1,)))


@pytest.mark.parametrize("place", [0, 1])
def test_a_study_is_of_its_own_model(monkeypatch, tmp_path, place):
    own = Model(name="own:tiny", path=None, kind=SMOKE)
    asked = []
    monkeypatch.setattr(Model, "of", lambda name: asked.append(name) or own)
    folder = folder_of(tmp_path / "data", pair="")
    studies = study.STUDIES
    assert studies[place].cells(Scope(data_dir=folder, seeds=(place,)))
    assert asked == [(ENCODER, DECODER)[place]]
    studies[place].cells(Scope(data_dir=folder, seeds=(place,), model="other"))
    assert asked[1:] == ["other"]
    assert [each.name for each in studies] == ["glue", "glue_decoder"]


def test_runs_of_claims_come_first_seed_by_seed():
    model = Model(name="own:tiny", path=None, kind=SMOKE)
    own = Subject(models=(model,), sentences={task.name: MADE for task in TASKS})
    cells = own.cells((3, 5))
    assert len(cells) == len({cell.slug for cell in cells}) == 2 * len(TASKS) * len(VARIANTS)
    first = [(c.settings["seed"], c.settings["task"], c.settings["variant"]) for c in cells[:18]]
    assert first == [
        (seed, task.name, rule) for seed in (3, 5) for task in TASKS for rule in (ADAMW, *JUDGED)
    ]


def group_of(points, variant=JUDGED[0]):
    return {
        "model": "package:m", "task": "CoLA", "variant": variant,
        "seeds": list(range(len(points))),
        "metric": "Matthews correlation", "margin": 2.5, "scores": points, "test_losses": points,
        "points": points,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("points", "verdict"),
    [
        ([0.1, -0.2, 0.3, 0.0], Verdict.HOLDS),
        ([-6.0, -5.5, -6.5, -6.2], Verdict.FAILS),
        ([6.0, 5.5, 6.5, 6.2], Verdict.FAILS),  # no better either
        ([-4.0, 3.0, -3.0, 4.0], Verdict.UNKNOWN),
        ([0.0], Verdict.UNKNOWN),
    ],
)
def test_a_rule_is_equivalent_within_its_tasks_margin_or_the_seeds_can_not_tell(points, verdict):
    data = {"groups": [group_of([0.0] * len(points), ADAMW), group_of(points)]}
    (finding,) = study.STUDIES[0].findings(data)
    assert finding.verdict is verdict
    assert "within 2.5 points" in finding.claim
    (table,) = study._tables(data)
    shown = [column.show(group) for group in data["groups"] for column in table.columns]
    assert not any(word in text for text in (finding.note, *shown) for word in ("inf", "nan"))


def test_a_packed_model_is_unpacked_once(tmp_path, monkeypatch):
    class Saves:
        def save_pretrained(self, folder):
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text("{}")

    made = []
    monkeypatch.setattr(language, "load_model", lambda path: made.append(path) or Saves())
    monkeypatch.setattr(language, "load_tokenizer", lambda path: language.Pretrained(Saves(), 0))
    packed = tmp_path / "m.gguf"
    packed.touch()
    for _ in range(2):
        assert language.in_folder(packed, tmp_path / "m") == tmp_path / "m"
    assert made == [packed]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.gguf"]
    assert language.in_folder(tmp_path / "m", tmp_path / "other") == tmp_path / "m"
