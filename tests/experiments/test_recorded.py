"""Evidence: the shipped numbers are the records', and the nearest of them is named."""

from dataclasses import replace

import pytest

from evidence.pages.recorded_losses import recorded_losses, text_of
from experiments.lab.record import needed
from experiments.recorded.losses import FILE, recorded
from experiments.recorded.nearest import Training, evidence

ASKED = Training(
    rule="exact", topk_ratio=0.1, update_interval=16, lr=2e-5, num_params=22_713_986,
    from_scratch=False,
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


def test_a_recorded_setting_is_its_own_nearest_and_lies_within():
    for row in recorded():
        own = {name: getattr(row, name) for name in Training.__dataclass_fields__}
        found = evidence(Training(**own))
        assert found.nearest == row
        assert found.outside == ()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_params": 8_030_261_248}, "model size (8.03B; recorded 0.837M to 22.7M)"),
        ({"topk_ratio": 0.8}, "k (0.8; recorded 0 to 0.3)"),
        ({"update_interval": 64}, "S (64; recorded 1 to 32)"),
        ({"lr": 1e-5}, "learning rate (1e-05; recorded 2e-05 to 0.001)"),
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
