"""A trace as a chart: a lane of bars for each place where work ran, with waits over the work."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh import models
from bokeh.plotting import figure

from experiments.output.plots import SPAN_COLOURS, STALL_COLOUR
from experiments.report.charts import GREY, new_chart
from experiments.report.decimation import DrawnTrace
from experiments.report.trace_view import Bar, TraceView
from experiments.report.units import TIMES, plural, scale_of, size

LEGEND = {**SPAN_COLOURS, "stall: the device waits": STALL_COLOUR}
_OTHER_COLOURS = (
    "#7aa6c2", "#c2a878", "#8fb98b", "#b596c4", "#c98f8f", "#86b8b1", "#a9a9c9", "#b5b58a",
)  # fmt: skip
_ONE_ROW, _ROW, _GAP = 28, 15, 7
"""Pixels: a lane of one row, a row of another lane, and between lanes."""
_PALEST = 0.25
_MOST_STEPS = 400
"""Largest number of steps whose numbers are on the axis; a longer trace shows every n-th."""
_NARROWEST = 1e-8
"""Seconds from edge to edge, when zoomed in."""


def timeline_chart(name: str, view: TraceView, drawn: DrawnTrace) -> figure:
    """Return the lanes of a trace, over time in the unit of ``time_unit``."""
    factor, unit = time_unit(view)
    heights = [_height(bars) for bars in drawn.lanes]
    tops = np.cumsum([0, *(height + _GAP for height in heights)])
    limit = max(view.seconds, _NARROWEST) / factor
    chart = new_chart(
        name, height=None, frame_height=int(tops[-1]), tools="xpan,xbox_zoom,reset,save",
        x_range=models.Range1d(0, limit, bounds=(0, limit), min_interval=_NARROWEST / factor),
        y_range=models.Range1d(int(tops[-1]), 0, bounds="auto"), x_axis_label=unit,
        toolbar_location="above",
    )  # fmt: skip
    for lane, bars, top, height in zip(view.lanes, drawn.lanes, tops, heights, strict=False):
        middle = float(top) + height / 2
        chart.hspan(y=[middle], line_color=GREY, line_alpha=0.12, line_width=height)
        # Waits lie inside forward and step spans, so they are drawn over them.
        for is_stall in (False, True):
            shown = [bar for bar in bars if bar.is_stall == is_stall]
            if shown:
                _draw(chart, lane.name, shown, float(top), height, factor)
    wheel = models.WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
    buttons = [tool(dimensions="width") for tool in (models.ZoomInTool, models.ZoomOutTool)]
    chart.add_tools(wheel, *buttons)
    chart.toolbar.active_scroll, chart.toolbar.autohide = wheel, False
    middles = [float(top) + height / 2 for top, height in zip(tops, heights, strict=False)]
    chart.yaxis.ticker = models.FixedTicker(ticks=middles)
    chart.yaxis.major_label_overrides = {
        middle: models.PlainText(text=lane.name)
        for middle, lane in zip(middles, view.lanes, strict=True)
    }
    chart.grid.visible = False
    _add_steps(chart, view, factor)
    return chart


def time_unit(view: TraceView) -> tuple[float, str]:
    """Return seconds and name of the unit in which a trace's length has few digits."""
    return scale_of(view.seconds / 2, TIMES)


def _height(bars: Sequence[Bar]) -> int:
    rows = max((bar.row for bar in bars), default=0) + 1
    return _ONE_ROW if rows == 1 else rows * _ROW


def _draw(chart: figure, lane: str, bars: Sequence[Bar], top: float, height: int,
          factor: float) -> None:  # fmt: skip
    """Draw bars of one lane; a merged one is paler where the lane was idle between its spans."""
    tall = height if height == _ONE_ROW else _ROW
    columns: dict[str, Any] = {
        "start": np.array([bar.start for bar in bars]) / factor,
        "end": np.array([bar.end for bar in bars]) / factor,
        "busy": np.array([bar.busy_seconds for bar in bars], np.float32) / np.float32(factor),
        "middle": np.array([top + tall * (bar.row + 0.5) for bar in bars], np.float32),
        "colour": np.array([_colour(bar) for bar in bars], np.uint8),
        "step": np.array([bar.step for bar in bars], np.int32),
        "name": [_title(bar) for bar in bars],
    }
    unit = next(unit for scale, unit in TIMES if scale == factor)
    tips = [("span", "@name"), ("lane", "$name"), ("step", "@step"),
            ("start", f"@start{{%.9g {unit}}}"), ("busy", f"@busy{{%.4g {unit}}}")]  # fmt: skip
    if any(bar.num_bytes for bar in bars):
        columns["moved"] = [_moved(bar) for bar in bars]
        tips.append(("moved", "@moved"))
    drawn = chart.hbar(
        source=columns, y="middle", left="start", right="end", height=tall - 1, name=lane,
        # Without an outline, bars that touch would have a pale seam.
        fill_color="colour", line_color="colour", line_width=0.5,
    )  # fmt: skip
    chart.add_tools(
        models.HoverTool(
            renderers=[drawn], tooltips=tips, visible=False,
            attachment="left" if bars[0].is_stall else "right",
            formatters={"@start": "printf", "@busy": "printf"},
        )
    )  # fmt: skip


def span_colour(name: str, is_stall: bool) -> str:
    """Return a span's colour: red is the device waiting, whatever the trace."""
    if is_stall:
        return STALL_COLOUR
    kind = "grads" if "DtoH" in name else "params" if "HtoD" in name else name
    other = _OTHER_COLOURS[zlib.crc32(name.encode()) % len(_OTHER_COLOURS)]
    return SPAN_COLOURS.get(kind, other)


def _colour(bar: Bar) -> list[int]:
    colour, seconds = span_colour(bar.name, bar.is_stall), bar.end - bar.start
    full = bar.busy_seconds / seconds if bar.count > 1 and seconds else 1.0
    return [*bytes.fromhex(colour[1:]), round(255 * min(1.0, max(_PALEST, full)))]


def _title(bar: Bar) -> str:
    if bar.count == 1:
        return bar.name
    return f"{plural(bar.count, 'short span')}, mostly {bar.name}, merged"


def _moved(bar: Bar) -> str:
    pace = f", {size(bar.num_bytes / bar.busy_seconds)}/s" if bar.busy_seconds else ""
    return size(bar.num_bytes, 4) + pace


def _add_steps(chart: figure, view: TraceView, factor: float) -> None:
    """Number the steps above the lanes, with a line at the start of each."""
    every = 1 + len(view.step_starts) // _MOST_STEPS
    starts = {start / factor: step for step, start in list(view.step_starts.items())[::every]}
    if starts:
        ticker = models.FixedTicker(ticks=list(starts))
        axis = models.LinearAxis(
            ticker=ticker, major_label_policy=models.NoOverlap(min_distance=8),
            major_label_overrides={at: str(step) for at, step in starts.items()},
            major_tick_line_color=None, minor_tick_line_color=None,
        )  # fmt: skip
        chart.add_layout(axis, "above")
        chart.add_layout(
            models.Grid(dimension=0, ticker=ticker, level="overlay", grid_line_alpha=0.5)
        )
