"""Evidence: the shipped numbers are the records', and the nearest of them is named."""

from dataclasses import asdict, replace

import pytest

from evidence.pages.recorded_losses import recorded_losses, text_of
from experiments.lab.record import needed
from experiments.recorded.losses import FILE, RecordedLoss, recorded
from experiments.recorded.nearest import Training, evidence

ASKED = Training(
    rule="exact", topk_ratio=0.1, update_interval=16, host_state="float32", gradient_link="model",
    lr=2e-5, num_params=22_713_986, from_scratch=False,
)  # fmt: skip


def test_the_shipped_numbers_are_those_of_the_committed_records():
    assert FILE.read_text(encoding="utf-8") == text_of(recorded_losses())


def test_numbers_are_the_findings_of_their_study():
    record = needed("sst2")
    notes = {
        f.claim.split(" loses ")[0]: f.measured for f in record.findings if "loses" in f.claim
    }
    (row,) = [row for row in recorded() if row.update_interval == 16 and row.is_accuracy
              and row.rule == "exact"]  # fmt: skip
    assert 100 * row.mean == pytest.approx(notes["zenflow S=16"], abs=1e-3)


def own_of(row):
    return {name: getattr(row, name) for name in Training.__dataclass_fields__}


def test_a_decoders_numbers_are_those_of_its_study():
    record = needed("language_model")
    claims = {f.claim: f.note for f in record.findings}
    compact = {"lr": 3e-5, "topk_ratio": 0.1, "host_state": "compact", "gradient_link": "model"}
    (row,) = [
        row
        for row in recorded()
        if row.task.endswith("chats") and own_of(row).items() >= compact.items()
    ]
    (note,) = [
        note
        for claim, note in claims.items()
        if claim.startswith("chats") and "compact state is" in claim and "AdamW" in claim
    ]
    assert f"{100 * row.mean:+.3f}%" in note
    assert f"{row.seeds} seeds" in note


def test_a_recorded_setting_of_several_seeds_is_its_own_nearest_and_lies_within():
    for row in recorded():
        found = evidence(Training(**own_of(row)))
        assert found.outside == found.others == ()
        if row.seeds >= 3:
            assert own_of(found.nearest) == own_of(row)
            assert found.nearest.seeds >= row.seeds


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_params": 8_030_261_248}, "model size (8.03B; recorded 0.837M to 135M)"),
        ({"topk_ratio": 0.8}, "k (0.8; recorded 0 to 0.3)"),
        ({"update_interval": 64}, "S (64; recorded 1 to 32)"),
        ({"lr": 1e-6}, "learning rate (1e-06; recorded 1e-05 to 0.001)"),
    ],
)
def test_what_lies_outside_of_all_records_is_said(change, word):
    found = evidence(replace(ASKED, **change))
    assert found.outside == (word,)
    assert word in str(found)


def test_the_kind_of_training_counts_before_everything_else():
    scratch = evidence(replace(ASKED, from_scratch=True))
    assert scratch.nearest.from_scratch
    assert not evidence(replace(ASKED, lr=1e-3, num_params=836_992)).nearest.from_scratch
    assert evidence(ASKED, rows=[]) is None
    only = [row for row in recorded() if row.from_scratch]
    assert evidence(ASKED, rows=only).outside[0] == "fine-tuning"


def line(**given):
    """Return a record, which differs in this from one of three seeds."""
    own = asdict(ASKED) | {"record": "r", "task": "t", "seeds": 3, "is_accuracy": False,
                           "mean": 0.0, "least": 0.0, "most": 0.0}  # fmt: skip
    return RecordedLoss(**own | given)


@pytest.mark.parametrize(
    ("near", "far"),
    [
        ({"lr": 6e-5}, {"seeds": 1}),
        ({"seeds": 1}, {"lr": 8e-5}),
        ({"seeds": 4, "mean": 0.1}, {"mean": 0.2}),
        ({"mean": -0.2}, {"mean": 0.1}),
        ({"lr": 1e-3, "update_interval": 1}, {"host_state": "compact"}),
        ({"gradient_link": "e4m3"}, {"host_state": "compact", "gradient_link": "e4m3"}),
        ({"host_state": "compact", "lr": 1e-3}, {"topk_ratio": 0.0}),
    ],
)
def test_of_two_records_the_nearer_is_named(near, far):
    for rows in ([line(**near), line(**far)], [line(**far), line(**near)]):
        assert evidence(ASKED, rows=rows).nearest == line(**near)


def test_states_and_gradients_that_are_not_the_records_are_said():
    asked = replace(ASKED, host_state="compact", gradient_link="e4m3")
    found = evidence(asked, rows=[line()])
    assert found.others == ("float32 host state", "gradients that are not rounded")
    assert "That record has float32 host state and gradients that are not rounded." in str(found)
    same = str(evidence(asked, rows=[line(host_state="compact", gradient_link="e4m3")]))
    assert "S = 16, compact host state, 8-bit gradients, learning rate" in same
    assert "That record has" not in same
    assert "beside AdamW (1 seed; r)." in str(evidence(asked, rows=[line(seeds=1)]))
