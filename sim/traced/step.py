"""A step of the user's own training, from a trace: the times of its passes, and what it was of."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sim.traced.events import Event, KinetoTrace, read_events
from sim.traced.passes import PassTimes, pass_times
from sim.traced.windows import Part, Window, windows_of
from sim.traced.work import blocked_calls, device_of, work_of
from zenflow.errors import ConfigError

_GRADIENT = "torch::autograd::AccumulateGrad"
_EMBEDDING = "aten::embedding"
_DTYPES = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
"""Types as the profiler spells them."""
_OFFLOADED = 0.5
"""Bytes that a step copies for each parameter from which on it counts as offloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """Mean times of one step without offloading, in seconds of one device."""

    path: str
    """File that they come from."""
    device: str | None
    """The GPU as torch reports it; None is a CPU."""
    steps: int
    """Number of steps that were measured."""
    micro_batches: int
    """Number of micro-batches of a step."""
    forward: PassTimes
    """Times of one micro-batch's forward, with its loss."""
    backward: PassTimes
    """Times of one micro-batch's backward, with what it recomputes."""
    optimizer: PassTimes
    """Times of the optimizer's step."""
    rest: float
    """Seconds of a step in none of these: data, clipping, logging."""
    recomputes: bool = False
    """Whether backward recomputes activations."""
    num_params: int | None = None
    """Number of trained parameters; None where the trace has no shapes."""
    batch_size: int | None = None
    """Number of sequences of a micro-batch; None where the trace has no shapes."""
    sequence: int | None = None
    """Number of tokens of a sequence; None where the trace has no shapes."""
    dtype: str | None = None
    """Type of parameters; None where the trace has no shapes."""
    copied_bytes: float = 0.0
    """Bytes that a step copies between host and device."""

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        micro_batch = self.forward.wall + self.backward.wall
        return self.micro_batches * micro_batch + self.optimizer.wall + self.rest

    def of_batch(self, batch_size: int, sequence: int) -> TracedStep:
        """Return the same, of micro-batches of this size.

        Raises:
            ConfigError: The trace's shapes say otherwise.
        """
        for name, own, given in (
            ("sequences", self.batch_size, batch_size),
            ("tokens a sequence", self.sequence, sequence),
        ):
            if own not in (None, given):
                raise ConfigError(
                    f"{self.path} is of {own} {name}, by its shapes, and not of {given}: leave "
                    "--traced-batch out"
                )
        return replace(self, batch_size=batch_size, sequence=sequence)

    def check(self, model: str, num_params: int) -> None:
        """Refuse a trace of another model, or of a run with offloading.

        Raises:
            ConfigError: It is one.
        """
        own = self.num_params
        if own is not None and not math.isclose(own, num_params, rel_tol=0.01):
            raise ConfigError(
                f"{self.path} trains {own:,} parameters and {model} has {num_params:,}: trace "
                "full fine-tuning of the model that --model names"
            )
        if self.copied_bytes > _OFFLOADED * num_params:
            raise ConfigError(
                f"{self.path} copies {self.copied_bytes / 1e9:.2f} GB between host and device in "
                f"a step, so it offloads: trace steps that keep all of {model} on the device; "
                "where it doesn't fit, fewer layers of it and their config.json"
            )


@functools.lru_cache(maxsize=4)  # a sweep asks for it at every point
def read_step(path: str | Path) -> TracedStep:
    """Return the mean step of a trace that torch.profiler exported.

    The first marked step only starts the clock: the device may be behind when it begins.

    Raises:
        ConfigError: The file is no such trace, or of fewer than two steps of training.
    """
    trace = read_events(path)
    windows, work, device = windows_of(trace), work_of(trace), device_of(trace)
    found = list(pass_times(windows, work, blocked_calls(trace), is_cpu=device is None))
    measured = [(window, times) for window, times in found if window.step > 0]
    steps = windows[-1].step
    counts = Counter(window.step for window, _ in measured if window.part == "backward")
    if len(set(counts.values())) != 1:
        raise ConfigError(
            f"{trace.path}: steps differ in their micro-batches ({sorted(set(counts.values()))}): "
            "call the profiler's step() once for each of the optimizer's"
        )
    sums = _sums(measured)
    micro_batches = counts[1]
    begin, end = measured[0][0].start, measured[-1][0].end
    copied = sum(piece.num_bytes for piece in work if begin <= piece.launched < end)
    return TracedStep(
        path=str(path),
        device=device,
        steps=steps,
        micro_batches=micro_batches,
        forward=sums["forward"] * (1 / (steps * micro_batches)),
        backward=sums["backward"] * (1 / (steps * micro_batches)),
        optimizer=sums["optimizer"] * (1 / steps),
        rest=sums["rest"].wall / steps,
        recomputes=_recomputes(trace.events, windows),
        **_shapes(trace, [window for window, _ in measured]),
        copied_bytes=copied / steps,
    )


def _sums(measured: Iterable[tuple[Window, PassTimes]]) -> Mapping[Part, PassTimes]:
    sums: dict[Part, PassTimes] = {
        "forward": PassTimes(), "backward": PassTimes(), "optimizer": PassTimes(),
        "rest": PassTimes(),
    }  # fmt: skip
    for window, times in measured:
        sums[window.part] += times
    return sums


def _within(event: Event, windows: Sequence[Window], part: Part) -> bool:
    return any(w.part == part and w.start <= event.start < w.end for w in windows)


def _recomputes(events: Iterable[Event], windows: Sequence[Window]) -> bool:
    """Whether backward calls what only a forward does: torch's linear layer or embedding."""
    forwards = (e for e in events if e.name in ("aten::linear", _EMBEDDING))
    return any(_within(event, windows, "backward") for event in forwards)


def _shapes(trace: KinetoTrace, windows: Sequence[Window]) -> dict[str, Any]:
    """Return what shapes say: parameters and their type, sequences and tokens of a micro-batch.

    Gradients are accumulated once for each parameter in each backward; the largest look-up of
    embeddings is that of tokens.
    """
    found: dict[str, Any] = {}
    first = next(window for window in windows if window.part == "backward")
    gradients = [
        event for event in trace.events
        if event.name == _GRADIENT and _dims(event) and _within(event, [first], "backward")
    ]  # fmt: skip
    if gradients:
        found["num_params"] = sum(math.prod(_dims(event)[0]) for event in gradients)
        types = Counter(str(event.arguments.get("Input type", [""])[0]) for event in gradients)
        found["dtype"] = _DTYPES.get(types.most_common(1)[0][0])
    tokens = [
        _dims(event)[1] for event in trace.events
        if event.name == _EMBEDDING and len(_dims(event)) > 1
        and _within(event, windows, "forward")
    ]  # fmt: skip
    batches = [shape for shape in tokens if len(shape) == 2]
    if batches:
        found["batch_size"], found["sequence"] = max(batches, key=math.prod)
    return found


def _dims(event: Event) -> Sequence[Sequence[int]]:
    found: Sequence[Sequence[int]] = event.arguments.get("Input Dims") or ()
    return found
