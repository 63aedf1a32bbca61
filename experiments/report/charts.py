"""The page's charts, as Bokeh figures: lines, bars, and heat maps that the page's script fills.

Text from files reaches Bokeh as PlainText or as data: it takes other text for TeX between dollar
signs. Greys that are not named here follow the page's style sheet, in the light and in the dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh import models
from bokeh.plotting import figure

from experiments.report.units import Scales, scale_of

GREY = "#808a99"
"""Colour of what has none of its own, on white and on black."""
_SMALL = "12px"
_BAR_PIXELS = 42
_NAME_LETTERS = 34
_STYLES: Mapping[str, Mapping[str, Any]] = {
    "thin": {"line_width": 1, "line_alpha": 0.55},
    "dots": {"line_width": 2},
    "dashed": {"line_width": 2, "line_dash": "dashed"},
    "steps": {"line_width": 2, "mode": "after"},
}


class Line(NamedTuple):
    """A line of a chart."""

    label: str
    """Name in the legend; lines that share one are hidden together."""
    colour: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: str
    """One of "thin", "dots", "dashed", "steps"."""


def new_chart(name: str, **options: Any) -> figure:
    """Return an empty chart as wide as its place on the page."""
    options = {"height": 280, "tools": "pan,box_zoom,reset,save", **options}
    chart = figure(name=name, sizing_mode="stretch_width", **options)
    chart.toolbar.logo, chart.toolbar.autohide = None, True
    for axis in chart.axis:
        axis.minor_tick_line_color = axis.major_tick_line_color = None
    return chart


def line_chart(
    name: str, lines: Sequence[Line], *, x: str, y: str, guides: Sequence[float] = (),
    **options: Any,
) -> figure:  # fmt: skip
    """Return lines over one axis, with a dashed line at each guide.

    Args:
        name: Of the chart.
        lines: In the order in which they are drawn.
        x: Title of that axis.
        y: And of the other.
        guides: Places on the x axis.
        options: Of the figure.
    """
    chart = new_chart(name, x_axis_label=x, y_axis_label=y, **options)
    for line in lines:
        at = np.array(line.x, float), np.array(line.y, float)
        words = {"legend_label": _short(line.label), "name": line.label, "color": line.colour}
        draw = chart.step if line.style == "steps" else chart.line
        draw(*at, **words, **_STYLES[line.style])
        if line.style in ("dots", "dashed"):
            chart.scatter(*at, **words, size=6)
    if guides:
        chart.vspan(x=guides, line_color=GREY, line_dash="dashed")
    chart.add_tools(models.HoverTool(tooltips=[("", "$name"), (x, "$snap_x"), (y, "$snap_y")]))
    _legend_above(chart)
    return chart


def bar_chart(
    name: str, rows: Sequence[tuple[str, str, str]],
    parts: Mapping[str, tuple[str, Sequence[float]]], scales: Scales,
) -> figure:  # fmt: skip
    """Return bars of parts, one below the other.

    Args:
        name: Of the chart.
        rows: Name, source and figures in words of each bar.
        parts: Colour and values of each part of the bars.
        scales: Units of the values.
    """
    total = np.sum([values for _, values in parts.values()], axis=0)
    factor, unit = scale_of(max(total), scales)
    chart = new_chart(
        name, height=90 + _BAR_PIXELS * len(rows), tools="save", x_axis_label=unit,
        x_range=models.Range1d(0, 1.4 * max(total) / factor or 1),  # room for the words
        y_range=models.Range1d(len(rows) - 0.4, -0.6),
    )  # fmt: skip
    labels, places = list(parts), list(range(len(rows)))
    names, sources, words = zip(*rows, strict=True)
    source = models.ColumnDataSource(
        {"row": places, "total": total / factor, "name": names, "source": sources, "words": words}
        | {label: np.array(values) / factor for label, (_, values) in parts.items()}
    )
    chart.hbar_stack(
        labels, y="row", height=0.6, source=source, line_color=None, legend_label=labels,
        color=[colour for colour, _ in parts.values()],
    )  # fmt: skip
    chart.text("total", "row", text="words", source=source, x_offset=7, text_baseline="middle",
               text_color=GREY, text_font_size=_SMALL)  # fmt: skip
    shown = [(label, f"@{{{label}}}{{0,0.[000]}} {unit}") for label in labels]
    chart.add_tools(models.HoverTool(tooltips=[("", "@name, @source"), *shown]))
    chart.yaxis.ticker = models.FixedTicker(ticks=places)
    chart.yaxis.major_label_overrides = {
        place: models.PlainText(text=f"{_short(name)}\n{source}")
        for place, (name, source, _) in enumerate(rows)
    }
    chart.ygrid.visible = False
    _legend_above(chart)
    return chart


def heat_chart(name: str) -> figure:
    """Return an empty heat map: the page fills it for the axes that its reader chooses."""
    chart = new_chart(
        name, height=380, tools="save", x_range=models.FactorRange(), y_range=models.FactorRange()
    )
    source = models.ColumnDataSource(
        {key: [] for key in ("x", "y", "value", "count", "text", "ink")}
    )
    mapper = models.LinearColorMapper(palette="Viridis256")
    chart.rect("x", "y", width=0.97, height=0.95, source=source, line_color=None,
               fill_color={"field": "value", "transform": mapper})  # fmt: skip
    chart.text("x", "y", text="text", source=source, text_color="ink", text_align="center",
               text_baseline="middle", text_font_size=_SMALL)  # fmt: skip
    bar = models.ColorBar(
        color_mapper=mapper, background_fill_alpha=0, major_label_text_color=GREY
    )
    chart.add_layout(bar, "right")
    tips = [("across", "@x"), ("up", "@y"), ("value", "@value"), ("rows", "@count")]
    chart.add_tools(models.HoverTool(tooltips=tips))
    chart.grid.visible = False
    chart.axis.major_label_policy = models.NoOverlap(min_distance=4)
    return chart


def around(values: Sequence[float], room: float = 0.06) -> models.Range1d:
    """Return the range of an axis that shows all values."""
    seen = [value for value in values if np.isfinite(value)] or [0.0, 1.0]
    margin = room * (max(seen) - min(seen) or abs(max(seen)) or 1)
    return models.Range1d(min(seen) - margin, max(seen) + margin)


def _legend_above(chart: figure) -> None:
    """Put the legend over the chart; a click on a name hides what it names."""
    for legend in chart.legend:
        legend.visible = len(legend.items) > 1
        chart.add_layout(legend, "above")
        legend.orientation, legend.click_policy = "horizontal", "hide"
        legend.background_fill_alpha, legend.border_line_color = 0, None
        legend.label_text_color, legend.label_text_font_size = GREY, _SMALL
        legend.padding = legend.margin = 0


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LETTERS else f"{name[: _NAME_LETTERS - 1]}…"
