"""Picture of a validation: predicted over measured step times, and each run's error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from experiments.output.plots import STRATEGY_COLOURS

_BAND = 0.1
_OTHER_COLOUR = "#888888"


def draw_validation(data: Mapping[str, Any]) -> Figure:
    """Return measured against predicted step times, and the error of each run with its spread.

    Runs of several ranks are below those of one process.
    """
    ranks = data["ranks"]
    runs = data["runs"] + (ranks["runs"] if ranks else [])
    figure = Figure(figsize=(12, 1.6 + 0.2 * max(17, len(runs))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.4])
    measured = [run["measured"]["step_seconds"] * 1e3 for run in runs]
    predicted = [run["predicted"]["step_seconds"] * 1e3 for run in runs]
    colours = [STRATEGY_COLOURS.get(run["training"]["strategy"], _OTHER_COLOUR) for run in runs]
    ends = [0.9 * min(measured + predicted), 1.1 * max(measured + predicted)]
    left.fill_between(
        ends, [e * (1 - _BAND) for e in ends], [e * (1 + _BAND) for e in ends],
        color="#dddddd", label=f"within {_BAND:.0%}",
    )  # fmt: skip
    left.plot(ends, ends, color="#555555", linewidth=0.8)
    left.scatter(measured, predicted, c=colours, s=36, zorder=3)
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 4, 6)))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    left.set_xlabel("measured step, ms")
    left.set_ylabel("predicted step, ms")
    left.legend(loc="upper left", frameon=False)
    places = range(len(runs))
    right.barh(
        places, [100 * run["error"] for run in runs], color=colours, height=0.7,
        xerr=[50 * run["spread"] for run in runs], error_kw={"linewidth": 0.8, "capsize": 2},
    )  # fmt: skip
    right.axvline(0, color="#555555", linewidth=0.8)
    right.set_yticks(places, [run["run"] for run in runs], fontsize=7)
    right.invert_yaxis()
    right.set_xlabel("error, %; lines: the measurement's quartile range")
    told = f"{data['where']}: {data['said'].splitlines()[0]}"
    if ranks:
        told += f"\n{ranks['count']} ranks over {ranks['backend']} (ddp, fsdp): {ranks['said']}"
    figure.suptitle(told, fontsize=11)
    return figure
