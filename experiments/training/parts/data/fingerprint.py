"""A fingerprint of the texts that a run reads: a run that goes on must read the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from experiments.training.parts.data.texts import Documents, LabelledTexts


def fingerprint(source: Documents | LabelledTexts) -> dict[str, Any]:
    """Return the fingerprint of a source's texts: two counts, and a hash of all texts.

    It is of the texts as they were read, not of files: a file may move, and a data set of the hub
    has none of its own.
    """
    hasher = xxhash.xxh3_128()
    counts = {"texts": 0, "characters": 0}
    for part in (source.train, source.held_out):
        for item in part:
            text, label = item if isinstance(item, tuple) else (item, -1)
            encoded = text.encode("utf-8", "surrogatepass")
            # Lengths too, or a boundary between two texts could move unnoticed.
            hasher.update(b"%d %d " % (len(encoded), label))
            hasher.update(encoded)
            counts["texts"] += 1
            counts["characters"] += len(text)
        hasher.update(b"|")
    return {**counts, "xxh3": hasher.hexdigest()}


def shown(found: Mapping[str, Any]) -> str:
    """Return a fingerprint in words."""
    return (
        f"{found['texts']:,} texts of {found['characters']:,} characters "
        f"(XXH3 {found['xxh3'][:12]})"
    )
