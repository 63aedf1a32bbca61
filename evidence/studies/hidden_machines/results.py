"""Results of tuning on hidden machines: numbers, aims, tables, picture, from rows alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from experiments.lab.columns import Column, Table, key
from experiments.lab.drawing import panels
from experiments.lab.finding import Finding, Tolerance, aim
from experiments.lab.study import Data
from experiments.output.plots import STRATEGY_COLOURS
from experiments.output.provenance import percentile

MOST_SLOWDOWN = 0.05
MOST_FINAL_REGRET = 0.02
MOST_OVER_DEFAULT = 1.3
BACK_WITHIN = 0.05
"""Regret at which a method has found its way back after a drift."""

_COLOURS: Mapping[str, str] = {
    "twin": STRATEGY_COLOURS["auto"],
    "random": "#999999",
    "TPE": STRATEGY_COLOURS["zero_offload"],
    "GP": STRATEGY_COLOURS["zenflow_paper"],
    "uncorrected simulator": STRATEGY_COLOURS["delayed"],
    "default": STRATEGY_COLOURS["on_device"],
}
_STARTUP = 10
"""Random trials with which Optuna's TPE and GP begin unless told otherwise."""
_SPREAD = ("mean", "median", "p90")
_LEAST_SHOWN = 1e-3
"""A logarithmic axis has no 0."""

Rows = Sequence[Mapping[str, Any]]


def result_of(rows: Rows, method: str) -> dict[str, Any]:
    """Return the statistics of a method's rows without drift; there must be some.

    ``slowdown`` (against the best fixed setting: each seed's mean over all stretches) and
    ``final_regret`` are (mean, median, 90th percentile) over the seeds. ``worst_over_default`` is
    maximum and 90th percentile of each seed's worst stretch: time per unit of progress, the
    default's being 1. ``search_seconds`` is CPU time, mean.
    """
    own = [row for row in rows if row["method"] == method and not row["drifts"]]
    worst = [max(row["over_default"]) for row in own]
    return {
        "method": method,
        "seeds": len(own),
        "slowdown": _spread([fmean(row["regrets"]) for row in own]),
        "final_regret": _spread([row["final_regret"] for row in own]),
        "worst_over_default": (max(worst), percentile(worst, 0.9)),
        "search_seconds": fmean(row["search_seconds"] for row in own),
    }


def recovery(regrets: Sequence[float], drift_at: int) -> float:
    """Return after how many stretches regret is within ``BACK_WITHIN`` and stays; inf if never.

    >>> recovery([0.0, 0.5, 0.01, 0.2, 0.04, 0.0], 1)
    3
    >>> recovery([0.0, 0.01], 1)
    0
    """
    late = [place for place, regret in enumerate(regrets[drift_at:]) if regret > BACK_WITHIN]
    needed = late[-1] + 1 if late else 0
    return needed if needed < len(regrets) - drift_at else math.inf


def methods_of(rows: Rows, *, drifts: bool) -> list[str]:
    """Return the methods that have rows, in the order in which they are shown."""
    there = {row["method"] for row in rows if row["drifts"] == drifts}
    return [name for name in _COLOURS if name in there]


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return fmean(values), median(values), percentile(values, 0.9)


# ---- findings and tables ----------------------------------------------------------------------


def findings(data: Data) -> Sequence[Finding]:
    """Return the aims of the twin."""
    rows = data["rows"]
    if "twin" not in methods_of(rows, drifts=False):
        return []
    twin = result_of(rows, "twin")
    aims = (
        ("mean slowdown while tuning", "slowdown", MOST_SLOWDOWN),
        ("mean final regret", "final_regret", MOST_FINAL_REGRET),
        ("worst stretch of all seeds, the default's being 1", "worst_over_default",
         MOST_OVER_DEFAULT),
    )  # fmt: skip
    return [
        aim(f"The twin's {text}", bound, Tolerance.at_most(), simulated=twin[name][0])
        for text, name, bound in aims
    ]


def tables(data: Data) -> Sequence[Table]:
    """Return every method's figures, and those about the drift."""
    return [_steady_table(data["rows"]), *_drift_table(data["rows"], data["drift_at"])]


def _steady_table(rows: Rows) -> Table:
    def share(head: str, name: str, place: int, form: str = ".1%") -> Column:
        return Column(head=head, show=lambda row: format(row[name][place], form))

    columns = [
        key("method"),
        key("seeds"),
        *(share(f"slowdown, {text}", "slowdown", place) for place, text in enumerate(_SPREAD)),
        *(share(f"final regret, {text}", "final_regret", p) for p, text in enumerate(_SPREAD)),
        share("worst, max", "worst_over_default", 0, ".2f"),
        share("worst, p90", "worst_over_default", 1, ".2f"),
        key("search_seconds", ".1f", "search, CPU s"),
    ]
    return Table(
        title="While tuning",
        note="Slowdown: time per unit of progress over the best fixed setting's, less 1; mean "
        "over all stretches of a seed. Worst: a seed's worst stretch; the default setting's time "
        "per unit of progress is 1.",
        columns=columns,
        rows=[result_of(rows, name) for name in methods_of(rows, drifts=False)],
    )


def _drift_table(rows: Rows, drift_at: int) -> list[Table]:
    """Return each method's regrets around the drift, and the stretches until it recovers."""
    methods = methods_of(rows, drifts=True)
    if not methods:
        return []
    lines: list[dict[str, Any]] = []
    for name in methods:
        own = [row for row in rows if row["method"] == name and row["drifts"]]
        needed = [recovery(row["regrets"], drift_at) for row in own]
        places = {"before": drift_at - 1, "first": drift_at, "last": -1}
        lines.append(
            {
                "method": name,
                "seeds": len(own),
                **{text: fmean(row["regrets"][at] for row in own) for text, at in places.items()},
                "median": _count(median(needed)),
                "p90": _count(percentile(needed, 0.9)),
                "max": _count(max(needed)),
                "lost": sum(math.isinf(value) for value in needed),
            }
        )
    columns = [
        key("method"),
        key("seeds"),
        *(key(text, ".1%", f"mean regret {text}") for text in ("before", "first", "last")),
        *(key(text, head=f"stretches until back, {text}") for text in ("median", "p90", "max")),
        key("lost", head="seeds not back"),
    ]
    note = (
        f"Regret against the new best; stretches until it is within {BACK_WITHIN:.0%} and stays."
    )
    title = f"Drift after {drift_at} stretches"
    return [Table(title=title, note=note, columns=columns, rows=lines)]


def _count(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:g}"


def about(data: Data) -> str:
    """Return how the numbers are to be read."""
    cases = list(dict.fromkeys(row["case"] for row in data["rows"]))
    return f"""Everything here is simulated: nothing was run.

Each seed is a machine drawn about a table entry (`evidence.studies.hidden_machines.machine`):
constants off by a factor whose logarithm has a standard deviation of 0.35, contention that the
tuner's simulator has no word for, an error of each setting's own, noisy steps with heavy-tailed
spikes. Every method tunes {data["num_windows"]} stretches of steps and sees what an engine would
measure: step time, the lanes' busy seconds, captured energy. Cases, in turn: {"; ".join(cases)}.

- `twin`: the tuner, {data["num_trials"]} trials for each question.
- `random`, `TPE`, `GP`: a stretch is a trial, the default's the first; in the end the best
  measured. Optuna's samplers as they come, {_STARTUP} random trials at first included.
- `uncorrected simulator`: the best setting by the table, for ever. `default`: never tuned.

All but `uncorrected simulator` start in the default setting (`twin` may leave it before the first
stretch, on the table's word), and all choose among the settings that fit the machine's memory.
Regret is against the best of these, found by simulating the truth of each. How a delay counts
against a step is taken as known to all: it defines goodput. Unlike in a run, `twin` gets each
answer at once and is not shown energy curves, and queues need no steps to fill after a change.

Settings: {_listed(data["space"])}."""


def _listed(space: Mapping[str, Sequence[Any]]) -> str:
    """Return a search space in words."""
    return "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in space.items())


# ---- picture ----------------------------------------------------------------------------------


def draw(data: Data) -> Figure:
    """Return regret by stretch, the distribution of final regrets, and regret about the drift."""
    rows = data["rows"]
    seeds = len({row["seed"] for row in rows})
    title = (
        f"{seeds} simulated machines that the tuner does not know: time per unit of progress over "
        "the best fixed setting's"
    )
    figure, (left, middle, right) = panels(14, 4.6, count=3, title=title)
    _draw_regrets(left, rows, drifts=False)
    left.set_title("regret while tuning", fontsize=11)
    _draw_finals(middle, rows)
    _draw_regrets(right, rows, drifts=True)
    right.axvline(data["drift_at"] + 0.5, color=STRATEGY_COLOURS["on_device"], linewidth=0.8)
    right.set_title("the link becomes slower at the line", fontsize=11)
    return figure


def _draw_regrets(axes: Axes, rows: Rows, *, drifts: bool) -> None:
    for name in methods_of(rows, drifts=drifts):
        regrets = np.array(
            [row["regrets"] for row in rows if row["method"] == name and row["drifts"] == drifts]
        )
        at, colour = range(1, regrets.shape[1] + 1), _COLOURS[name]
        low, high = np.quantile(regrets, (0.1, 0.9), axis=0)
        mean = regrets.mean(axis=0)
        axes.plot(at, np.maximum(mean, _LEAST_SHOWN), color=colour, label=name)
        axes.fill_between(
            at, np.maximum(low, _LEAST_SHOWN), np.maximum(high, _LEAST_SHOWN), color=colour,
            alpha=0.12, linewidth=0,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_tick)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("stretch (line: mean of the seeds, band: 10% to 90%)")
    axes.set_ylabel("regret")
    axes.legend(fontsize=8, frameon=False)


def _draw_finals(axes: Axes, rows: Rows) -> None:
    for name in methods_of(rows, drifts=False):
        finals = sorted(
            max(row["final_regret"], _LEAST_SHOWN)
            for row in rows
            if row["method"] == name and not row["drifts"]
        )
        shares = [place / len(finals) for place in range(len(finals) + 1)]
        axes.step([finals[0], *finals], shares, where="post", color=_COLOURS[name], label=name)
    axes.axvline(MOST_FINAL_REGRET, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_tick)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("final regret (dotted: the aim for the mean)")
    axes.set_ylabel("seeds with at most that")
    axes.set_title("final regrets", fontsize=11)


def _tick(share: float, _: float) -> str:
    """Return a share on a logarithmic axis in per cent."""
    sign = "≤" if share <= 1.01 * _LEAST_SHOWN else ""
    return f"{sign}{share:.1%}" if share < 0.01 else f"{share:.0%}"
