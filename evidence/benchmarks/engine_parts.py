"""Time of the engine's own work: the training thread's, by part, on a CPU device."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from operator import attrgetter
from typing import Any
from unittest import mock

from zenflow import ZenFlowAdamW
from zenflow.step import engine

PARTS = {
    "device.kernels": {"energies": "energies"},
    "fresh": {"apply": "fresh steps", "finish": "fresh steps"},
    "collector": {"take": "important columns", "_send": "queueing copies"},
    "engine": {
        "measure": "norm and scores",
        "move_scores": "norm and scores",
        "update_device": "device AdamW",
    },
    "schedule": {"begin": "host scheduling", "select": "host scheduling"},
    "gate": {"start_uploads": "landing", "take_landings": "landing", "wait": "landing"},
}
"""Parts of the time by the function that takes it, under the engine's member or module."""
REST, COLLECTOR = "rest", "garbage collector"


class Stopwatch:
    """Time of the training thread by part; what a part calls of another is the other's."""

    def __init__(self) -> None:
        parts = [part for functions in PARTS.values() for part in functions.values()]
        self.seconds = dict.fromkeys([*parts, REST, COLLECTOR], 0.0)
        self._running: list[str] = []
        self._since = 0.0
        self._thread = threading.get_ident()

    def _switch(self) -> None:
        now = time.thread_time()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def collects(self, phase: str, _: dict[str, int]) -> None:
        """Count Python's garbage collector as a part of its own; for `gc.callbacks`."""
        if self._running and threading.get_ident() == self._thread:
            self._switch()
            if phase == "start":
                self._running.append(COLLECTOR)
            else:
                self._running.pop()

    def measures(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, its own time counted for the part."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()

        return run


def breakdown(optimizer: ZenFlowAdamW, turn: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return the training thread's mean seconds a step by part, inside the running engine.

    Args:
        optimizer: On a CPU.
        turn: Takes a step with it.
        repeats: How many steps.
    """
    watch = Stopwatch()
    running: Any = optimizer._running
    with ExitStack() as stack:

        def patch(owner: Any, name: str, part: str) -> None:
            timed = watch.measures(part, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, timed))

        for member, functions in PARTS.items():
            owner = engine if member == "engine" else attrgetter(member)(running)
            if owner is None:
                continue  # the published rule takes no fresh steps
            for name, part in functions.items():
                patch(owner, name, part)
        patch(optimizer, "step", REST)
        gc.callbacks.append(watch.collects)
        stack.callback(gc.callbacks.remove, watch.collects)
        for _ in range(repeats):
            turn()
    return {part: seconds / repeats for part, seconds in watch.seconds.items()}
