"""Controllers in the place of the tuner's, which decide by the clock or by their own count."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autotune.online.logged_controller import LoggedController
from autotune.online.tuner import Tuner
from zenflow.controller import AbstractController
from zenflow.knobs import Knobs
from zenflow.report import StepReport


class ByTheClock(AbstractController):
    """Changes something at every odd step, by the time of day and what it remembers."""

    measures_windows = True
    curve_interval = 3
    largest_interval = 8
    least_topk_ratio = 0.05

    def __init__(self, stop_after: int | None = None) -> None:
        self.turns = 0
        self.stop_after = stop_after

    def next_knobs(self, step: int, report: StepReport | None, knobs: Knobs) -> Knobs:
        if step == self.stop_after:
            signal.raise_signal(signal.SIGINT)
        if step % 2 == 0:
            return knobs
        self.turns += 1
        tick = time.perf_counter_ns() // 64
        changes: list[dict[str, Any]] = [
            {"update_interval": 1 + tick % 8},
            {"topk_ratio": 0.05 + tick % 8 / 32},
            {"select_interval": 2 + tick % 5},
            {"update_interval": 1 + (knobs.update_interval + tick % 3) % 8},
        ]
        return replace(knobs, **changes[self.turns % len(changes)])

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns}

    def load_state_dict(self, state: Any) -> None:
        self.turns = state["turns"]


class Rehearsed(ByTheClock):
    """Decides as often as the clock's controller, by its own count alone."""

    def next_knobs(self, step: int, report: StepReport | None, knobs: Knobs) -> Knobs:
        super().next_knobs(step, report, knobs)
        if step % 2 == 0:
            return knobs
        changes: list[dict[str, Any]] = [
            {"update_interval": 1 + 3 * self.turns % 8},
            {"topk_ratio": 0.05 + self.turns % 8 / 32},
        ]
        return replace(knobs, **changes[self.turns % 2])


def decide_by(patch: pytest.MonkeyPatch, kind: Callable[[], ByTheClock]) -> list[ByTheClock]:
    """Let every tuner take its controllers from this function; return those that were made."""
    made: list[ByTheClock] = []

    def make(tuner: Tuner, run: Any, log: Any) -> LoggedController:
        del tuner, run
        made.append(kind())
        return LoggedController(made[-1], log, by="twin", reason=lambda: "the clock said so")

    patch.setattr(Tuner, "make_controller", make)
    return made
