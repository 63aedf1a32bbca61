"""Accuracies beside the device's: differences by seed, intervals, and what may be concluded.

A difference that is not significant is not shown to be none. So a margin is set before anything
runs, and a strategy *keeps* the accuracy only where the interval of its difference lies above
minus the margin (a test of non-inferiority at 5%, two one-sided tests' lower half). Standard
library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any

from experiments.lab.variants import BASELINE

MARGIN = 0.01
"""Loss of accuracy that counts as none: one sentence in a hundred."""
CONFIDENCE = 0.9
"""Share of the two-sided intervals: their lower ends are one-sided bounds at 95%."""
HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "can't tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A strategy's accuracy over the seeds, and its difference to the device's."""

    variant: str
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    """Accuracies in [0, 1], by seed."""
    differences: tuple[float, ...]
    """Differences to the baseline of the same seed; all 0 for the baseline itself."""
    half_width: float
    """Half of the interval around the mean difference; infinite for a single seed."""
    p_value: float
    """p-value of the two-sided paired t-test; NaN for a single seed."""

    @property
    def mean(self) -> float:
        """Mean accuracy."""
        return fmean(self.accuracies)

    @property
    def spread(self) -> float:
        """Standard deviation of the accuracy over the seeds; NaN of a single one."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else math.nan

    @property
    def difference(self) -> float:
        """Mean difference to the baseline."""
        return fmean(self.differences)

    @property
    def interval(self) -> tuple[float, float]:
        """Least and largest difference that the runs are compatible with."""
        return self.difference - self.half_width, self.difference + self.half_width

    @property
    def verdict(self) -> str:
        """Whether the claim that no more than ``MARGIN`` is lost holds."""
        low, high = self.interval
        if low > -MARGIN:
            return HOLDS
        return FAILS if high < -MARGIN else UNKNOWN

    @property
    def is_equivalent(self) -> bool:
        """Whether the accuracy is neither lower nor higher than the baseline's by the margin."""
        low, high = self.interval
        return low > -MARGIN and high < MARGIN


def compare(rows: Sequence[Mapping[str, Any]], num_test: int) -> list[Comparison]:
    """Return a comparison for each variant, the baseline first.

    Args:
        rows: Of runs; of each ``variant``, ``seed``, and ``correct`` (see ``packed``).
        num_test: Sentences of the test.

    A variant's seeds that the baseline lacks are left out.
    """
    marks = {(row["variant"], row["seed"]): unpacked(row["correct"], num_test) for row in rows}
    found = []
    for variant in dict.fromkeys([BASELINE, *(row["variant"] for row in rows)]):
        seeds = sorted(s for v, s in marks if v == variant and (BASELINE, s) in marks)
        if seeds:
            own = [marks[variant, seed] for seed in seeds]
            found.append(_comparison(variant, seeds, own, [marks[BASELINE, s] for s in seeds]))
    return found


def _comparison(
    variant: str,
    seeds: Sequence[int],
    own: Sequence[Sequence[int]],
    baseline: Sequence[Sequence[int]],
) -> Comparison:
    differences = [fmean(a) - fmean(b) for a, b in zip(own, baseline, strict=True)]
    if variant == BASELINE:
        half, p_value = 0.0, 1.0
    else:
        half = max(half_width_over_seeds(differences), half_width_over_sentences(own, baseline))
        p_value = paired_p_value(differences)
    return Comparison(
        variant=variant,
        seeds=tuple(seeds),
        accuracies=tuple(map(fmean, own)),
        differences=tuple(differences),
        half_width=half,
        p_value=p_value,
    )


def half_width_over_seeds(differences: Sequence[float]) -> float:
    """Return half of Student's interval of the mean: what other seeds would have changed."""
    freedom = len(differences) - 1
    if freedom < 1:
        return math.inf
    error = stdev(differences) / math.sqrt(len(differences))
    return student_quantile(freedom, CONFIDENCE) * error


def half_width_over_sentences(
    own: Sequence[Sequence[int]], baseline: Sequence[Sequence[int]]
) -> float:
    """Return half of the interval that other test sentences of the same kind would allow.

    A sentence counts with its mean difference over the seeds, so that sentences on which the two
    agree add nothing (for one seed this is McNemar's standard error).
    """
    per_sentence = [
        fmean(a - b for a, b in zip(mine, base, strict=True))
        for mine, base in zip(zip(*own, strict=True), zip(*baseline, strict=True), strict=True)
    ]
    error = stdev(per_sentence) / math.sqrt(len(per_sentence))
    return NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error


def paired_p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the paired t-test against no difference."""
    freedom = len(differences) - 1
    if freedom < 1:
        return math.nan
    error = stdev(differences) / math.sqrt(len(differences))
    if not error:
        return 0.0 if any(differences) else 1.0
    return 1 - student_share(freedom, abs(fmean(differences)) / error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """Result of two one-sided t-tests: whether paired differences lie within a margin of 0.

    Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for
    assessing the equivalence of average bioavailability", 1987.
    """

    margin: float
    """Largest difference, either way, that counts as none; set before anything runs."""
    difference: float
    """Mean of the paired differences over the seeds."""
    interval: tuple[float, float]
    """Interval at `CONFIDENCE`: it lies within the margin where both tests reject at 5%."""
    p_value: float
    """Larger p-value of the two tests; NaN of a single difference."""

    @classmethod
    def of(cls, differences: Sequence[float], margin: float) -> Equivalence:
        """Return the test's result for paired differences, one for each seed."""
        mean, half = fmean(differences), half_width_over_seeds(differences)
        p_value, freedom = math.nan, len(differences) - 1
        if freedom >= 1:
            error = stdev(differences) / math.sqrt(len(differences))
            inside = margin - abs(mean)
            p_value = 0.0 if inside > 0 else 1.0
            if error:
                tail = (1 - student_share(freedom, abs(inside) / error)) / 2
                p_value = tail if inside > 0 else 1 - tail
        return cls(
            margin=margin, difference=mean, interval=(mean - half, mean + half), p_value=p_value
        )

    @property
    def span(self) -> str:
        """The interval as text, empty for a single difference."""
        if math.isnan(self.p_value):
            return ""
        return " to ".join(f"{end:+.2f}" for end in self.interval)

    @property
    def verdict(self) -> str:
        """Whether the two are equivalent; they may be shown to be neither."""
        low, high = self.interval
        if -self.margin < low and high < self.margin:
            return HOLDS
        return FAILS if low > self.margin or high < -self.margin else UNKNOWN


def student_share(freedom: int, t: float) -> float:
    """Return the share of Student's distribution between -t and t.

    Abramowitz and Stegun, 26.7.3 and 26.7.4: a finite sum for whole degrees of freedom.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    if odd:
        return (angle + math.sin(angle) * total) * 2 / math.pi
    return math.sin(angle) * total


def student_quantile(freedom: int, share: float) -> float:
    """Return the t with this share of Student's distribution between -t and t."""
    low, high = 0.0, 1.0
    while student_share(freedom, high) < share:
        high *= 2
    for _ in range(80):  # halvings: to the last bit of a float
        middle = (low + high) / 2
        if student_share(freedom, middle) < share:
            low = middle
        else:
            high = middle
    return high


def packed(marks: Sequence[int]) -> str:
    """Return 0s and 1s, one per sentence, as hex digits."""
    return f"{int('1' + ''.join(map(str, marks)), 2):x}"


def unpacked(digits: str, count: int) -> list[int]:
    """Return the marks that ``packed`` was given."""
    bits = f"{int(digits, 16):b}"[1:]
    if len(bits) != count:
        raise ValueError(f"expected the marks of {count} sentences, but there are {len(bits)}")
    return [int(bit) for bit in bits]
