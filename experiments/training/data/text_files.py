"""Text files as strings. Binary files are refused, bytes that are not UTF-8 are counted.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from zenflow.errors import ConfigError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_REPLACED = 0.1
"""Share of a file's characters above which it is no text in UTF-8 at all."""


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
