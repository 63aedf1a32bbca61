"""What may be concluded from accuracies: intervals and verdicts, checked by hand or scipy."""

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.lab.intervals import (
    FAILS,
    HOLDS,
    UNKNOWN,
    Comparison,
    compare,
    half_width_over_seeds,
    half_width_over_sentences,
    packed,
    paired_p_value,
    student_quantile,
    student_share,
    unpacked,
)
from experiments.lab.variants import BASELINE


def row(variant, seed, marks):
    return {"variant": variant, "seed": seed, "correct": packed(marks)}


def right(count, of):
    return [1] * count + [0] * (of - count)


def compared(half_width, difference):
    return Comparison(
        variant="zenflow", seeds=(0, 1), accuracies=(0.8, 0.8),
        differences=(difference, difference), half_width=half_width, p_value=0.5,
    )  # fmt: skip


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30, 99])
def test_students_distribution_is_scipys(freedom):
    stats = pytest.importorskip("scipy.stats")
    for t in (0.0, 0.3, 1.0, 2.5, 12.0):
        expected = 1 - 2 * stats.t.sf(t, freedom)
        assert student_share(freedom, t) == pytest.approx(expected, abs=1e-12)
    assert student_quantile(freedom, 0.9) == pytest.approx(stats.t.ppf(0.95, freedom), rel=1e-9)


def test_the_paired_test_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    differences = [-0.012, 0.003, -0.006, 0.001]
    assert paired_p_value(differences) == pytest.approx(
        stats.ttest_1samp(differences, 0).pvalue, rel=1e-9
    )
    low, high = stats.t.interval(0.9, 3, loc=0, scale=stats.sem(differences))
    assert half_width_over_seeds(differences) == pytest.approx((high - low) / 2)


def test_equal_runs_differ_by_nothing_for_sure():
    assert paired_p_value([0.0, 0.0]) == 1.0
    assert half_width_over_seeds([0.0, 0.0]) == 0.0


def test_one_seed_tells_nothing_about_others():
    assert half_width_over_seeds([0.0]) == math.inf
    assert math.isnan(paired_p_value([0.0]))
    rows = [row(v, 0, right(40, 50)) for v in (BASELINE, "zenflow")]
    assert [c.verdict for c in compare(rows, 50)] == [HOLDS, UNKNOWN]


def test_sentences_on_which_both_agree_add_nothing_as_in_mcnemars_error():
    # Of 100 sentences 6 are told by the first alone and 2 by the second alone.
    own, base = right(56, 100), [0] * 6 + right(50, 92) + [1] * 2
    base, own = [*base], [*own[:56], *own[56:98], 0, 0]
    lost = sum(b > a for a, b in zip(own, base, strict=True))
    won = sum(a > b for a, b in zip(own, base, strict=True))
    assert (won, lost) == (6, 2)
    variance = (won + lost - (won - lost) ** 2 / 100) / (100 * 99)
    expected = NormalDist().inv_cdf(0.95) * math.sqrt(variance)
    assert half_width_over_sentences([own], [base]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("half_width", "difference", "verdict", "is_equivalent"),
    [
        (0.004, 0.0, HOLDS, True),
        (0.004, -0.005, HOLDS, True),
        (0.004, 0.05, HOLDS, False),
        (0.02, 0.0, UNKNOWN, False),  # far from significant, and no evidence of equality
        (0.009, -0.005, UNKNOWN, False),
        (0.004, -0.013, UNKNOWN, False),  # some loss is certain, not that it is too large
        (0.004, -0.05, FAILS, False),
    ],
)
def test_the_verdict_is_the_intervals_place_beside_the_margin(
    half_width, difference, verdict, is_equivalent
):
    comparison = compared(half_width, difference)
    assert (comparison.verdict, comparison.is_equivalent) == (verdict, is_equivalent)


def test_a_run_is_compared_with_the_baselines_of_its_own_seed():
    rows = [
        row("zenflow", 1, right(60, 100)),
        row("zenflow", 0, right(80, 100)),
        row("zenflow", 7, right(1, 100)),  # the baseline has no seed 7
        row(BASELINE, 0, right(82, 100)),
        row(BASELINE, 1, right(61, 100)),
    ]
    first, second = compare(rows, 100)
    assert first.variant == BASELINE
    assert second.seeds == (0, 1)
    assert second.differences == pytest.approx((-0.02, -0.01))
    assert second.mean == pytest.approx(0.7)
    assert second.spread == pytest.approx(math.sqrt(0.02))


def test_the_wider_of_the_two_intervals_counts():
    same_on_average = [[1, 0] * 50, [0, 1] * 50]
    rows = [row(BASELINE, seed, marks) for seed, marks in enumerate(same_on_average)]
    rows += [row("zenflow", seed, [1] * 50 + [0] * 50) for seed in (0, 1)]
    _, comparison = compare(rows, 100)
    assert comparison.differences == (0.0, 0.0)
    assert comparison.half_width > 0.05  # the sentences differ, the seeds' means don't


@given(st.lists(st.integers(0, 1), min_size=1, max_size=300))
def test_marks_come_back_as_they_were_packed(marks):
    assert unpacked(packed(marks), len(marks)) == marks


def test_marks_of_another_test_are_refused():
    with pytest.raises(ValueError, match="marks of 4 sentences, but there are 3"):
        unpacked(packed([0, 1, 1]), 4)
