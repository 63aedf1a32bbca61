"""SST-2's sentences: read strictly, without leakage, and cut to size the same way everywhere.

A folder holds train.tsv and test.tsv with lines of sentence, tab, 0 or 1; other tasks may have two
texts to a line, with a tab between them. The data set's own name on the hub needs the extra
``hf``; its test labels are hidden, so its validation split is the test.
Does not import torch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.training.parts.data.hub import hub_dataset
from experiments.training.parts.data.texts import LabelledTexts
from zenflow.errors import ConfigError

TRAIN, TEST = "train.tsv", "test.tsv"
Sentence = tuple[str, int]
"""A sentence, or two with a tab between them, and 0 (negative) or 1 (positive)."""

_LABELS = ("0", "1")
_HEADER = "label"
_LEAST = 4
"""Sentences of either part: with fewer there is nothing to learn or compare."""
_SHOWN = 60

_SUBJECTS = ("film", "plot", "cast", "score", "script", "ending", "pace", "camera")
_WORDS = (("bad", "dull", "weak", "lame"), ("good", "fine", "warm", "sharp"))
_EXTRAS = ("", " and long", " again", " for two hours", " from start to end")
"""Words of the made-up sentences of smoke tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentences:
    """Sentences that a study trains on, and those that test a run once it has ended."""

    name: str
    train: tuple[Sentence, ...]
    """No text twice, and none that is in ``test``."""
    test: tuple[Sentence, ...]
    num_dropped: int = 0
    """Training sentences left out because they occur twice or in the test."""

    def digest(self) -> str:
        """Return 16 hex digits that no other sentences, labels or order have."""
        found = hashlib.sha256()
        for part in (self.train, self.test):
            for text, label in part:
                found.update(f"{text}\t{label}\n".encode())
            found.update(b"\n")
        return found.hexdigest()[:16]


def read_folder(folder: Path, *, most_texts: int = 1) -> Sentences:
    """Return the sentences of a folder with train.tsv and test.tsv.

    Args:
        folder: The folder.
        most_texts: Largest number of texts to a line.

    Raises:
        ConfigError: A file is missing, or a line is not sentence, tab, 0 or 1.
    """
    if not folder.is_dir():
        what = "is not a directory" if folder.exists() else "does not exist"
        raise ConfigError(
            f"the data directory {folder} {what}: give the folder that holds {TRAIN} and {TEST} "
            "(lines of sentence, tab, 0 or 1) with --data-dir"
        )
    missing = [name for name in (TRAIN, TEST) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"the data directory {folder} must hold {TRAIN} and {TEST}, but has no "
            f"{' and no '.join(missing)}: check --data-dir"
        )
    parts = (read_rows(folder / name, most_texts) for name in (TRAIN, TEST))
    return without_leakage(folder.name, *parts)


def read_hub(name: str) -> Sentences:
    """Return the sentences of a data set on the hub; its validation split is the test.

    Raises:
        ConfigError: It can't be loaded, or is no task of two classes.
    """
    found = hub_dataset(name, task="classification", text_column=None, label_column=None)
    if not isinstance(found, LabelledTexts) or len(found.classes) != len(_LABELS):
        raise ConfigError(f"data set {name} must have two classes: check --dataset")
    return without_leakage(name, found.train, found.held_out)


def without_leakage(name: str, train: Sequence[Sentence], test: Sequence[Sentence]) -> Sentences:
    """Return the two parts without training sentences that repeat, or are in the test.

    Texts are the same if they differ in letter case or spaces alone.

    Raises:
        ConfigError: Too few sentences are left, or a part has one class only.
    """
    seen = {_key(text) for text, _ in test}
    kept = []
    for text, label in train:
        if _key(text) not in seen:
            seen.add(_key(text))
            kept.append((text, label))
    for part, rows in (("training", kept), ("test", test)):
        if len(rows) < _LEAST or len({label for _, label in rows}) < len(_LABELS):
            raise ConfigError(
                f"{name} must have {_LEAST} {part} sentences or more and both classes, but has "
                f"{len(rows)} of {len({label for _, label in rows})}: check the data"
            )
    return Sentences(
        name=name, train=tuple(kept), test=tuple(test), num_dropped=len(train) - len(kept)
    )


def cut(sentences: Sentences, most: int, most_test: int | None = None) -> Sentences:
    """Return the sentences with so many of training at most, and of the test.

    They are those with the smallest hash, whatever the order of the file: a larger cut holds the
    smaller one.
    """

    def smallest(rows: Sequence[Sentence], number: int) -> tuple[Sentence, ...]:
        return tuple(sorted(rows, key=lambda r: hashlib.sha256(r[0].encode()).digest())[:number])

    test = sentences.test if most_test is None else smallest(sentences.test, most_test)
    return replace(sentences, train=smallest(sentences.train, most), test=test)


def made_up(num_train: int, num_test: int) -> Sentences:
    """Return so many sentences that anything learns, labelled by one word of each.

    They are the same at every call: a smoke test of the study, not a result.
    """
    every = [
        (f"the {subject} and the {other} are {word}{extra}", label)
        for label, words in enumerate(_WORDS)
        for word in words
        for subject in _SUBJECTS
        for other in _SUBJECTS
        for extra in _EXTRAS
    ]
    drawn = random.Random(0).sample(every, num_train + num_test)
    return without_leakage("made-up sentences", drawn[num_test:], drawn[:num_test])


def _key(text: str) -> str:
    return " ".join(text.casefold().split())


def read_rows(path: Path, most_texts: int) -> list[Sentence]:
    """Return the lines of a file: one or more texts with tabs between, and a label.

    Raises:
        ConfigError: The file can't be read, or a line is malformed.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}): check --data-dir") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() and number == len(lines):
            break
        row = _row(path, number, line, most_texts)
        if row is not None:
            rows.append(row)
    return rows


def _row(path: Path, number: int, line: bytes, most_texts: int) -> Sentence | None:
    """Return a line's sentence and label; None of a header.

    Raises:
        ConfigError: The line is malformed; the message has its number and what is wrong.
    """

    def malformed(what: str) -> ConfigError:
        shown = line.decode("utf-8", "replace").rstrip("\r")[:_SHOWN]
        return ConfigError(
            f"line {number} of {path} {what}: {shown!r}; a line is a sentence, one tab, and 0 or 1"
        )

    try:
        *texts, last = line.decode("utf-8").rstrip("\r").split("\t")
    except UnicodeDecodeError as error:
        raise malformed(f"is not UTF-8 at byte {error.start}") from error
    if not 1 <= len(texts) <= most_texts:
        raise malformed(f"has {len(texts)} tabs")
    label = last.strip()
    if number == 1 and label.lower() == _HEADER:
        return None
    if not all(text.strip() for text in texts):
        raise malformed("has no sentence")
    if label not in _LABELS:
        raise malformed(f"has the label {label!r}")
    return "\t".join(text.strip() for text in texts), int(label)
