"""Fixtures of tuned runs."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.logged_controller import LoggedController
from experiments import auto
from tests.experiments.tuned import ByTheClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[ByTheClock]:
    """Let ``--auto`` be tuned by the clock; return the controllers that were made."""
    made: list[ByTheClock] = []

    def make(bench: Any, log: Any) -> LoggedController:
        del bench
        made.append(ByTheClock())
        return LoggedController(made[-1], log, by="twin")

    monkeypatch.setattr(auto, "make_controller", make)
    return made
