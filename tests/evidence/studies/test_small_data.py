"""Small tasks: equal starts for every rule, pairs of texts, what is judged."""

from dataclasses import replace

import pytest

from evidence.studies.small_data.design import (
    ADAMW,
    PLAIN,
    SMOKE,
    VARIANTS,
    Subject,
    Variant,
    subject,
)
from evidence.studies.small_data.run import fine_tune
from evidence.studies.small_data.study import STUDY
from evidence.studies.sst2.data import made_up, read_folder
from experiments.lab.finding import Verdict
from experiments.lab.study import NeedsInputError, Scope, no_progress
from zenflow.errors import ConfigError

TASK = made_up(24, 16)
PROTOCOL = replace(SMOKE, epochs=1)


def losses_of(variant, protocol=PROTOCOL):
    return fine_tune(protocol, TASK, variant, no_progress)


def test_a_rule_without_deferred_columns_trains_as_torchs_adamw():
    whole = Variant(name="zenflow", knobs={"min_split_elements": 10**9})
    ours, theirs = losses_of(whole), losses_of(Variant(name=ADAMW))
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=2e-5)
    assert ours["score"] == theirs["score"]


def test_the_plain_loop_trains_as_the_engine_does():
    knobs = {"update_interval": 2, "block_elements": 10**6}
    engine = losses_of(Variant(name="engine", knobs=knobs))
    plain = losses_of(Variant(name="loop", knobs=knobs, rule={}))
    other = losses_of(Variant(name="loop", knobs=knobs, rule={"delay_share": 3.0}))
    assert plain["losses"] == pytest.approx(engine["losses"], abs=1e-4)
    assert plain["test_loss"] == pytest.approx(engine["test_loss"], abs=1e-4)
    assert other["losses"] != pytest.approx(engine["losses"], abs=1e-3)


def test_claims_come_first_and_have_every_seed():
    cells = Subject(tasks=(TASK,), protocol=PROTOCOL, model="own:tiny").cells((3, 5), VARIANTS)
    named = [(cell.settings["variant"], cell.settings["seed"]) for cell in cells]
    assert len({cell.slug for cell in cells}) == len(cells)
    judged = [ADAMW, "zenflow, S = 4", "zenflow, S = 16", f"{PLAIN}, S = 4", f"{PLAIN}, S = 16"]
    assert named[:10] == [(name, seed) for seed in (3, 5) for name in judged]
    assert ("delay alone, S = 4", 3) in named
    assert ("delay alone, S = 4", 5) not in named


def test_lines_may_have_two_texts_and_say_so_where_they_may_not(tmp_path):
    for name in ("train.tsv", "test.tsv"):
        rows = (f"{name} {place}\tindeed\t{place % 2}\n" for place in range(4))
        (tmp_path / name).write_text("".join(rows))
    found = read_folder(tmp_path, most_texts=2)
    assert found.test[1] == ("test.tsv 1\tindeed", 1)
    with pytest.raises(ConfigError, match="has 2 tabs"):
        read_folder(tmp_path)


def test_a_folder_without_tasks_is_refused_and_none_is_asked_for(tmp_path):
    with pytest.raises(NeedsInputError, match="--data-dir FOLDER"):
        subject(Scope())
    with pytest.raises(ConfigError, match="a folder of each task"):
        subject(Scope(data_dir=tmp_path, model="own:tiny"))


def rows_of(differences):
    """Return rows of three seeds, whose judged rules lie by so many points and per cent apart."""
    ends = {ADAMW: (0.0, 0.0), **differences}
    return [
        {
            "task": "a task", "variant": variant, "seed": seed, "losses": [],
            "accuracy": 0.8 + 0.01 * seed + points / 100, "test_loss": 0.5 * (1 + percent / 100),
            "train_loss": 0.2, "points": [[1, 0.2, 0.5, 0.8]],
        }
        for seed in range(3)
        for variant, (points, percent) in ends.items()
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("points", "percent", "verdicts"),
    [
        (-0.2, 1.9, ["HOLDS", "HOLDS", "HOLDS"]),
        (-0.5, 2.1, ["FAILS", "FAILS", "HOLDS"]),
        (-1.1, -5.0, ["FAILS", "HOLDS", "FAILS"]),
    ],
)
def test_a_rule_is_judged_by_points_and_loss_and_by_the_seeds_spread(points, percent, verdicts):
    config = {"tasks": []}
    data = STUDY.summarise(rows_of({"zenflow, S = 4": (points, percent)}), config)
    found = STUDY.findings(data)
    assert [finding.verdict for finding in found] == [Verdict[name] for name in verdicts]
    assert found[0].measured == pytest.approx(points)
