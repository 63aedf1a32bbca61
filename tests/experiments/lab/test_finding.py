import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.lab.finding import Finding, Range, Tolerance, Verdict

NUMBERS = st.floats(-1e6, 1e6)


def finding(published=2.0, tolerance=None, **ours):
    return Finding(
        claim="a claim",
        source="a test",
        published=published,
        unit="x",
        tolerance=tolerance or Tolerance.relative(0.1),
        **ours,
    )


def test_what_is_measured_decides_before_what_is_emulated_and_that_before_what_is_simulated():
    ours = {"measured": 2.0, "emulated": 3.0, "simulated": 4.0}
    assert finding(**ours).basis == "measured"
    assert finding(**ours).verdict is Verdict.HOLDS
    assert finding(**{**ours, "measured": None}).basis == "emulated"
    assert finding(**{**ours, "measured": None}).verdict is Verdict.FAILS
    assert finding(simulated=2.0).verdict is Verdict.HOLDS
    assert finding(measured=3.0, simulated=2.0).verdict is Verdict.FAILS


def test_a_measured_zero_is_a_number():
    assert finding(measured=0.0, simulated=2.0).verdict is Verdict.FAILS


@pytest.mark.parametrize(
    "unknown",
    [finding(), finding(published=None, measured=2.0), finding(measured=math.nan)],
)
def test_without_one_of_the_numbers_a_verdict_is_unknown(unknown):
    assert unknown.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("tolerance", "lowest", "highest"),
    [
        (Tolerance.relative(0.1), 1.8, 4.4),
        (Tolerance.absolute(0.5), 1.5, 4.5),
        (Tolerance.at_least(), 2.0, math.inf),
        (Tolerance.at_least(0.1), 1.8, math.inf),
        (Tolerance.at_most(), -math.inf, 4.0),
        (Tolerance.at_most(0.1), -math.inf, 4.4),
    ],
    ids=str,
)
def test_a_tolerance_allows_exactly_what_it_says_around_a_range(tolerance, lowest, highest):
    published = Range(low=2.0, high=4.0)
    for value, allowed in (
        (lowest + 1e-6, True), (highest - 1e-6, True), (3.0, True),
        (lowest - 1e-6, False), (highest + 1e-6, False),
    ):  # fmt: skip
        if math.isfinite(value):
            assert tolerance.allows(value, published) == allowed


@given(NUMBERS, NUMBERS, st.floats(0, 1))
def test_the_published_number_itself_is_always_allowed(low, width, amount):
    published = Range(low=low, high=low + abs(width))
    for make in (Tolerance.relative, Tolerance.absolute, Tolerance.at_least, Tolerance.at_most):
        assert make(amount).allows(low, published)
        assert make(amount).allows(published.high, published)


@given(
    st.one_of(st.none(), NUMBERS, st.tuples(NUMBERS, NUMBERS)),
    st.sampled_from(["relative", "absolute", "at least", "at most"]),
    st.lists(st.one_of(st.none(), NUMBERS), min_size=3, max_size=3),
)
def test_a_finding_comes_back_from_json_as_it_was(published, kind, ours):
    if isinstance(published, tuple):
        published = Range(low=min(published), high=max(published))
    names = ("measured", "emulated", "simulated")
    one = finding(
        published,
        Tolerance(kind=kind, amount=0.25),
        note="a note",
        **dict(zip(names, ours, strict=True)),
    )
    again = Finding.from_dict(one.to_dict())
    assert again == one
    assert again.verdict is one.verdict


def test_a_written_verdict_is_not_believed():
    values = {**finding(measured=9.0).to_dict(), "verdict": "holds"}
    assert Finding.from_dict(values).verdict is Verdict.FAILS


def test_numbers_that_can_t_be_are_refused():
    with pytest.raises(ValueError, match="low <= high, got 2 and 1"):
        Range(low=2, high=1)
    with pytest.raises(ValueError, match="at least 0, got -"):
        Tolerance.relative(-0.1)
