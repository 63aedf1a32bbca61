"""Picture of held-out losses beside a baseline's, by kind of training and learning rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, StrMethodFormatter

from experiments.output.plots import STRATEGY_COLOURS

_OTHER_COLOUR = "#bbbbbb"
_LINE_STYLES, _MARKERS = ("-", "--", ":"), ("o", "s", "^", "D", "v")
"""Looks of a strategy as it is, and of its variants in turn."""
_BESIDE = 1.03
"""Factor on the learning rate from one variant's place to the next one's."""
_TICKS = (-30, -10, -3, -1, -0.5, 0, 0.5, 1, 3, 10, 30)
_PERCENT = 100


def draw_excess(excesses: Mapping[tuple[str, str, float], Sequence[float]]) -> Figure:
    """Return how far held-out losses lie above the baseline's, by learning rate.

    The scale is linear up to one per cent either way, and logarithmic beyond. Variants stand side
    by side at a rate; a vertical line spans the seeds.

    Args:
        excesses: Relative excess of each seed by (regime, variant, learning rate).
    """
    regimes = list(dict.fromkeys(regime for regime, _, _ in excesses))
    count = max(1, len(regimes))  # nothing is compared yet where only the baseline is there
    figure = Figure(figsize=(6 * count, 4), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes, regime in zip(panels, regimes, strict=False):
        found: dict[str, dict[float, Sequence[float]]] = {}
        for (_, variant, rate), values in (i for i in excesses.items() if i[0][0] == regime):
            found.setdefault(variant, {})[rate] = [_PERCENT * value for value in values]
        _draw_regime(axes, found)
        axes.set_title(regime, fontsize=11)
    return figure


def _draw_regime(axes: Axes, found: Mapping[str, Mapping[float, Sequence[float]]]) -> None:
    """Draw each variant's excess in per cent over the learning rate."""
    axes.axhline(0, color=STRATEGY_COLOURS["on_device"], linewidth=1)
    drawn: Counter[str] = Counter()
    for place, (variant, by_rate) in enumerate(found.items()):
        preset = variant.split(",")[0]
        colour = STRATEGY_COLOURS.get(preset, _OTHER_COLOUR)
        look = drawn[preset] % len(_MARKERS)
        drawn[preset] += 1
        rates = sorted(by_rate)
        beside = [rate * _BESIDE ** (place - (len(found) - 1) / 2) for rate in rates]
        axes.plot(beside, [fmean(by_rate[rate]) for rate in rates], color=colour, linewidth=1,
                  linestyle=_LINE_STYLES[look % len(_LINE_STYLES)], marker=_MARKERS[look],
                  markersize=5, label=variant)  # fmt: skip
        lows, highs = ([end(by_rate[rate]) for rate in rates] for end in (min, max))
        axes.vlines(beside, lows, highs, colour)
    axes.set_xscale("log")
    rates = sorted({rate for by_rate in found.values() for rate in by_rate})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
    axes.minorticks_off()
    axes.set_yscale("symlog", linthresh=1.0)
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("learning rate")
    axes.set_ylabel("held-out loss above on_device's, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
