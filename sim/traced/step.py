"""A step of the user's own training, from a trace: times of its passes, model and batch."""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from sim.traced.events import Event, KinetoTrace, read_events
from sim.traced.passes import PassTimes, pass_times
from sim.traced.windows import OPTIMIZER, SEQUENCE, Part, Window, covers, windows_of
from sim.traced.work import blocked_calls, device_of, work_of
from zenflow.errors import ConfigError

_GRADIENT = "torch::autograd::AccumulateGrad"
_EMBEDDING = "aten::embedding"
_DTYPES = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
"""Types as the profiler spells them."""
_ADAMW = frozenset({"adam", "adamw", "fusedadam", "fusedadamw", "zenflowadamw"})
"""Classes whose step takes as long as AdamW's, in small letters."""
_OFFLOADED = 0.5
"""Bytes that a step copies for each parameter above which it counts as offloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """Mean times of one step without offloading, in seconds of one device."""

    path: str
    """Trace file that the times come from."""
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
    num_tensors: int = 0
    """Number of tensors that one backward has gradients for."""
    batches: tuple[tuple[int, int], ...] = ()
    """Sequences and tokens of each measured micro-batch; empty where the trace has no shapes."""
    batch_size: int | None = None
    """Usual number of sequences of a micro-batch; None where the trace has no shapes."""
    sequence: int | None = None
    """Mean number of tokens of so many sequences; None where the trace has no shapes."""
    dtype: str | None = None
    """Type of parameters; None where the trace has no shapes."""
    copied_bytes: float = 0.0
    """Bytes that a step copies between host and device."""
    optimizers: tuple[str, ...] = ()
    """Classes of the optimizers that made the step, as the profiler names them."""
    evaluations: int = 0
    """Number of steps that are left out, as they have a forward more than others."""

    @property
    def is_adamw(self) -> bool:
        """Whether the optimizer's step is AdamW's, or like it; the benefit of the doubt too."""
        return all(name.casefold() in _ADAMW for name in self.optimizers)

    @property
    def extremes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Smallest and largest measured micro-batch: sequences, and tokens of each."""
        return min(self.batches, key=math.prod), max(self.batches, key=math.prod)

    @property
    def rounding(self) -> float:
        """Tokens of ``batch_size`` sequences of ``sequence`` over the mean of what was traced."""
        if not self.batches or self.batch_size is None or self.sequence is None:
            return 1.0
        return self.batch_size * self.sequence / fmean(map(math.prod, self.batches))

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        micro_batch = self.forward.wall + self.backward.wall
        return self.micro_batches * micro_batch + self.optimizer.wall + self.rest

    def of_batch(self, batch_size: int, sequence: int) -> TracedStep:
        """Return the step as one of micro-batches of this size.

        Raises:
            ConfigError: The trace's shapes say otherwise.
        """
        if self.batches and len(set(self.batches)) > 1:
            least, most = (f"{b} x {t}" for b, t in self.extremes)
            raise ConfigError(
                f"{self.path} is of micro-batches from {least} to {most}, by its shapes: leave "
                "--traced-batch out"
            )
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

    def check(self, model: str, num_params: int, num_tensors: int | None = None) -> None:
        """Refuse a trace of another model, or of a run with offloading.

        Args:
            model: Name of the model.
            num_params: Number of its parameters.
            num_tensors: Number of its tensors, by which a trace without shapes is told; None
                where that depends on how it is written.

        Raises:
            ConfigError: It is one.
        """
        own = self.num_params
        if own is not None and not math.isclose(own, num_params, rel_tol=0.01):
            raise ConfigError(
                f"{self.path} trains {own:,} parameters and {model} has {num_params:,}: trace "
                "full fine-tuning of the model that --model names"
            )
        if own is None and num_tensors is not None and self.num_tensors not in (0, num_tensors):
            raise ConfigError(
                f"{self.path} has gradients of {self.num_tensors} tensors and {model} has "
                f"{num_tensors}, so it is of another model, or of one that is written otherwise: "
                "trace full fine-tuning of the model that --model names, with record_shapes=True"
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
    kept = _without_evaluation(trace.events, windows)
    measured = [(window, times) for window, times in found if window.step in kept]
    steps = len(kept)
    counts = Counter(window.step for window, _ in measured if window.part == "backward")
    if len(set(counts.values())) != 1:
        raise ConfigError(
            f"{trace.path}: steps differ in their micro-batches ({sorted(set(counts.values()))}): "
            "call the profiler's step() once for each of the optimizer's"
        )
    sums = _sums(measured)
    micro_batches = counts[kept[0]]
    spans = [(window.start, window.end) for window, _ in measured]
    copied = sum(piece.num_bytes for piece in work if covers(spans, piece.launched))
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
        optimizers=_optimizers(trace.events, measured),
        evaluations=windows[-1].step - steps,
    )


def _without_evaluation(events: Iterable[Event], windows: Sequence[Window]) -> list[int]:
    """Return the steps that count: those with the fewest forwards that keep no gradients.

    A teacher's forward is in every step; an evaluation is in some, and no part of training. The
    first step never counts.
    """
    starts = [window.start for window in windows]
    found = dict.fromkeys(range(1, windows[-1].step + 1), 0)
    for event in events:
        if event.name == _EMBEDDING and SEQUENCE not in event.arguments:
            index = bisect.bisect_right(starts, event.start) - 1
            if windows[index].step in found and event.start < windows[index].end:
                found[windows[index].step] += 1
    least = min(found.values())
    return [step for step, count in found.items() if count == least]


def _optimizers(
    events: Iterable[Event], measured: Sequence[tuple[Window, PassTimes]]
) -> tuple[str, ...]:
    spans = [(window.start, window.end) for window, _ in measured if window.part == "optimizer"]
    names = {
        event.name.removeprefix(OPTIMIZER).removesuffix(".step")
        for event in events
        if event.name.startswith(OPTIMIZER) and covers(spans, event.start)
    }
    return tuple(sorted(names))


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
    """Return the facts that shapes tell: parameters and type, sequences and tokens.

    Gradients are accumulated once for each parameter in each backward; the largest look-up of
    embeddings in a forward is that of tokens.
    """
    found: dict[str, Any] = {}
    first = next(window for window in windows if window.part == "backward")
    gradients = [
        event for event in trace.events
        if event.name == _GRADIENT and _within(event, [first], "backward")
    ]  # fmt: skip
    found["num_tensors"] = len(gradients)
    if gradients and all(_dims(event) for event in gradients):
        found["num_params"] = sum(math.prod(_dims(event)[0]) for event in gradients)
        types = Counter(str(event.arguments.get("Input type", [""])[0]) for event in gradients)
        found["dtype"] = _DTYPES.get(types.most_common(1)[0][0])
    lookups = [e for e in trace.events if e.name == _EMBEDDING and len(_dims(e)) > 1]
    batches = []
    for window in windows:
        shapes = (tuple(_dims(e)[1]) for e in lookups if _within(e, [window], "forward"))
        if own := [shape for shape in shapes if len(shape) == 2]:
            batches.append(max(own, key=math.prod))
    if batches:
        usual = Counter(sequences for sequences, _ in batches).most_common(1)[0][0]
        found["batches"], found["batch_size"] = tuple(batches), usual
        found["sequence"] = max(1, round(fmean(map(math.prod, batches)) / usual))
    return found


def _dims(event: Event) -> Sequence[Sequence[int]]:
    found: Sequence[Sequence[int]] = event.arguments.get("Input Dims") or ()
    return found
