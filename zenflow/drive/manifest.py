"""Manifest: the small file that says which place of each extent counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from zenflow.drive import disk
from zenflow.errors import CheckpointError

NAME = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Generation:
    """A checkpoint on the drive: where each extent's content was when it was made."""

    number: int
    """Number of the checkpoint in its folder, from 1."""
    step: int
    """Number of steps that the optimizer had taken."""
    places: str
    """Place of each extent, "0" or "1"; "-" for one of zeros, which was never written."""
    checksums: tuple[str, ...]
    """Checksum of each extent's bytes; "" for one that was never written."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a folder says of its extents."""

    run: str
    """Name of the run that filled the folder, as no other run has."""
    kind: Mapping[str, Any]
    """Parameters and format of the states, by which another model is told apart."""
    written_bytes: int
    """Bytes that were written to the folder up to the last checkpoint."""
    generations: tuple[Generation, ...]
    """Checkpoints whose extents are whole, the newest last: none, one or two."""

    @property
    def newest(self) -> Generation | None:
        """Newest checkpoint; None where there is none."""
        return self.generations[-1] if self.generations else None

    def with_generations(self, generations: Sequence[Generation], written_bytes: int) -> Manifest:
        """Return the manifest with other checkpoints."""
        return replace(self, generations=tuple(generations), written_bytes=written_bytes)

    def save(self, folder: Path) -> None:
        """Put this manifest in the place of the folder's."""
        body = json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True)
        text = json.dumps({"checksum": checksum(body.encode()), "body": body})
        disk.replace_durably(folder / NAME, text)

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """Return a folder's manifest; None where it has none.

        Raises:
            CheckpointError: The file is damaged, or of another version.
        """
        path = folder / NAME
        if not path.exists():
            return None
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            body = saved["body"]
            is_whole = checksum(body.encode()) == saved["checksum"]
            found = json.loads(body) if is_whole else {}
        except (ValueError, KeyError, TypeError, AttributeError):
            found = {}
        if found.pop("format", None) != _FORMAT:
            raise CheckpointError(
                f"{path} is damaged, or of another version: without it nobody can tell which "
                "states count. Resume from a portable state, or begin anew in another folder"
            )
        generations = tuple(
            Generation(**{**one, "checksums": tuple(one["checksums"])})
            for one in found.pop("generations")
        )
        return cls(**found, generations=generations)


def checksum(data: Any) -> str:
    """Return the checksum of some bytes: XXH3's 64 bits, in hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)
