"""Where text comes from: this Python's own source, text files, TSVs, Hugging Face data sets.

Held-out items are chosen by a hash of their name (a file's path, a labelled text itself), so the
split is the same on every machine that holds the same data, whatever the order of listing. Where
few files leave a part empty, the end of the largest one is held out. Does not import torch.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.training.parts.data.readable import (
    check_labelled,
    check_readable,
    is_label_header,
)
from experiments.training.parts.data.text_files import TEXT_SUFFIXES, FolderFiles, Reader, walk
from zenflow.errors import ConfigError

HELD_OUT_SHARE = 0.05
"""Share of files (or of labelled texts) kept for evaluation."""

_NOT_THE_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
)
"""Others' packages, tests, and documentation, which is English kept in a string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Texts for a language model; no text is in both parts."""

    name: str
    """Name of the data in records."""
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Notes for the user on reading and splitting the texts, a line each."""

    task = "lm"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledTexts:
    """Texts and their classes, for classification."""

    name: str
    train: tuple[tuple[str, int], ...]
    held_out: tuple[tuple[str, int], ...]
    classes: tuple[str, ...]
    """Class names; a label is an index into them."""
    notes: tuple[str, ...] = ()
    """Notes for the user on reading the texts, a line each."""

    task = "classification"


def is_held_out(name: str, share: float = HELD_OUT_SHARE) -> bool:
    """Return whether the item of this name belongs to evaluation, by a hash of the name alone."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def stdlib_files() -> list[Path]:
    """Return the running Python's standard library sources, tests left out, in sorted order.

    Raises:
        ConfigError: This Python carries no source files (a frozen or zipped one).
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = (path for path in walk(root, _NOT_THE_LIBRARY) if path.suffix == ".py")
    files = sorted(found, key=lambda path: path.relative_to(root).as_posix())
    if not files:
        raise ConfigError(
            f"the default data is the standard library's source, and there is none in {root}: "
            "give text of your own with --data PATH"
        )
    return files


def stdlib_documents() -> Documents:
    """Return the standard library's source as documents, split by file."""
    root = Path(sysconfig.get_path("stdlib"))
    reader = Reader()
    named = [(path.relative_to(root).as_posix(), reader.read(path)) for path in stdlib_files()]
    return _split("python-stdlib", named, reader)


def path_documents(path: Path, evaluation: Path | None = None) -> Documents:
    """Return the text of a file, or of every text file below a directory.

    A single file is held out by its last part: there is no second file to take. With texts of
    their own to evaluate on nothing is held out.

    Raises:
        ConfigError: There is no text, or too little to hold any out.
    """
    reader = Reader()
    named, notes = _texts(path, reader)
    if evaluation is not None:
        documents = Documents(
            name=path.name,
            train=tuple(text for _, text in named),
            held_out=tuple(text for _, text in _texts(evaluation, reader, "--eval-data")[0]),
            notes=(*reader.notes, *notes),
        )
    elif path.is_file():
        text = named[0][1]
        cut = int(len(text) * (1 - HELD_OUT_SHARE))
        documents = Documents(
            name=path.name, train=(text[:cut],), held_out=(text[cut:],), notes=reader.notes
        )
    else:
        documents = _split(path.name, named, reader)
        documents = replace(documents, notes=(*documents.notes, *notes))
    if not any(documents.train) or not any(documents.held_out):
        raise ConfigError(
            f"--data {path} must hold text for training and for evaluation, but has only "
            f"{sum(len(text) for _, text in named)} characters: give more text, or texts to "
            "evaluate on with --eval-data"
        )
    return documents


def has_labels(path: Path, task: str) -> bool:
    """Return whether a file or directory is read as labelled texts: by ``task``, or its name."""
    is_tsv = path.suffix.lower() == ".tsv" or (path / "train.tsv").is_file()
    return task == "classification" or (task == "auto" and is_tsv)


def tsv_texts(path: Path, evaluation: Path | None = None) -> LabelledTexts:
    """Return the labelled texts of a TSV, or of train.tsv (and dev.tsv) in a directory.

    A line is text, tab, label; the label is what stands behind the last tab. A first line whose
    label is the word ``label``, or another such name of a column, is a header. Without texts of
    their own to evaluate on (another TSV, or a dev file), texts are held out by their hash.

    Raises:
        ConfigError: A line has no tab, most have several, or fewer than two classes are found.
    """
    reader = Reader()
    train = _tsv_rows(path / "train.tsv" if path.is_dir() else path, reader)
    candidates = (path / name for name in ("dev.tsv", "valid.tsv", "test.tsv"))
    dev = evaluation or next((file for file in candidates if file.is_file()), None)
    if dev is not None:
        return labelled(path.name, train, _tsv_rows(dev, reader), reader.notes)
    held_out = [row for row in train if is_held_out(row[0])]
    train = [row for row in train if not is_held_out(row[0])]
    return labelled(path.name, train, held_out, reader.notes)


def evaluated_on(source: Documents | LabelledTexts, evaluation: Path) -> Documents | LabelledTexts:
    """Return a source with a file's (or a directory's) texts in place of those it held out.

    Raises:
        ConfigError: There is no text, or a labelled source gets texts without labels.
    """
    reader = Reader()
    if isinstance(source, LabelledTexts):
        train = [(text, source.classes[label]) for text, label in source.train]
        return labelled(source.name, train, _tsv_rows(evaluation, reader), reader.notes)
    texts = tuple(text for _, text in _texts(evaluation, reader, "--eval-data")[0])
    return replace(source, held_out=texts, notes=reader.notes)


def labelled(
    name: str,
    train: Sequence[tuple[str, str]],
    held_out: Sequence[tuple[str, str]],
    notes: tuple[str, ...] = (),
) -> LabelledTexts:
    """Return labelled texts with class indices in place of class names.

    Raises:
        ConfigError: There are fewer than two classes, or nothing to train or evaluate on.
    """
    classes = tuple(sorted({label for _, label in (*train, *held_out)}, key=_numbers_first))
    if len(classes) < 2:
        raise ConfigError(f"classification needs two classes or more, but {name} has {classes}")
    if not train or not held_out:
        raise ConfigError(
            f"{name} must hold texts for both parts, but has {len(train)} to train on and "
            f"{len(held_out)} to evaluate on: add lines, a dev.tsv beside train.tsv, or give "
            "--eval-data"
        )
    index = {label: number for number, label in enumerate(classes)}
    return LabelledTexts(
        name=name,
        train=tuple((text, index[label]) for text, label in train),
        held_out=tuple((text, index[label]) for text, label in held_out),
        classes=classes,
        notes=notes,
    )


def _texts(
    path: Path, reader: Reader, flag: str = "--data"
) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Return the name and text of every file that has any, in order of names, and notes.

    Raises:
        ConfigError: There is none.
    """
    check_readable(path, flag, is_labelled=False)
    if path.is_file():
        text = reader.read(path)
        if text.strip():
            return [(path.name, text)], ()
        raise ConfigError(f"{flag} {path} must hold text, but is empty: give a file with some")
    found = FolderFiles.below(path)
    texts = {file: text for file in found.texts if (text := reader.read(file)).strip()}
    if texts:
        named = [(file.relative_to(path).as_posix(), text) for file, text in texts.items()]
        return named, (found.without_empty(texts).told(path),)
    raise ConfigError(
        f"{flag} {path} must hold text, but has none in {len(found.texts)} text files: read are "
        f"{', '.join(sorted(TEXT_SUFFIXES))}; a single file may have any name"
    )


def _split(name: str, named: Sequence[tuple[str, str]], reader: Reader) -> Documents:
    parts: tuple[list[str], list[str]] = ([], [])
    for relative, text in named:
        if text.strip():
            parts[is_held_out(relative)].append(text)
    notes = list(reader.notes)
    if not parts[0] or not parts[1]:
        largest, train, held_out = _cut_largest(named)
        parts = (train, held_out)
        notes.append(
            f"held out is the end of {largest}, {len(held_out[0]):,} characters: a part of whole "
            f"files takes more of them than {len(named)} (or give --eval-data)"
        )
    return Documents(
        name=name, train=tuple(parts[0]), held_out=tuple(parts[1]), notes=tuple(notes)
    )


def _cut_largest(named: Sequence[tuple[str, str]]) -> tuple[str, list[str], list[str]]:
    """Return the largest text's name, the texts without its end, and that end alone.

    The end is the held-out share of all text, but no more than half of the one it is cut from.
    """
    largest = max(range(len(named)), key=lambda number: len(named[number][1]))
    name, text = named[largest]
    total = sum(len(text) for _, text in named)
    cut = len(text) - min(math.ceil(total * HELD_OUT_SHARE), len(text) // 2)
    train = [text[:cut] if number == largest else own for number, (_, own) in enumerate(named)]
    return name, train, [text[cut:]]


def _tsv_rows(path: Path, reader: Reader) -> list[tuple[str, str]]:
    check_labelled(path, "--data")
    rows = []
    for number, line in enumerate(reader.read(path).splitlines(), start=1):
        if not line.strip():
            continue
        text, tab, label = line.rpartition("\t")
        if not tab:
            raise ConfigError(
                f"each line of a TSV is text, tab, label, but line {number} of {path} has no "
                f"tab: {line[:60]!r}"
            )
        if number > 1 or not is_label_header(label):
            rows.append((text, label.strip()))
    return rows


def _numbers_first(label: str) -> tuple[bool, float, str]:
    """Order classes named by numbers by value, so that 10 follows 9, and others by name."""
    try:
        return (False, float(label), label)
    except ValueError:
        return (True, 0.0, label)
