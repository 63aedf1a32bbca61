"""tuning.png: what a tuned run chose, step by step, and how well it had foreseen the outcome.

``tuning_series`` computes, ``draw_tuning`` draws; both know the decisions file and steps.jsonl
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autotune.decisions.file import DECISIONS, DecisionFile, read_decisions
from experiments.output.plots import SPAN_COLOURS, STALL_COLOUR, STRATEGY_COLOURS
from experiments.training.parts.files.step_log import read_steps
from zenflow.knobs import Knobs

_BINS = 120
"""Points of the stalled share, at most: a single step's says little."""
_DECIDER_STYLES: Mapping[str, str] = {"twin": "-", "zen-auto": ":"}
_FAINT = "#999999"
_FAR_OFF = 0.5
"""Relative error from which on a prediction has nothing to do with what is measured."""
_LONG = 100
"""Steps of such predictions in a row that a person should hear of."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps at the same knobs over which step time was measured."""

    first: int
    last: int
    step_seconds: float
    predicted_step_seconds: float | None

    @property
    def error(self) -> float | None:
        """Prediction over measurement, less one; None without a prediction."""
        if self.predicted_step_seconds is None or not self.step_seconds > 0:
            return None
        return self.predicted_step_seconds / self.step_seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSeries:
    """Content of the picture, by step; steps that the loss scale skipped are not counted."""

    knobs: Sequence[tuple[int, Knobs]]
    """Pairs (first step, knobs in force from it on), the start first."""
    decisions: Sequence[tuple[int, str]]
    """Pairs (step, by whom)."""
    seconds: Sequence[float]
    """Seconds of each step."""
    stretches: Sequence[Stretch]
    stalled: Sequence[tuple[float, float]]
    """Pairs (middle step, stalled share) of about ``_BINS`` bins."""


def read_tuning(folder: Path) -> TuningSeries:
    """Return the series of the finished run in a directory.

    Raises:
        ConfigError: Its decisions file is damaged.
    """
    return tuning_series(read_decisions(folder / DECISIONS), read_steps(folder / "steps.jsonl"))


def tuning_series(found: DecisionFile, rows: Sequence[Mapping[str, Any]]) -> TuningSeries:
    """Return the content of the picture.

    Args:
        found: The decisions file.
        rows: The lines of steps.jsonl.
    """
    taken = [row for row in rows if not row.get("skipped")]
    seconds = [float(row["seconds"]) for row in taken]
    knobs = [(1, found.header.knobs), *((step + 1, new) for step, new in found.changes)]
    return TuningSeries(
        knobs=knobs,
        decisions=[(decision.step, decision.by) for decision in found.decisions],
        seconds=seconds,
        stretches=_windows(found) or _between(knobs, seconds),
        stalled=_stalled(taken),
    )


def missed_predictions(series: TuningSeries) -> str | None:
    """Return in words where predictions were far off for long; None where they never were.

    That is the longest row of stretches which were all mispredicted.
    """
    rows: list[list[Stretch]] = [[]]
    for stretch in series.stretches:
        if stretch.error is not None and abs(stretch.error) > _FAR_OFF:
            rows[-1].append(stretch)
        elif stretch.error is not None:
            rows.append([])
    longest = max(rows, key=lambda row: row[-1].last - row[0].first if row else -1)
    if not longest or longest[-1].last - longest[0].first + 1 < _LONG:
        return None
    measured = [stretch.step_seconds * 1e3 for stretch in longest]
    told = [(stretch.predicted_step_seconds or 0.0) * 1e3 for stretch in longest]
    return (
        f"The tuner's predictions were far off from step {longest[0].first} to "
        f"{longest[-1].last}: {_span(told)} ms a step predicted, {_span(measured)} measured; see "
        "tuning.png. The machine's pace had changed, or the time that searching may take was "
        "used up: what was chosen there may not be the best. A longer run searches again."
    )


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"


def _windows(found: DecisionFile) -> list[Stretch]:
    """Return the controller's own windows; each begins behind the one before, or a decision."""
    stretches = []
    before = 0
    for window in found.windows:
        changed = [step for step, _ in found.changes if step < window.step]
        first = max([before, *changed[-1:]]) + 1
        measured, predicted = window.step_seconds, window.predicted_step_seconds
        stretches.append(Stretch(first, window.step, measured, predicted))
        before = window.step
    return stretches


def _between(knobs: Sequence[tuple[int, Knobs]], seconds: Sequence[float]) -> list[Stretch]:
    """Return the stretches between decisions, of a controller that measures nothing itself."""
    firsts = [first for first, _ in knobs if first <= len(seconds)]
    return [
        Stretch(first, behind - 1, fmean(seconds[first - 1 : behind - 1]), None)
        for first, behind in pairwise([*firsts, len(seconds) + 1])
    ]


def _stalled(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    size = max(1, -(-len(rows) // _BINS))
    bins = [rows[start : start + size] for start in range(0, len(rows), size)]
    points = []
    for index, part in enumerate(bins):
        total = sum(row["seconds"] for row in part)
        share = sum(row["stall_seconds"] for row in part) / total if total else 0.0
        points.append((index * size + (len(part) + 1) / 2, share))
    return points


def draw_tuning(series: TuningSeries) -> Figure:
    """Return the picture: S, k, step time, the prediction's error, stalled share."""
    figure = Figure(figsize=(11, 10), layout="constrained")
    panels = figure.subplots(5, 1, sharex=True, height_ratios=[2, 1.4, 2.4, 1.4, 1.2])
    _draw_windows(panels[0], series)
    _draw_ratio(panels[1], series)
    _draw_seconds(panels[2], series)
    _draw_errors(panels[3], series)
    _draw_stalls(panels[4], series)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        for step, by in series.decisions:
            style = _DECIDER_STYLES.get(by, "-")
            axes.axvline(step + 0.5, color=_FAINT, linewidth=0.7, linestyle=style, zorder=0)
    panels[-1].set_xlabel("step (lines: decisions; dotted: zen-auto's)")
    panels[-1].set_xlim(0.5, max(1, len(series.seconds)) + 0.5)
    count = len(series.decisions)
    figure.suptitle(
        f"{count} decision{'' if count == 1 else 's'} in {len(series.seconds)} steps, at the end "
        f"{series.knobs[-1][1]}",
        fontsize=12,
    )
    return figure


def _draw_windows(axes: Axes, series: TuningSeries) -> None:
    intervals = [knobs.update_interval for _, knobs in series.knobs]
    _draw_held(axes, series, intervals, color=STRATEGY_COLOURS["zenflow"])
    axes.set_ylim(0, max(intervals) * 1.15)
    axes.set_ylabel("S, steps")


def _draw_ratio(axes: Axes, series: TuningSeries) -> None:
    ratios = [knobs.topk_ratio for _, knobs in series.knobs]
    _draw_held(axes, series, ratios, color=SPAN_COLOURS["adam"])
    axes.set_ylim(0, max(ratios) * 1.15 or 1)
    axes.set_ylabel("k")


def _draw_held(axes: Axes, series: TuningSeries, values: Sequence[float], **style: Any) -> None:
    """Draw values that hold from one decision to the next."""
    firsts = [first - 0.5 for first, _ in series.knobs]
    axes.step([*firsts, len(series.seconds) + 0.5], [*values, values[-1]], where="post", **style)


def _draw_seconds(axes: Axes, series: TuningSeries) -> None:
    steps = range(1, len(series.seconds) + 1)
    axes.plot(steps, [1e3 * value for value in series.seconds], ".", color=_FAINT, markersize=2,
              alpha=0.5, label="each step")  # fmt: skip
    measured = [(item, item.step_seconds) for item in series.stretches]
    predicted = [
        (item, item.predicted_step_seconds)
        for item in series.stretches
        if item.predicted_step_seconds is not None
    ]
    _draw_levels(axes, measured, "measured", SPAN_COLOURS["backward"], "-")
    if predicted:
        _draw_levels(axes, predicted, "predicted", SPAN_COLOURS["grads"], "--")
    # A checkpoint or an evaluation makes single steps long: what is compared lies far below them.
    axes.set_ylim(0, 1.6e3 * max((level for _, level in [*measured, *predicted]), default=1.0))
    axes.set_ylabel("step time, ms")
    axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=3)


def _draw_levels(
    axes: Axes,
    levels: Sequence[tuple[Stretch, float]],
    label: str,
    colour: str,
    style: Literal["-", "--", ":"],
) -> None:
    axes.hlines(
        [1e3 * level for _, level in levels],
        [item.first - 0.5 for item, _ in levels],
        [item.last + 0.5 for item, _ in levels],
        colors=colour, linestyles=style, linewidth=2, label=label,
    )  # fmt: skip


def _draw_errors(axes: Axes, series: TuningSeries) -> None:
    errors = [(item.last, 100 * item.error) for item in series.stretches if item.error is not None]
    axes.axhline(0, color=_FAINT, linewidth=0.8)
    if errors:
        steps, values = zip(*errors, strict=True)
        axes.plot(steps, values, marker="o", markersize=3, color=SPAN_COLOURS["grads"])
    else:
        axes.text(0.01, 0.6, "no predictions", transform=axes.transAxes, fontsize=8)
    axes.set_ylabel("prediction's\nerror, %")


def _draw_stalls(axes: Axes, series: TuningSeries) -> None:
    steps, shares = zip(*series.stalled, strict=True) if series.stalled else ((), ())
    axes.fill_between(steps, [100 * share for share in shares], color=STALL_COLOUR, alpha=0.7)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("stalled, %")
