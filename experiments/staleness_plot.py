"""A picture of what late updates cost: efficiency over S, by lag, measured and fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.staleness_formulas import Power
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

_COLOURS: Mapping[int, str] = {1: "#1b9e77", 2: "#7570b3", 4: "#d95f02", 8: "#444444"}
_RATIO = ZenFlowConfig().topk_ratio


def draw_efficiency(record: Mapping[str, Any]) -> Figure:
    """Return a panel for each learning rate: settings as points, the shared formula as lines.

    Args:
        record: What ``experiments.staleness_fit.fit`` returned.
    """
    rates = list(record["exchange"])
    figure = Figure(figsize=(5.2 * len(rates), 4.2), layout="constrained")
    panels = figure.subplots(1, len(rates), squeeze=False, sharey=True)[0]
    for axes, rate in zip(panels, rates, strict=True):
        own = [s for s in record["settings"] if f"{s['lr']:g}" == rate and _is_drawn(s)]
        axes.axhline(1, color="#999999", linewidth=0.8)
        for lag, colour in _COLOURS.items():
            _draw_lag(axes, [s for s in own if s["knobs"]["lag"] == lag], colour, lag)
            _draw_fit(axes, record, rate, own, colour, lag)
        intervals = sorted({s["knobs"]["update_interval"] for s in own})
        axes.set_xscale("log", base=2)
        axes.set_xticks(intervals, [str(interval) for interval in intervals])
        axes.set_title(f"learning rate {rate}", fontsize=11)
        axes.set_xlabel("steps in a window, S")
        axes.set_ylabel("efficiency: steps on the device for the same loss, share")
        axes.set_ylim(0, 1.1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    return figure


def _is_drawn(setting: Mapping[str, Any]) -> bool:
    knobs = Knobs.from_dict(setting["knobs"])
    return bool(setting["is_fitted"]) and knobs.topk_ratio == _RATIO


def _draw_lag(axes: Axes, settings: Sequence[Mapping[str, Any]], colour: str, lag: int) -> None:
    for setting in settings:
        interval, values = setting["knobs"]["update_interval"], setting["efficiencies"]
        axes.plot([interval] * len(values), values, color=colour, marker="o", markersize=4,
                  linestyle="none")  # fmt: skip
    if settings:
        axes.plot([], [], color=colour, marker="o", label=f"lag {lag}")


def _draw_fit(
    axes: Axes,
    record: Mapping[str, Any],
    rate: str,
    settings: Sequence[Mapping[str, Any]],
    colour: str,
    lag: int,
) -> None:
    """Draw the formula at the settings' mean share of deferred energy, from S = lag on."""
    constants = record["fits"][rate]["shared"]
    formula = Power(constants["c"], constants["d"], constants["p"])
    own = [setting for setting in settings if setting["knobs"]["lag"] == lag]
    if own:
        rho = sum(setting["rho"] for setting in own) / len(own)
        places = range(lag, 1 + max(setting["knobs"]["update_interval"] for setting in own))
        fitted = [1 / (1 + formula.cost(interval, lag, rho)) for interval in places]
        axes.plot(list(places), fitted, color=colour, linewidth=1)
