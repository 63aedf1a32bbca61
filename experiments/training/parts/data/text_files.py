"""Text files: which of a directory are some, and what they hold as strings.

Binary files are refused, bytes that are not UTF-8 are counted. Does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from experiments.training.parts.data.file_kinds import not_text
from zenflow.errors import ConfigError

TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".js", ".ts", ".tex"}
)

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_REPLACED = 0.1
"""Share of a file's characters above which it is no text in UTF-8 at all."""
_MOST_NAMED = 6
"""Files that a note names, of those passed over."""


def walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files below a directory, but for caches, hidden folders and those skipped."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name
            for name in subfolders
            if name not in skipped and name != "__pycache__" and not name.startswith(".")
        )
        yield from (Path(folder, name) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFiles:
    """The files below a directory, in order of names."""

    texts: tuple[Path, ...]
    """Files that are read."""
    passed: tuple[tuple[Path, str], ...]
    """Files that are passed over, and why."""

    @classmethod
    def below(cls, root: Path) -> FolderFiles:
        """Return the files that are there, by names and first bytes."""
        texts, passed = [], []
        for path in sorted(walk(root), key=lambda found: found.as_posix()):
            kind = not_text(path)
            if kind is not None:
                passed.append((path, kind.words))
            elif path.suffix.lower() in TEXT_SUFFIXES:
                texts.append(path)
            else:
                passed.append((path, f"{path.suffix or 'no suffix'}: not one that is read"))
        return cls(texts=tuple(texts), passed=tuple(passed))

    def without_empty(self, texts: Collection[Path]) -> FolderFiles:
        """Return the same files, those without any text among those passed over."""
        empty = [(path, "empty") for path in self.texts if path not in texts]
        return FolderFiles(texts=tuple(texts), passed=(*self.passed, *empty))

    def told(self, root: Path) -> str:
        """Return how many files are read, and which are passed over, in words."""
        read = f"{len(self.texts)} text file{'' if len(self.texts) == 1 else 's'} read"
        if not self.passed:
            return read
        named = [f"{path.relative_to(root)} ({why})" for path, why in self.passed[:_MOST_NAMED]]
        more = len(self.passed) - len(named)
        return f"{read}; passed over: {', '.join(named)}{f' and {more} more' if more else ''}"


@dataclass(slots=True)
class Reader:
    """Reads files, and keeps what a user should know of them."""

    _replaced: list[tuple[Path, int, int]] = field(default_factory=list)
    """File, number of replacements and offset of the first, of each file that had any."""

    def read(self, path: Path) -> str:
        """Return a file's text; what is not UTF-8 becomes the replacement character.

        Raises:
            ConfigError: The file can't be read, or is binary.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} can't be read ({error.strerror}): check --data") from error
        zero = content.find(b"\0")
        if zero >= 0:
            raise ConfigError(
                f"{path} is not text: byte {zero} is 0. Leave binary files out; text in UTF-16 "
                "becomes UTF-8 by: iconv -f UTF-16 -t UTF-8"
            )
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            text = content.decode("utf-8", errors="replace")
            count = text.count(_REPLACEMENT) - content.count(_REPLACEMENT.encode())
            if count > _MOST_REPLACED * len(text):
                raise ConfigError(
                    f"{path} is not text in UTF-8: {count:,} of {len(text):,} characters can't "
                    f"be read, the first at byte {error.start}. Convert it with iconv, or leave "
                    "it out"
                ) from error
            self._replaced.append((path, count, error.start))
        return text.replace("\r\n", "\n").replace("\r", "\n")

    @property
    def notes(self) -> tuple[str, ...]:
        """A line about replaced bytes, if there were any."""
        if not self._replaced:
            return ()
        path, _, offset = self._replaced[0]
        total = sum(count for _, count, _ in self._replaced)
        return (
            f"bytes that are not UTF-8 were replaced by {_REPLACEMENT}: {total:,} in all, the "
            f"first at byte {offset} of {path}",
        )
