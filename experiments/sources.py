"""Where text comes from: this Python's own source, text files, TSVs, Hugging Face data sets.

Held-out items are chosen by a hash of their name (a file's path, a labelled text itself), so the
split is the same on every machine that holds the same data, whatever the order of listing. Does
not import torch.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zenflow.errors import ConfigError

HELD_OUT_SHARE = 0.05
"""Share of files (or of labelled texts) kept for evaluation."""

_NOT_THE_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
)
"""Others' packages, tests, and documentation, which is English kept in a string."""
_TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".js", ".ts", ".tex"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Texts for a language model; no text is in both parts."""

    name: str
    """What to call the data in records."""
    train: tuple[str, ...]
    held_out: tuple[str, ...]

    task = "lm"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledTexts:
    """Texts and their classes, for classification."""

    name: str
    train: tuple[tuple[str, int], ...]
    held_out: tuple[tuple[str, int], ...]
    classes: tuple[str, ...]
    """Class names; a label is an index into them."""

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
    found = _walk(root, frozenset({".py"}), _NOT_THE_LIBRARY)
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
    named = ((path.relative_to(root).as_posix(), path) for path in stdlib_files())
    return _split_files("python-stdlib", named)


def path_documents(path: Path) -> Documents:
    """Return the text of a file, or of every text file below a directory.

    A single file is held out by its last part: there is no second file to take.

    Raises:
        ConfigError: There is no text, or too few files to hold any out.
    """
    if path.is_file():
        text = _read(path)
        cut = int(len(text) * (1 - HELD_OUT_SHARE))
        return _nonempty(
            Documents(name=path.name, train=(text[:cut],), held_out=(text[cut:],)), path
        )
    files = sorted(_walk(path, _TEXT_SUFFIXES), key=lambda found: found.as_posix())
    named = ((found.relative_to(path).as_posix(), found) for found in files)
    return _nonempty(_split_files(path.name, named), path)


def tsv_texts(path: Path) -> LabelledTexts:
    """Return the labelled texts of a TSV, or of train.tsv (and dev.tsv) in a directory.

    A line is text, tab, label; the label is what stands behind the last tab. A first line whose
    label is literally ``label`` is a header. Without a dev file, texts are held out by their hash.

    Raises:
        ConfigError: A line has no tab, or fewer than two classes are found.
    """
    if path.is_dir():
        train = list(_tsv_rows(path / "train.tsv"))
        candidates = (path / name for name in ("dev.tsv", "valid.tsv", "test.tsv"))
        dev = next((file for file in candidates if file.is_file()), None)
        if dev is not None:
            return labelled(path.name, train, list(_tsv_rows(dev)))
    else:
        train = list(_tsv_rows(path))
    held_out = [row for row in train if is_held_out(row[0])]
    return labelled(path.name, [row for row in train if not is_held_out(row[0])], held_out)


def labelled(
    name: str, train: Sequence[tuple[str, str]], held_out: Sequence[tuple[str, str]]
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
            f"{len(held_out)} to evaluate on: add lines, or a dev.tsv beside train.tsv"
        )
    index = {label: number for number, label in enumerate(classes)}
    return LabelledTexts(
        name=name,
        train=tuple((text, index[label]) for text, label in train),
        held_out=tuple((text, index[label]) for text, label in held_out),
        classes=classes,
    )


def _walk(
    root: Path, suffixes: frozenset[str], skipped: frozenset[str] = frozenset()
) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name
            for name in subfolders
            if name not in skipped and name != "__pycache__" and not name.startswith(".")
        )
        yield from (Path(folder, name) for name in names if Path(name).suffix in suffixes)


def _split_files(name: str, named: Iterable[tuple[str, Path]]) -> Documents:
    parts: tuple[list[str], list[str]] = ([], [])
    for relative, path in named:
        text = _read(path)
        if text.strip():
            parts[is_held_out(relative)].append(text)
    return Documents(name=name, train=tuple(parts[0]), held_out=tuple(parts[1]))


def _nonempty(documents: Documents, path: Path) -> Documents:
    if not any(documents.train) or not any(documents.held_out):
        raise ConfigError(
            f"--data {path} must hold text for training and for evaluation (by a hash of their "
            f"paths {HELD_OUT_SHARE:.0%} of the files are held out), but gave "
            f"{len(documents.train)} and {len(documents.held_out)} texts: add files "
            f"({', '.join(sorted(_TEXT_SUFFIXES))}) or give one larger file"
        )
    return documents


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}): check --data") from error


def _tsv_rows(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        text, tab, label = line.rpartition("\t")
        if not tab:
            raise ConfigError(
                f"each line of a TSV is text, tab, label, but line {number} of {path} has no "
                f"tab: {line[:60]!r}"
            )
        if number == 1 and label.strip().lower() == "label":
            continue
        yield text, label.strip()


def _numbers_first(label: str) -> tuple[bool, float, str]:
    """Order classes named by numbers by value, so that 10 follows 9, and others by name."""
    try:
        return (False, float(label), label)
    except ValueError:
        return (True, 0.0, label)
