"""Made-up sentences that anything learns: a smoke test of the study, not a result."""

from __future__ import annotations

import random

from experiments.studies.sst2.data import Sentences, without_leakage

_NAME = "made-up sentences"
_SUBJECTS = ("film", "plot", "cast", "score", "script", "ending", "pace", "camera")
_WORDS = (("bad", "dull", "weak", "lame"), ("good", "fine", "warm", "sharp"))
_EXTRAS = ("", " and long", " again", " for two hours", " from start to end")


def made_up(num_train: int, num_test: int) -> Sentences:
    """Return so many sentences, labelled by one word of each; the same at every call."""
    every = [
        (f"the {subject} and the {other} are {word}{extra}", label)
        for label, words in enumerate(_WORDS)
        for word in words
        for subject in _SUBJECTS
        for other in _SUBJECTS
        for extra in _EXTRAS
    ]
    drawn = random.Random(0).sample(every, num_train + num_test)
    return without_leakage(_NAME, drawn[num_test:], drawn[:num_test])
