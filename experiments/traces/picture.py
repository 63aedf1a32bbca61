"""The picture of two traces on one time axis: every lane twice, A above B."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.output.plots import SPAN_COLOURS, colour_legend, draw_spans
from experiments.traces.compare import Side
from zenflow.trace.timeline import Span, Timeline

MOST_STEPS = 8
"""Steps of a trace that stay legible in one picture."""

_OTHER_COLOURS = ("#b15928", "#17becf", "#e377c2", "#bcbd22", "#999999")
"""Colours of span names that only some traces have; the last is for all that remain."""
_ROW_HEIGHT = 0.8
_LANE_GAP = 0.5
_TINT = "#f3f3f3"
_TITLE_PARTS = 4


def draw_overlay(a: Side, b: Side) -> Figure:
    """Return the lanes of both, each from its own first step's start; red is the device waiting.

    Both show as many steps, ``MOST_STEPS`` at most.
    """
    num_steps = min(a.num_steps, b.num_steps, MOST_STEPS)
    sides = {mark: side.only(list(side.starts)[:num_steps]) for mark, side in (("A", a), ("B", b))}
    lines = {mark: side.window for mark, side in sides.items()}
    spans = [span for line in lines.values() for span in line.spans]
    lanes = Timeline(tuple(spans)).lanes
    colours = _colours(spans)
    figure = Figure(figsize=(13, 1.9 + 0.72 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for mark, side in sides.items():
        rows = _rows(lanes, mark)
        draw_spans(axes, lines[mark], side.start, rows, colours, _ROW_HEIGHT)
        _mark_steps(axes, side, rows)
    _label_rows(axes, lanes)
    axes.set_xlim(0, max(side.end - side.start for side in sides.values()))
    shown = " and ".join(f"{mark}'s {side.steps}" for mark, side in sides.items())
    axes.set_xlabel(f"ms, both from 0: {shown}")
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * 1e3:g}")
    title = "\n".join(_title(mark, side) for mark, side in (("A", a), ("B", b)))
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    colour_legend(figure, colours, "stall (device waits)")
    return figure


def _colours(spans: Iterable[Span]) -> dict[str, str]:
    """Return a colour for every span name, stalls left out; the known names first."""
    names = {span.name for span in spans if not span.is_stall}
    known = {name: colour for name, colour in SPAN_COLOURS.items() if name in names}
    last = len(_OTHER_COLOURS) - 1
    others = sorted(names - known.keys())
    return known | {n: _OTHER_COLOURS[min(index, last)] for index, n in enumerate(others)}


def _rows(lanes: Sequence[str], mark: str) -> dict[str, float]:
    """Return where the middle of each lane's row of this trace lies; downwards from 0."""
    place = 0.0 if mark == "A" else 1.0
    return {lane: index * (2 + _LANE_GAP) + place for index, lane in enumerate(lanes)}


def _mark_steps(axes: Axes, side: Side, rows: Mapping[str, float]) -> None:
    """Draw a line in the trace's own rows where a step starts, and its number at the first."""
    bounds = [*(start - side.start for start in side.starts.values()), side.end - side.start]
    for middle in rows.values():
        axes.vlines(bounds, middle - 0.5, middle + 0.5, color="#222222", linewidth=0.8)
    top = min(rows.values())
    plate = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0, "alpha": 0.8}
    for step, start in zip(side.starts, bounds[:-1], strict=True):
        axes.annotate(
            f"{step}", (start, top), (3, 0), textcoords="offset points", fontsize=7, va="center",
            bbox=plate,
        )  # fmt: skip


def _label_rows(axes: Axes, lanes: Sequence[str]) -> None:
    """Name every row, tint B's, and leave room above and below."""
    places = {mark: _rows(lanes, mark) for mark in "AB"}
    for middle in places["B"].values():
        axes.axhspan(middle - 0.5, middle + 0.5, color=_TINT, zorder=0, linewidth=0)
    ticks = [(places[mark][lane], f"{lane}  {mark}") for lane in lanes for mark in "AB"]
    axes.set_yticks([place for place, _ in ticks], [label for _, label in ticks])
    axes.set_ylim(max(places["B"].values()) + 0.6, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _title(mark: str, side: Side) -> str:
    """Return a trace's source and its mean over all compared steps, drawn or not."""
    trace = side.trace
    of = ", ".join(part for part in (trace.label, trace.facts.model, trace.facts.batch) if part)
    return (
        f"{mark}: {_short(trace.path)} ({of}): {side.step_seconds * 1e3:.2f} ms per step, "
        f"{side.stall_fraction:.1%} of it stalled, mean over {side.averaged}"
    )


def _short(path: str) -> str:
    """Return the end of a path, which tells runs apart and fits into a title."""
    parts = Path(path).parts
    return path if len(parts) <= _TITLE_PARTS else str(Path("...", *parts[-_TITLE_PARTS:]))
