"""A controller that decides by the clock, so that only a run's file can repeat the run."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import Any

from zenflow.controller import AbstractController
from zenflow.knobs import Knobs
from zenflow.report import StepReport


class ByTheClock(AbstractController):
    """Changes something at every odd step, by the time of day and what it remembers."""

    measures_windows = True
    curve_interval = 3
    largest_interval = 8
    least_topk_ratio = 0.05

    def __init__(self, stop_after: int | None) -> None:
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
