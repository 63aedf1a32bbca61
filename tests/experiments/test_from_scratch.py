"""The figure that says where ZenFlow loses: from the committed record, by its intervals."""

from experiments.lab.study import Job
from experiments.lab.finding import Verdict
from experiments.paper.from_scratch import STUDY, _make as make


def rows(variant, losses, rate=1e-3):
    return [
        {"regime": "r", "variant": variant, "lr": rate, "seed": seed, "eval_loss": loss}
        for seed, loss in enumerate(losses)
    ]


def test_a_claim_is_decided_by_the_interval_of_the_excess():
    data = {
        "rows": [
            *rows("on_device", (1.0, 2.0, 1.5)),
            *rows("kept", (1.001, 2.004, 1.499)),
            *rows("lost", (1.05, 2.12, 1.58)),
            *rows("either", (0.95, 2.0, 1.6)),
        ]
    }
    found = STUDY.findings(data)
    assert [f.verdict for f in found] == [Verdict.HOLDS, Verdict.FAILS, Verdict.UNKNOWN]
    assert "can't tell" in found[2].note


def test_the_record_says_that_from_scratch_zenflow_loses_and_in_fine_tuning_keeps(tmp_path):
    data = make(Job(folder=tmp_path))
    verdicts = {finding.claim: finding.verdict for finding in STUDY.findings(data)}

    def of(start, variant):
        (found,) = (
            v for c, v in verdicts.items() if c.startswith(start) and f" {variant} is" in c
        )
        return found

    assert of("from scratch, learning rate 0.001", "zenflow") is Verdict.FAILS
    assert of("from scratch, learning rate 0.001", "zenflow_paper") is Verdict.FAILS
    assert of("fine-tuning, learning rate 0.0001", "zenflow") is Verdict.HOLDS
    assert of("fine-tuning, learning rate 0.0001", "zenflow_paper") is Verdict.FAILS
    STUDY.draw(data)
