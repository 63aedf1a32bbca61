"""Fixtures of tuned runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from autotune.online.logged_controller import LoggedController
from experiments.training.tuned import run as auto
from tests.experiments.tuned import ByTheClock


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

    def make(setup: Any, log: Any) -> LoggedController:
        del setup
        made.controllers.append(ByTheClock(made.stop_after))
        return LoggedController(
            made.controllers[-1], log, by="twin", reason=lambda: "the clock said so"
        )

    monkeypatch.setattr(auto, "make_controller", make)
    return made
