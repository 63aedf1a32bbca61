"""A picture of what late updates cost: efficiency over S, by lag, measured and by the formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.studies.staleness.formulas import Power
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

_COLOURS: Mapping[int, str] = {1: "#1b9e77", 2: "#7570b3", 4: "#d95f02", 8: "#444444"}


def draw_efficiency(record: Mapping[str, Any]) -> Figure:
    """Return a panel for each learning rate: runs as points, the shared formula as lines.

    Filled points are those that the formula was fitted to.

    Args:
        record: What ``experiments.studies.staleness.fit.fit`` returned.
    """
    rates = list(record["exchange"])
    figure = Figure(figsize=(5.2 * len(rates), 4.2), layout="constrained")
    panels = figure.subplots(1, len(rates), squeeze=False, sharey=True)[0]
    for axes, rate in zip(panels, rates, strict=True):
        own = [s for s in record["settings"] if f"{s['lr']:g}" == rate and _is_drawn(s)]
        constants = record["fits"][rate]["shared"]
        formula = Power(constants["c"], constants["d"], constants["p"])
        axes.axhline(1, color="#999999", linewidth=0.8)
        for lag in _COLOURS:
            _draw_lag(axes, [s for s in own if s["knobs"]["lag"] == lag], formula, lag)
        intervals = sorted({s["knobs"]["update_interval"] for s in own})
        axes.set_xscale("log", base=2)
        axes.set_xticks(intervals, [str(interval) for interval in intervals])
        axes.set_title(f"learning rate {rate}", fontsize=11)
        axes.set_xlabel("steps in a window, S")
        axes.set_ylim(0, 1.1)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("efficiency: share of the steps\nthat the device alone needs")
    panels[0].legend(fontsize=8, frameon=False)
    return figure


def _is_drawn(setting: Mapping[str, Any]) -> bool:
    """Whether a setting differs from the default in window and lag alone."""
    knobs, default = Knobs.from_dict(setting["knobs"]), ZenFlowConfig()
    return (knobs.topk_ratio, knobs.rolling, knobs.select_interval) == (
        default.topk_ratio, default.rolling, default.select_interval,
    )  # fmt: skip


def _draw_lag(axes: Axes, settings: Sequence[Mapping[str, Any]], formula: Power, lag: int) -> None:
    """Draw every seed, and the formula at the settings' mean rho from S = lag on."""
    if not settings:
        return
    colour = _COLOURS[lag]
    for setting in settings:
        values = setting["efficiencies"]
        axes.plot(
            [setting["knobs"]["update_interval"]] * len(values), values, linestyle="none",
            marker="o", markersize=5, markeredgecolor=colour,
            markerfacecolor=colour if setting["is_fitted"] else "none",
        )  # fmt: skip
    rho = fmean(setting["rho"] for setting in settings)
    places = range(lag, 1 + max(setting["knobs"]["update_interval"] for setting in settings))
    told = [1 / (1 + formula.cost(interval, lag, rho)) for interval in places]
    axes.plot(list(places), told, color=colour, linewidth=1, label=f"lag {lag}")
