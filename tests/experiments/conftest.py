"""What the tests of runs share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from experiments.output import plots
from experiments.search import results
from experiments.training.parts.data import batches
from experiments.training.parts.data.tokens import ByteTokenizer
from experiments.training.run import comparison
from experiments.training.run.tuned import picture
from tests.experiments.tuned import ByTheClock, decide_by
from zenflow import provenance


@pytest.fixture(scope="session", autouse=True)
def versions_once() -> Iterator[None]:
    """Look up the installed packages' versions and the commit once: runs record them twice."""
    with pytest.MonkeyPatch.context() as patch:
        look_up_once(patch)
        yield


def look_up_once(patch: pytest.MonkeyPatch) -> None:
    """Let all runs of this process find the same versions and the same commit."""
    for name in ("versions", "commit"):
        patch.setattr(provenance, name, functools.cache(getattr(provenance, name)))


@pytest.fixture(scope="session", autouse=True)
def library_read_once() -> Iterator[None]:
    """Read and tokenize the standard library's source once: it is the text of most runs."""
    stream = ByteTokenizer.stream
    tokens_of = functools.cache(lambda texts: stream(ByteTokenizer(), texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "stdlib_documents", functools.cache(batches.stdlib_documents))
        patch.setattr(ByteTokenizer, "stream", lambda self, texts: tokens_of(tuple(texts)))
        yield


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs and searches write blank pictures."""
    leave_blank(monkeypatch)


def leave_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pictures be blank: drawing takes longer than a few steps."""

    def blank(figure: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"\x89PNG")

    for module in (plots, comparison, results):
        monkeypatch.setattr(module, "save_figure", blank)
    for module, name in (
        (plots, "draw_timeline"),
        (comparison, "draw_comparison"),
        (picture, "draw_tuning"),
        (results, "draw_found"),
        (results, "draw_importance"),
    ):
        monkeypatch.setattr(module, name, lambda *_: None)


@dataclass
class Clock:
    """What ``--auto`` is replaced by."""

    controllers: list[ByTheClock] = field(default_factory=list)
    stop_after: int | None = None
    """Step after which Ctrl-C comes."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let ``--auto`` be tuned by the clock."""
    made = Clock()
    made.controllers = decide_by(monkeypatch, lambda: ByTheClock(made.stop_after))
    return made
