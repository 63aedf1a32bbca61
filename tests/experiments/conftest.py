"""Fixtures of tuned runs and of studies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from autotune.online.logged_controller import LoggedController
from experiments.studies import accuracy
from experiments.studies.staleness import study as staleness
from experiments.studies.update_rule import study as update_rule
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


@pytest.fixture
def short_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let accuracy studies read two held-out batches a run, and take each regime's first rate."""
    regimes, pretraining = accuracy.regimes, accuracy.PRETRAINING

    def short(*arguments: Any) -> list[accuracy.Regime]:
        return [
            replace(
                regime,
                rates=regime.rates[:1],
                settings=replace(regime.settings, eval_batches=2),
            )
            for regime in regimes(*arguments)
        ]

    for module in (accuracy, staleness, update_rule):
        monkeypatch.setattr(module, "PRETRAINING", replace(pretraining, eval_batches=2))
        monkeypatch.setattr(module, "regimes", short)
