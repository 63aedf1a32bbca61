"""Fixtures of tuned runs and of studies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.logged_controller import LoggedController
from experiments import (
    accuracy,
    auto,
    compare,
    plots,
    records,
    staleness,
    tune_results,
    update_rule,
)
from experiments.recipes import MODEL_SIZES, TrainSettings
from tests.experiments.tuned import ByTheClock


@pytest.fixture(scope="session", autouse=True)
def versions_once() -> Iterator[None]:
    """Look up the installed packages' versions once: every run records them twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "versions", functools.cache(records.versions))
        yield


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs and searches write blank pictures: drawing takes longer than a few steps."""

    def blank(figure: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"\x89PNG")

    for module in (plots, compare, tune_results):
        monkeypatch.setattr(module, "save_figure", blank)


class InThisProcess(Executor):
    """Stands for a process pool: carries everything out at once, here."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        pass

    def submit(self, task: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(task(*arguments, **more))
        return future


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let studies train in this process: another one takes seconds to load."""
    for module in (accuracy, update_rule):
        monkeypatch.setattr(module, "ProcessPoolExecutor", InThisProcess)


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

    def make(bench: Any, log: Any) -> LoggedController:
        del bench
        made.controllers.append(ByTheClock(made.stop_after))
        return LoggedController(
            made.controllers[-1], log, by="twin", reason=lambda: "the clock said so"
        )

    monkeypatch.setattr(auto, "make_controller", make)
    return made


@pytest.fixture
def short_evaluations(monkeypatch: pytest.MonkeyPatch, blank_pictures: None) -> None:
    """Let accuracy studies train tiny models, two of each regime at its first rate."""
    regimes = accuracy.regimes

    def tiny(settings: TrainSettings) -> TrainSettings:
        model = "tiny" if settings.model in MODEL_SIZES else settings.model
        return replace(settings, model=model, batch_size=2, sequence=32, eval_batches=2)

    def short(*arguments: Any) -> list[accuracy.Regime]:
        return [
            replace(
                regime,
                rates=regime.rates[:1],
                variants=dict(list(regime.variants.items())[:2]),
                settings=tiny(regime.settings),
            )
            for regime in regimes(*arguments)
        ]

    pretraining = tiny(accuracy.PRETRAINING)
    for module in (accuracy, staleness, update_rule):
        monkeypatch.setattr(module, "PRETRAINING", pretraining)
        monkeypatch.setattr(module, "regimes", short)
