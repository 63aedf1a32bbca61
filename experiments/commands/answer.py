"""Answer of a command: what it says on a terminal, what ``--json`` prints, and its exit code."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class Exit(enum.IntEnum):
    """Exit codes of all commands; the help of `zenflow` and the guide have them from here."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Exit:
        """Return the code with its meaning."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    DONE = 0, "done"
    FAULT = 1, "something went wrong: a fault, a full disk, a checkpoint that can't be used"
    REFUSED = 2, "refused before work began: a flag, a setting, a file, data or a model"
    NO_ROOM = 3, "does not fit: memory or disk is too small, or no setting is good enough"
    NOT_SO = 4, "done, and a claim or a check does not hold"
    INTERRUPTED = 130, "stopped by Ctrl-C; 143: by SIGTERM. What was saved is said"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of a command."""

    record: Mapping[str, Any] | None
    """Facts as JSON-ready values, in seconds and bytes: the output of ``--json``; None of another
    rank than the first."""
    show: Callable[[], None] = lambda: None
    """Function that prints the same for people; without ``--json`` alone."""
    code: int = Exit.DONE
    """Exit code, one of `Exit` or 128 + a signal's number."""
