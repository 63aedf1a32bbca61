"""Cost of late updates: the record that the tuner's model of efficiency rests on.

The small model of the accuracy study is trained from random weights, where late updates hurt most:
on the device for several numbers of steps, and under the default preset with other windows and
shares of important columns, at several learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autotune.efficiency import FITTED, DelayCost
from evidence.studies.regimes import BASELINE, SCRATCH, cell_of, settings_of, train
from evidence.studies.staleness.fit import LEAST_FITTED, fit, shorter_runs
from experiments.lab.columns import Column, Table, key
from experiments.lab.drawing import panels
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Cell, Data, Row, Scope, Study
from experiments.training.settings.training import TrainSettings
from zenflow.knobs import Knobs

RATES = (1e-3, 2e-3, 4e-4)
SHARES = (1.0, 0.6, 0.9, 0.4, 0.8)
"""Lengths of the device's runs over the whole one's. Each has a schedule of its own: what a longer
run has reached by then, at a higher learning rate, says nothing of a shorter one."""
KNOBS: Sequence[Mapping[str, Any]] = (
    *({"update_interval": interval} for interval in (64, 16, 32, 4)),
    *({"update_interval": interval, "topk_ratio": 0.0} for interval in (64, 16)),
    *({"update_interval": interval, "topk_ratio": 0.3} for interval in (64, 16)),
)
_COLOURS: Mapping[float, str] = {0.0: "#d95f02", 0.1: "#1b9e77", 0.3: "#7570b3"}
"""Colours of the picture, by k."""


def _training(scope: Scope) -> list[TrainSettings]:
    """Return the runs of one seed and rate: those on the device, then the knobs'."""
    common = settings_of(SCRATCH, smoke=scope.smoke)
    shares, changes = ((1.0, 0.5, 0.75), KNOBS[:1]) if scope.smoke else (SHARES, KNOBS)
    lengths = [round(share * (common.steps or 0)) for share in shares]
    on_device = [replace(common, strategy=BASELINE, steps=steps) for steps in lengths]
    return [*on_device, *(replace(common, knobs=dict(knobs)) for knobs in changes)]


def _cells(scope: Scope) -> Sequence[Cell]:
    return [
        cell_of(SCRATCH, variant_of(settings), replace(settings, lr=rate, seed=seed))
        for seed in scope.seeds or ()
        for rate in (RATES[:1] if scope.smoke else RATES)
        for settings in _training(scope)
    ]


def variant_of(settings: TrainSettings) -> str:
    """Return the run's name: its knobs, or the device's with its steps."""
    if settings.strategy == BASELINE:
        return f"{BASELINE} steps={settings.steps}"
    return str(Knobs.of(settings.config(None)))


def _summarise(rows: Sequence[Row], config: Data) -> Data:
    del config
    shorter = [
        {"lr": rate, "share": share, "excess": fmean(found)}
        for (rate, share), found in shorter_runs(rows).items()
    ]
    return {**fit(rows), "shorter": shorter}


def _findings(data: Data) -> Sequence[Finding]:
    """Say whether the constants in use are those of the record."""
    return [
        Finding(
            claim=f"The tuner counts late updates as these runs have it: {name}",
            source="autotune.efficiency.FITTED",
            unit="",
            published=getattr(FITTED, name),
            measured=data["fit"][name],
            tolerance=Tolerance.relative(0.005),
        )
        for name in ("interval", "power", "rate_power")
    ]


def _formula(data: Data) -> DelayCost:
    """Return the fitted formula; JSON has no infinity."""
    found = data["fit"]
    interval = math.inf if found["interval"] is None else found["interval"]
    return DelayCost(interval=interval, power=found["power"], rate_power=found["rate_power"])


def _about(data: Data) -> str:
    formula = _formula(data)
    return (
        "The training from random weights of the accuracy study, without a link, so that nothing "
        "depends on timing. *Efficiency* is the share of its steps with which the device alone "
        "reaches the same held-out loss, by an exchange rate from shorter runs on the device, "
        "each with a schedule of its own. Mean over seeds (least to most).\n\n"
        f"Cost = 1/efficiency - 1 = rho (S / {formula.interval:.3g})^{formula.power:.3g} "
        f"(learning rate / {data['fit']['best_lr']:g})^{formula.rate_power:.3g}, with rho the "
        "share of gradient energy in deferred columns; at that rate the device's "
        f"loss is the lowest. Fitted to efficiencies of {LEAST_FITTED} or more; the relative "
        f"error of an efficiency is {data['fit']['rms']:.1%} (rms)."
    )


def _tables(data: Data) -> Sequence[Table]:
    return [_shorter(data), *(_settings(data, rate) for rate in data["exchange"])]


def _shorter(data: Data) -> Table:
    shares = sorted({item["share"] for item in data["shorter"]}, reverse=True)
    rates = sorted({item["lr"] for item in data["shorter"]})
    found = {(item["share"], item["lr"]): item["excess"] for item in data["shorter"]}
    columns = [
        key("share", "g", "on the device, share of the steps"),
        *(key(f"{rate:g}", "+.2%", f"loss above the whole run's at {rate:g}") for rate in rates),
    ]
    rows = [
        {"share": share, **{f"{rate:g}": found.get((share, rate)) for rate in rates}}
        for share in shares
    ]
    return Table(columns=columns, rows=rows)


def _settings(data: Data, rate: str) -> Table:
    least = data["exchange"][rate]["least_share"]

    def efficiency(row: Mapping[str, Any]) -> str:
        if row["efficiency"] < least:
            return f"below {least:g}"
        values = row["efficiencies"]
        spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
        return f"{row['efficiency']:.3f}{spread}"

    columns = [
        Column(head="knobs", show=lambda row: str(Knobs.from_dict(row["knobs"]))),
        key("rho", ".2f"),
        key("loss", ".4f", "held-out loss"),
        key("excess", "+.2%", "above the device's"),
        Column(head="efficiency", show=efficiency),
        key("predicted_efficiency", ".3f", "by the formula"),
    ]
    rows = [setting for setting in data["settings"] if f"{setting['lr']:g}" == rate]
    return Table(title=f"Learning rate {rate}", columns=columns, rows=rows)


def _draw(data: Data) -> Figure:
    """Return a panel for each learning rate: runs as points, the formula as lines.

    Filled points are those that the formula was fitted to.
    """
    rates = sorted(data["exchange"], key=float)
    figure, shown = panels(5.2 * len(rates), 4.2, len(rates), sharey=True)
    for axes, rate in zip(shown, rates, strict=True):
        own = [s for s in data["settings"] if f"{s['lr']:g}" == rate]
        axes.axhline(1, color="#999999", linewidth=0.8)
        for ratio in _COLOURS:
            of_ratio = [s for s in own if s["knobs"]["topk_ratio"] == ratio]
            _draw_ratio(axes, of_ratio, _formula(data), float(rate) / data["fit"]["best_lr"])
        intervals = sorted({s["knobs"]["update_interval"] for s in own})
        axes.set_xscale("log", base=2)
        axes.set_xticks(intervals, [str(interval) for interval in intervals])
        axes.set_title(f"learning rate {rate}", fontsize=11)
        axes.set_xlabel("steps in a window, S")
        axes.set_ylim(0, 1.2)
    shown[0].set_ylabel("efficiency: share of the steps\nthat the device alone needs")
    shown[0].legend(fontsize=8, frameon=False)
    return figure


def _draw_ratio(
    axes: Axes, settings: Sequence[Mapping[str, Any]], formula: DelayCost, rate: float
) -> None:
    """Draw every seed of one k, and the formula at the settings' mean rho."""
    if not settings:
        return
    ratio = settings[0]["knobs"]["topk_ratio"]
    colour = _COLOURS[ratio]
    for setting in settings:
        values = setting["efficiencies"]
        axes.plot(
            [setting["knobs"]["update_interval"]] * len(values), values, linestyle="none",
            marker="o", markersize=5, markeredgecolor=colour,
            markerfacecolor=colour if setting["is_fitted"] else "none",
        )  # fmt: skip
    rho = fmean(setting["rho"] for setting in settings)
    places = range(1, 1 + max(setting["knobs"]["update_interval"] for setting in settings))
    told = [1 / (1 + rho * formula.cost(interval, rate)) for interval in places]
    axes.plot(list(places), told, color=colour, linewidth=1, label=f"k = {ratio:g}")


STUDY = Study(
    name="staleness",
    title="What late updates cost",
    cells=_cells,
    run=train,
    summarise=_summarise,
    findings=_findings,
    about=_about,
    tables=_tables,
    draw=_draw,
    seeds=(0, 1),
    reuses=("accuracy",),
    minutes=120,
    revision=3,
)
