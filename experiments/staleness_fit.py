"""From losses to constants: what windows and lags cost in steps, and the formulas that say so.

An *efficiency* is the share of its steps with which the device alone would have reached the same
loss; its *cost* is 1/efficiency - 1, the further steps for each one that counts. Costs are told by

- ``linear``: rho (a (S - 1) + b lag), and
- ``power``: rho (c (S - 1 + d lag))^p,

where rho is the share of gradient energy in deferred columns. Pure arithmetic, no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

_ON_DEVICE = 1.0
"""The share k that makes a run the device's own."""
_MOST_RELATIVE_LAG = 32.0
_POWERS = (0.5, 4.0)
_GRID_POINTS = 41
_ZOOMS = 6


@dataclass(frozen=True, slots=True)
class Exchange:
    """What an excess of loss is in steps, at one learning rate.

    A run with ``share`` of the steps has a loss that lies linear x + curved x^2 above the whole
    run's, relative to it, with x = ln(1 / share).
    """

    linear: float
    curved: float
    least_share: float
    """Of the shortest run measured; what costs more is extrapolated."""

    @classmethod
    def fitted(cls, shares: Sequence[float], excesses: Sequence[float]) -> Exchange:
        """Return the curve through (1, 0) that fits the device's shorter runs best.

        Args:
            shares: Steps of each run over the whole run's, in (0, 1).
            excesses: Each run's loss over that of the whole run of its seed, less 1.

        Raises:
            ConfigError: There are fewer than two lengths.
        """
        if len(set(shares)) < 2:
            raise ConfigError(
                f"an exchange rate needs two lengths of shorter runs, but there are "
                f"{len(set(shares))}: train the device's runs first"
            )
        x = np.log(1 / np.asarray(shares))
        terms = np.stack([x, x**2], axis=1)
        linear, curved = np.linalg.lstsq(terms, np.asarray(excesses), rcond=None)[0]
        return cls(float(linear), float(curved), min(shares))

    def share(self, excess: float) -> float:
        """Return the share of the steps with which the device has this excess; above 1 below 0.

        Beyond the top of a curve that has one it goes on along a line.
        """
        root = math.sqrt(max(0.0, self.linear**2 + 4 * self.curved * excess))
        return math.exp(-2 * excess / (self.linear + root))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one setting of the knobs cost at one learning rate."""

    lr: float
    knobs: Knobs
    seeds: tuple[int, ...]
    rho: float
    """Share of gradient energy in deferred columns, mean over steps and seeds."""
    loss: float
    """Held-out, mean over seeds."""
    excess: float
    """Loss over the device's of the same seed, less 1; mean over seeds."""
    efficiencies: tuple[float, ...]
    """By seed."""

    @property
    def lag(self) -> int:
        """Steps from an update's start to its landing."""
        knobs = self.knobs
        return min(knobs.lag or knobs.update_interval, knobs.update_interval)

    @property
    def cost(self) -> float:
        """Further steps for each one that counts, mean over seeds; negative below the device's."""
        return fmean(1 / efficiency - 1 for efficiency in self.efficiencies)

    @property
    def efficiency(self) -> float:
        """The share of its steps with which the device would have done, from the mean cost."""
        return 1 / (1 + self.cost)


class Formula(Protocol):
    """A fitted cost."""

    def cost(self, interval: int, lag: int, rho: float) -> float:
        """Return the cost of windows of ``interval`` steps that land ``lag`` steps late."""


@dataclass(frozen=True, slots=True)
class Linear:
    """rho (a (S - 1) + b lag)."""

    a: float
    b: float

    def cost(self, interval: int, lag: int, rho: float) -> float:
        """Return the cost."""
        return rho * (self.a * (interval - 1) + self.b * lag)

    @classmethod
    def fitted(cls, settings: Sequence[Setting]) -> Linear:
        """Return the constants, none below 0, with the least squared error of the costs."""
        terms = np.array(
            [[s.rho * (s.knobs.update_interval - 1), s.rho * s.lag] for s in settings]
        )
        costs = np.array([s.cost for s in settings])
        a, b = np.linalg.lstsq(terms, costs, rcond=None)[0]
        if a >= 0 and b >= 0:
            return cls(float(a), float(b))
        # The best of two constants is on an edge: one alone, the other 0.
        alone = [_scale(terms[:, column], costs) for column in (0, 1)]
        errors = [
            float(np.sum((costs - factor * terms[:, column]) ** 2))
            for column, factor in enumerate(alone)
        ]
        return cls(alone[0], 0.0) if errors[0] <= errors[1] else cls(0.0, alone[1])


@dataclass(frozen=True, slots=True)
class Power:
    """rho (c (S - 1 + d lag))^p."""

    c: float
    d: float
    p: float

    def cost(self, interval: int, lag: int, rho: float) -> float:
        """Return the cost."""
        return float(rho * (self.c * (interval - 1 + self.d * lag)) ** self.p)

    @classmethod
    def fitted(cls, settings: Sequence[Setting]) -> Power:
        """Return the constants, none below 0, with the least squared error of the costs."""
        intervals = np.array([s.knobs.update_interval - 1.0 for s in settings])
        lags = np.array([float(s.lag) for s in settings])
        rhos = np.array([s.rho for s in settings])
        costs = np.array([s.cost for s in settings])

        def terms(d: float, p: float) -> NDArray[np.float64]:
            return np.asarray(rhos * (intervals + d * lags) ** p)

        def error(d: float, p: float) -> float:
            found = terms(d, p)
            return float(np.sum((costs - _scale(found, costs) * found) ** 2))

        d, p = _least(error, (0.0, _MOST_RELATIVE_LAG), _POWERS)
        return cls(_scale(terms(d, p), costs) ** (1 / p), d, p)


def _scale(terms: NDArray[np.float64], costs: NDArray[np.float64]) -> float:
    """Return the factor, not below 0, with which the terms are nearest to the costs."""
    norm = float(terms @ terms)
    return max(0.0, float(terms @ costs) / norm) if norm else 0.0


def _least(
    error: Callable[[float, float], float],
    first: tuple[float, float],
    second: tuple[float, float],
) -> tuple[float, float]:
    """Return where the error is least in the ranges: on a grid, then on finer ones around it."""
    ranges = [first, second]
    best = (first[0], second[0])
    for _ in range(_ZOOMS):
        axes = [np.linspace(low, high, _GRID_POINTS) for low, high in ranges]
        best = min(itertools.product(*(axis.tolist() for axis in axes)), key=lambda at: error(*at))
        reach = [2 * (high - low) / (_GRID_POINTS - 1) for low, high in ranges]
        ranges = [
            (max(low, at - r), min(high, at + r))
            for (low, high), at, r in zip((first, second), best, reach, strict=True)
        ]
    return best


FORMULAS: Mapping[str, type[Linear] | type[Power]] = {"linear": Linear, "power": Power}


def exchanges_of(rows: Sequence[Mapping[str, Any]]) -> dict[float, Exchange]:
    """Return the exchange rate of each learning rate, from the device's runs."""
    whole = _whole_runs(rows)
    found: dict[float, list[tuple[float, float]]] = {}
    for row in rows:
        reference = whole.get((row["lr"], row["seed"]))
        if _is_on_device(row) and reference and row["steps"] < reference["steps"]:
            share = row["steps"] / reference["steps"]
            excess = row["eval_loss"] / reference["eval_loss"] - 1
            found.setdefault(row["lr"], []).append((share, excess))
    return {rate: Exchange.fitted(*zip(*pairs, strict=True)) for rate, pairs in found.items()}


def settings_of(
    rows: Sequence[Mapping[str, Any]], exchanges: Mapping[float, Exchange]
) -> list[Setting]:
    """Return what each setting cost, in the order of the rows, all seeds of one together."""
    whole = _whole_runs(rows)
    runs: dict[tuple[float, Knobs], list[Mapping[str, Any]]] = {}
    for row in rows:
        if not _is_on_device(row) and (row["lr"], row["seed"]) in whole:
            knobs = Knobs.of(ZenFlowConfig.from_dict(row["config"]))
            runs.setdefault((row["lr"], knobs), []).append(row)
    found = []
    for (rate, knobs), own in runs.items():
        excesses = [r["eval_loss"] / whole[rate, r["seed"]]["eval_loss"] - 1 for r in own]
        setting = Setting(
            lr=rate,
            knobs=knobs,
            seeds=tuple(row["seed"] for row in own),
            rho=1 - fmean(row["captured_energy"] for row in own),
            loss=fmean(row["eval_loss"] for row in own),
            excess=fmean(excesses),
            efficiencies=tuple(exchanges[rate].share(excess) for excess in excesses),
        )
        found.append(setting)
    return found


def _whole_runs(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[float, int], Mapping[str, Any]]:
    """Return the device's longest run of each learning rate and seed."""
    longest: dict[tuple[float, int], Mapping[str, Any]] = {}
    for row in rows:
        key = (row["lr"], row["seed"])
        if _is_on_device(row) and row["steps"] > longest.get(key, {"steps": 0})["steps"]:
            longest[key] = row
    return longest


def _is_on_device(row: Mapping[str, Any]) -> bool:
    return bool(row["config"]["topk_ratio"] == _ON_DEVICE)


def is_fitted(setting: Setting) -> bool:
    """Whether the formulas are fitted to a setting: rolling windows, the default selection."""
    return (
        setting.knobs.rolling and setting.knobs.select_interval == ZenFlowConfig().select_interval
    )


def fit(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return exchange rates, every setting's efficiency, and both formulas' constants as JSON.

    Constants stand by learning rate and, of all rates together, under ``pooled``, each with the
    root mean square error of the costs that it was fitted to.
    """
    exchanges = exchanges_of(rows)
    settings = settings_of(rows, exchanges)
    groups = {f"{rate:g}": [s for s in settings if s.lr == rate] for rate in exchanges}
    groups["pooled"] = settings
    fits: dict[str, dict[str, Any]] = {}
    for group, members in groups.items():
        used = [setting for setting in members if is_fitted(setting)]
        for name, formula in FORMULAS.items():
            fitted = formula.fitted(used)
            rms = math.sqrt(fmean(_residual(fitted, setting) ** 2 for setting in used))
            fits.setdefault(group, {})[name] = {**asdict(fitted), "rms": rms}
    return {
        "exchange": {f"{rate:g}": asdict(exchange) for rate, exchange in exchanges.items()},
        "fits": fits,
        "settings": [_described(setting, fits) for setting in settings],
    }


def formula_of(fits: Mapping[str, Any], group: str, name: str) -> Linear | Power:
    """Return a fitted formula from what ``fit`` returned under ``fits``."""
    constants = {key: value for key, value in fits[group][name].items() if key != "rms"}
    return FORMULAS[name](**constants)


def _residual(formula: Formula, setting: Setting) -> float:
    return setting.cost - formula.cost(setting.knobs.update_interval, setting.lag, setting.rho)


def _described(setting: Setting, fits: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: formula_of(fits, f"{setting.lr:g}", name) for name in FORMULAS}
    return {
        "lr": setting.lr,
        "knobs": setting.knobs.to_dict(),
        "seeds": list(setting.seeds),
        "rho": setting.rho,
        "loss": setting.loss,
        "excess": setting.excess,
        "efficiency": setting.efficiency,
        "efficiencies": list(setting.efficiencies),
        "is_fitted": is_fitted(setting),
        "residuals": {name: _residual(formula, setting) for name, formula in own.items()},
    }
