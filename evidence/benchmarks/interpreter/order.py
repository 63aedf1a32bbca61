"""Order of a step's Python and launches on the training thread, as a trace for Perfetto.

    TRITON_INTERPRET=1 python -m evidence.benchmarks.interpreter.order --out FILE

A GPU has large kernels to run when backward ends, and small ones behind them. Python that launches
nothing costs no time before these, and may leave the GPU without work behind them. The trace has
two lanes on the host's clock: the engine's Python by what it does, and runs of launches by part of
the pass. The GPU is played by the CPU (`played_gpu`), and counting makes everything slower: the
order is right, and lengths are not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from evidence.benchmarks.gpu.device_pass import IMPLEMENTATIONS
from evidence.benchmarks.interpreter import decoder_1b, turns
from evidence.benchmarks.interpreter.lock_holders import BARE
from evidence.benchmarks.interpreter.played_gpu import played_gpu
from evidence.benchmarks.pass_counts import MODES, Launches, is_lane
from zenflow import Span, Timeline
from zenflow.device.kernels.triton_kernels import TritonKernels

PYTHON = {
    ("zenflow.step.gradients.collector", "take"): "gradients come in",
    ("zenflow.step.host.schedule", "begin"): "host scheduling",
    ("zenflow.step.uploads", "take_landings"): "landings",
    ("zenflow.step.reporter", "note"): "report",
}
"""Parts of the engine's Python, by module and function."""
SCHEDULING = "host scheduling"
_WARM = 2 * decoder_1b.INTERVAL


@dataclass(frozen=True, slots=True)
class Moment:
    """Begin or end of a part of Python, or a launch, on the training thread."""

    seconds: float
    """Time on the host's clock."""
    calls: int
    """Number of calls of the engine's functions in the step before it."""
    name: str
    """Name of the part of Python, or of the pass."""
    kind: str
    """One of "call", "return" and "launch"."""


class Order(Launches):
    """Moments of one step's training thread, in order."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.moments: list[Moment] = []
        self.calls = 0
        """Number of calls of the engine's functions in the step."""

    def _note(self, name: str, kind: str) -> None:
        self.moments.append(Moment(time.perf_counter(), self.calls, name, kind))

    def add(self, func: Any = None, args: Sequence[Any] = (), *_: Any) -> None:
        """Note a launch of the training thread."""
        super().add(func, args)
        if self.is_on and not is_lane():
            self._note(self.part, "launch")

    @contextmanager
    def section(self, kind: int) -> Iterator[None]:
        """Note what happens in a section that counts."""
        if kind == BARE or not self.is_on:
            yield
            return
        with super().section(kind):
            sys.setprofile(self._profile)
            try:
                yield
            finally:
                sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        module = frame.f_globals.get("__name__", "")
        if module.startswith("zenflow."):
            self.calls += event == "call"
            name = PYTHON.get((module, frame.f_code.co_name))
            if name is not None:
                self._note(name, event)


def order_of(mode: str, kernels: str) -> Order:
    """Return the order of one step of a 1B decoder."""
    found = Order()
    with played_gpu(), decoder_1b.shrunk_limits(), turns.idle_kernel(), found.counting():
        contender = turns.Contender(mode, host_threads=1, kernels=kernels)
        try:
            for _ in range(_WARM):
                contender.step(found)
            turns.settle()
            found.is_on = True
            contender.step(found)
            found.is_on = False
        finally:
            contender.optimizer.close()
    return found


def timeline_of(order: Order, step: int = _WARM + 1) -> Timeline:
    """Return the moments as spans: Python, and launches of one part that follow one another."""
    spans: list[Span] = []
    open_at: dict[str, float] = {}
    run: list[Moment] = []

    def end_run() -> None:
        if run:
            spans.append(Span("launches", run[0].name, run[0].seconds, run[-1].seconds, step))
            run.clear()

    for moment in order.moments:
        if moment.kind != "launch" or (run and run[-1].name != moment.name):
            end_run()
        if moment.kind == "launch":
            run.append(moment)
        elif moment.kind == "call":
            open_at[moment.name] = moment.seconds
        else:
            start = open_at.pop(moment.name)
            spans.append(Span("python", moment.name, start, moment.seconds, step))
    end_run()
    return Timeline(tuple(spans), {"source": "measured", "device": "a GPU, played by the CPU"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Take a step, and write its trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, default=turns.KEEP)
    parser.add_argument("--kernels", choices=IMPLEMENTATIONS, default="torch")
    parser.add_argument("--out", type=Path, required=True, help="file for the trace")
    options = parser.parse_args(arguments)
    if not TritonKernels.is_interpreted():
        parser.error("Triton's kernels are counted under its interpreter: set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    found = order_of(options.mode, options.kernels)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    timeline_of(found).write(options.out)
    last = max(index for index, own in enumerate(found.moments) if own.kind == "launch")
    behind = found.calls - found.moments[last].calls
    print(
        f"{found.calls} calls of the engine's functions, {behind} of them behind the last launch"
    )


if __name__ == "__main__":
    main()
