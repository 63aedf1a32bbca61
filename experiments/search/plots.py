"""Pictures of a study: which knobs matter, and what was found."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autotune.offline.objective import OBJECTIVES
from autotune.offline.result import Candidate, TuneResult
from experiments.output.plots import STALL_COLOUR, STRATEGY_COLOURS

_FOUND = STRATEGY_COLOURS["zenflow"]
_DEFAULT = STRATEGY_COLOURS["zero_offload"]
_OTHERS = "#bbbbbb"


def draw_importance(result: TuneResult) -> Figure:
    """Return a bar for each knob and objective: how much of what makes settings good it is."""
    shares = result.importance
    figure = Figure(figsize=(4.2 * max(1, len(shares)), 3.2), layout="constrained")
    panels = figure.subplots(1, max(1, len(shares)), squeeze=False)[0]
    for axes, (objective, own) in zip(panels, shares.items(), strict=False):
        ordered = sorted(own.items(), key=lambda item: item[1])
        axes.barh([name for name, _ in ordered], [share for _, share in ordered], color=_FOUND)
        axes.set_xlabel("importance (PED-ANOVA)")
        axes.set_title(objective, loc="left", fontsize=10)
    if not shares:
        panels[0].set_axis_off()
        panels[0].text(0, 0.5, "too few settings were measured to say which knob matters")
    figure.suptitle(_title(result), fontsize=11)
    return figure


def draw_found(result: TuneResult) -> Figure:
    """Return the Pareto front; with one objective its values over trials and over each knob."""
    if len(result.task.objectives) > 1:
        return _draw_front(result)
    (name,) = result.task.objectives
    knobs = list(result.task.space.values)
    figure = Figure(figsize=(2.6 * (len(knobs) + 2), 3.4), layout="constrained")
    panels = figure.subplots(1, len(knobs) + 1, sharey=True, width_ratios=[2, *[1] * len(knobs)])
    _draw_history(panels[0], result, name)
    for axes, knob in zip(panels[1:], knobs, strict=True):
        _draw_slice(axes, result, knob, name)
    figure.suptitle(_title(result), fontsize=11)
    return figure


def _draw_front(result: TuneResult) -> Figure:
    first, *others = result.task.objectives
    figure = Figure(figsize=(5.2 * len(others), 4.2), layout="constrained")
    for axes, other in zip(figure.subplots(1, len(others), squeeze=False)[0], others, strict=True):
        allowed = [c for c in result.candidates if c.allowed]
        broken = [c for c in result.candidates if not c.allowed]
        _scatter(axes, allowed, first, other, color=_OTHERS, label=result.task.backend.kind, s=14)
        if broken:
            _scatter(
                axes, broken, first, other, color=STALL_COLOUR, marker="x", s=14,
                label="breaks a constraint",
            )  # fmt: skip
        axes.plot(
            [c.values[first] for c in result.best],
            [c.values[other] for c in result.best],
            marker="o", markersize=5, color=_FOUND, label="Pareto front",
            linestyle="-" if len(others) == 1 else "",
        )  # fmt: skip
        if result.default is not None:
            _scatter(
                axes, [result.default], first, other, color=_DEFAULT, marker="D", s=40,
                label="default",
            )  # fmt: skip
        axes.set_xlabel(_named(first))
        axes.set_ylabel(_named(other))
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(_title(result), fontsize=11)
    return figure


def _scatter(axes: Axes, found: Sequence[Candidate], x: str, y: str, **style: object) -> None:
    axes.scatter([c.values[x] for c in found], [c.values[y] for c in found], **style)  # type: ignore[arg-type]


def _draw_history(axes: Axes, result: TuneResult, name: str) -> None:
    better = max if OBJECTIVES[name].is_maximised else min
    found = [c for c in result.candidates if c.allowed]
    best: list[float] = []
    for candidate in found:
        value = candidate.values[name]
        best.append(better(best[-1], value) if best else value)
    numbers = [candidate.number for candidate in found]
    values = [candidate.values[name] for candidate in found]
    axes.scatter(numbers, values, color=_OTHERS, s=12, label=result.task.backend.kind)
    axes.step(numbers, best, where="post", color=_FOUND, label="best so far")
    if result.default is not None:
        axes.axhline(result.default.values[name], color=_DEFAULT, linestyle="--", label="default")
    axes.set_xlabel("trial")
    axes.set_ylabel(_named(name))
    axes.legend(fontsize=8)


def _draw_slice(axes: Axes, result: TuneResult, knob: str, name: str) -> None:
    ordered = list(result.task.space.values[knob])
    found = [c for c in result.candidates if c.allowed]
    axes.scatter(
        [ordered.index(getattr(c.knobs, knob)) for c in found],
        [c.values[name] for c in found],
        color=_OTHERS, s=12,
    )  # fmt: skip
    for candidate in result.best:
        axes.scatter(
            [ordered.index(getattr(candidate.knobs, knob))], [candidate.values[name]],
            color=_FOUND, s=30, zorder=3,
        )  # fmt: skip
    axes.set_xticks(range(len(ordered)), list(map(str, ordered)), rotation=60)
    axes.set_xlabel(knob)


def _named(name: str) -> str:
    return f"{name} ({OBJECTIVES[name].unit})"


def _title(result: TuneResult) -> str:
    return (
        f"study {result.task.study_name}: {len(result.candidates)} settings, "
        f"{result.task.backend.kind}, sampler {result.task.sampler}"
    )
