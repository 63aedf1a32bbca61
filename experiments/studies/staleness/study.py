"""What late updates cost: the record that the tuner's model of efficiency rests on.

The small model of the accuracy study is fine-tuned on the device for several numbers of steps, and
under the default preset with other windows, lags, shares of important columns and selections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autotune.efficiency import FITTED
from experiments.lab.columns import Column, Table, key
from experiments.lab.drawing import panels
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Cell, Data, Row, Scope, Study
from experiments.studies.regimes import BASELINE, FINE_TUNING, cell_of, settings_of, train
from experiments.studies.staleness.fit import LEAST_FITTED, fit, shorter_runs
from experiments.studies.staleness.formulas import Power
from experiments.training.settings import TrainSettings
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

RATES = (3e-4, 1e-3)
SHARES = ((1.0, 0.6, 0.8, 0.9), (0.4, 0.85, 0.95))
"""Lengths of the device's runs over the whole one's, by part. Each has a schedule of its own: what
a longer run has reached by then, at a higher learning rate, says nothing of a shorter one."""
_COLOURS: Mapping[int, str] = {1: "#1b9e77", 2: "#7570b3", 4: "#d95f02", 8: "#444444"}
"""Colours of the picture, by lag."""
_SMOKE = (((1.0, 0.5), [{"update_interval": 1}]), ((0.75,), [{"rolling": False}]))


def settings_by_part(*, smoke: bool = False) -> list[list[TrainSettings]]:
    """Return the runs of one seed and rate: windows and lags first, then all other knobs."""
    common = settings_of(FINE_TUNING, smoke=smoke)
    parts = _SMOKE if smoke else zip(SHARES, (_windows(), _others()), strict=True)
    found = []
    for shares, changes in parts:
        lengths = [round(share * (common.steps or 0)) for share in shares]
        on_device = [replace(common, strategy=BASELINE, steps=steps) for steps in lengths]
        found.append([*on_device, *(replace(common, knobs=knobs) for knobs in changes)])
    return found


def _windows() -> Iterator[dict[str, Any]]:
    """Yield every S with every lag."""
    for interval in (16, 8, 4, 2, 1):
        for lag in (1, 2, 4, 8):
            if lag <= interval:
                yield {"update_interval": interval, "lag": lag}


def _others() -> Iterator[dict[str, Any]]:
    """Yield other shares, aligned windows and other selections, each at a few windows."""
    for interval in (16, 4):
        for ratio in (0.3, 0.02, 0.05):
            yield {"update_interval": interval, "topk_ratio": ratio}
    for interval in (16, 4, 8):
        for lag in (1, interval):
            yield {"update_interval": interval, "lag": lag, "rolling": False}
    for interval in (16, 4):
        for every in (25, 400):
            yield {"update_interval": interval, "select_interval": every}


def _cells(scope: Scope) -> Sequence[Cell]:
    return [
        cell_of(FINE_TUNING, variant_of(settings), replace(settings, lr=rate, seed=seed))
        for seed in scope.seeds or ()
        for part in settings_by_part(smoke=scope.smoke)
        for settings in part
        for rate in (RATES[-1:] if scope.smoke else RATES)
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
    chosen = data["chosen"]
    constants = {
        "c": FITTED.scale,
        "d": FITTED.lag_weight,
        "p": FITTED.power,
        "aligned_stretch": FITTED.aligned_weight,
    }
    return [
        Finding(
            claim=f"The tuner counts late updates as these runs have it: {name}",
            source="autotune.efficiency.FITTED",
            unit="",
            published=published,
            measured=chosen[name],
            tolerance=Tolerance.relative(0.005),
        )
        for name, published in constants.items()
    ]


def _about(data: Data) -> str:
    chosen = data["chosen"]
    return (
        "The fine-tuning of the accuracy study, without a link, so that nothing depends on "
        "timing. *Efficiency* is the share of its steps with which the device alone reaches the "
        "same held-out loss, by an exchange rate from shorter runs on the device, each with a "
        "schedule of its own. Mean over seeds (least to most).\n\n"
        f"Cost = 1/efficiency - 1 = rho {chosen['c']:.3g} (S - 1 + {chosen['d']:.3g} lag)^"
        f"{chosen['p']:.3g}, with rho the share of gradient energy in deferred columns: the "
        f"formula at learning rate {chosen['lr']:g}, where the device's loss is the lowest. "
        f"Fitted to rolling windows with an efficiency of {LEAST_FITTED} or more; below that "
        "costs rise more steeply than it says." + _aligned_note(chosen["aligned_stretch"])
    )


def _aligned_note(stretch: float | None) -> str:
    if stretch is None:
        return ""
    return f" In windows that end together S - 1 counts {stretch:.3g} times."


def _tables(data: Data) -> Sequence[Table]:
    return [_fits(data), _shorter(data), *(_settings(data, rate) for rate in data["exchange"])]


def _fits(data: Data) -> Table:
    def constants(row: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} = {v:.3g}" for name, v in row["fit"].items() if name != "rms")

    columns = [
        key("rate", head="learning rate"),
        key("formula"),
        Column(head="constants", show=constants),
        Column(head="rms of relative error", show=lambda row: f"{row['fit']['rms']:.1%}"),
    ]
    rows = [
        {"rate": rate, "formula": name, "fit": found}
        for rate, fits in data["fits"].items()
        for name, found in fits.items()
    ]
    return Table(columns=columns, rows=rows)


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
    """Return a panel for each learning rate: runs as points, the shared formula as lines.

    Filled points are those that the formula was fitted to.
    """
    rates = list(data["exchange"])
    figure, shown = panels(5.2 * len(rates), 4.2, len(rates), sharey=True)
    for axes, rate in zip(shown, rates, strict=True):
        own = [s for s in data["settings"] if f"{s['lr']:g}" == rate and _is_drawn(s)]
        constants = data["fits"][rate]["shared"]
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
    shown[0].set_ylabel("efficiency: share of the steps\nthat the device alone needs")
    shown[0].legend(fontsize=8, frameon=False)
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
    minutes=240,
)
