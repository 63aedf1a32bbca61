"""Fit from runs to constants: a higher loss in steps, and so the cost of each setting.

A setting's *efficiency* is the share of its steps with which the device alone would have reached
the same loss. Pure arithmetic on the rows of a record, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from evidence.studies.staleness.formulas import Measured, fitted, residuals
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

Rows = Sequence[Mapping[str, Any]]

LEAST_FITTED = 0.6
"""Efficiency below which a setting is left out of the fits. Training is near the edge of stability
there, and costs so steep would bend the formulas where they are of use."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Exchange rate from an excess of loss to steps, at one learning rate.

    A run with ``share`` of the steps has a loss that lies linear x + curved x^2 above the whole
    run's, relative to it, with x = ln(1 / share).
    """

    linear: float
    curved: float
    least_share: float
    """Share of the shortest run measured; lower efficiencies are extrapolated."""

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
    """Cost of one setting of the knobs at one learning rate."""

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
    """Efficiency of each run, by seed."""

    @property
    def is_fitted(self) -> bool:
        """Whether constants are fitted to it: it is not too costly."""
        return self.efficiency >= LEAST_FITTED

    @property
    def efficiency(self) -> float:
        """Efficiency of the mean cost over seeds."""
        return 1 / (1 + self.cost)

    @property
    def cost(self) -> float:
        """Further steps for each that counts, mean over seeds."""
        return fmean(1 / efficiency - 1 for efficiency in self.efficiencies)

    def measured(self, best: float) -> Measured:
        """Return the setting and its cost, the learning rate over the best one."""
        return Measured(self.knobs.update_interval, self.lr / best, self.rho, self.cost)


def fit(rows: Rows) -> dict[str, Any]:
    """Return exchange rates, every setting's efficiency, and the formula's constants, JSON-ready.

    ``fit`` has the constants, the root mean square of their residuals and ``best_lr``, the rate
    with which the device's loss is the lowest.

    Raises:
        ConfigError: Too few runs are there, on the device or of the settings that are fitted.
    """
    exchanges = exchanges_of(rows)
    settings = settings_of(rows, exchanges)
    best = _best_rate(rows)
    measured = [setting.measured(best) for setting in settings if setting.is_fitted]
    if not measured:
        raise ConfigError(
            f"a fit needs settings with an efficiency of {LEAST_FITTED} or more, but none was "
            "trained: train shorter windows first"
        )
    formula = fitted(measured)
    rms = math.sqrt(fmean(left**2 for left in residuals(formula, measured)))
    return {
        "exchange": {f"{rate:g}": asdict(exchange) for rate, exchange in exchanges.items()},
        "fit": {**asdict(formula), "rms": rms, "best_lr": best},
        "settings": [
            {
                **asdict(setting),
                "efficiency": setting.efficiency,
                "is_fitted": setting.is_fitted,
                "predicted_efficiency": formula.of(setting.knobs, setting.rho, setting.lr / best),
            }
            for setting in settings
        ],
    }


def exchanges_of(rows: Rows) -> dict[float, Exchange]:
    """Return the exchange rate of each learning rate, from the device's runs."""
    pairs: dict[float, list[tuple[float, float]]] = {}
    for (rate, share), excesses in shorter_runs(rows).items():
        pairs.setdefault(rate, []).extend((share, excess) for excess in excesses)
    return {rate: Exchange.fitted(*zip(*own, strict=True)) for rate, own in pairs.items()}


def shorter_runs(rows: Rows) -> dict[tuple[float, float], list[float]]:
    """Return the excess of the device's shorter runs over the whole one of the same seed.

    By learning rate and by steps over the whole run's; one excess for each seed.
    """
    whole = _whole_runs(rows)
    found: dict[tuple[float, float], list[float]] = {}
    for row in rows:
        reference = whole.get((row["lr"], row["seed"]))
        if _is_on_device(row) and reference and row["steps"] < reference["steps"]:
            excess = row["eval_loss"] / reference["eval_loss"] - 1
            found.setdefault((row["lr"], row["steps"] / reference["steps"]), []).append(excess)
    return found


def settings_of(rows: Rows, exchanges: Mapping[float, Exchange]) -> list[Setting]:
    """Return the cost of each setting, in the order of the rows, all seeds of one together."""
    whole = _whole_runs(rows)
    runs: dict[tuple[float, Knobs], list[Mapping[str, Any]]] = {}
    for row in rows:
        is_comparable = row["lr"] in exchanges and (row["lr"], row["seed"]) in whole
        if is_comparable and not _is_on_device(row):
            knobs = Knobs.of(ZenFlowConfig.from_dict(row["config"]))
            runs.setdefault((row["lr"], knobs), []).append(row)
    found = []
    for (rate, knobs), own in runs.items():
        exchange = exchanges[rate]
        excesses = [r["eval_loss"] / whole[rate, r["seed"]]["eval_loss"] - 1 for r in own]
        setting = Setting(
            lr=rate,
            knobs=knobs,
            seeds=tuple(row["seed"] for row in own),
            rho=1 - fmean(row["captured_energy"] for row in own),
            loss=fmean(row["eval_loss"] for row in own),
            excess=fmean(excesses),
            efficiencies=tuple(exchange.share(excess) for excess in excesses),
        )
        found.append(setting)
    return found


def _whole_runs(rows: Rows) -> dict[tuple[float, int], Mapping[str, Any]]:
    """Return the device's longest run of each learning rate and seed."""
    longest: dict[tuple[float, int], Mapping[str, Any]] = {}
    for row in rows:
        key = (row["lr"], row["seed"])
        if _is_on_device(row) and row["steps"] > longest.get(key, {"steps": 0})["steps"]:
            longest[key] = row
    return longest


def _is_on_device(row: Mapping[str, Any]) -> bool:
    return bool(row["config"]["topk_ratio"] == 1)


def _best_rate(rows: Rows) -> float:
    """Return the learning rate at which the device's whole runs end lowest, mean over seeds."""
    losses: dict[float, list[float]] = {}
    for (rate, _), row in _whole_runs(rows).items():
        losses.setdefault(rate, []).append(row["eval_loss"])
    return min(losses, key=lambda rate: fmean(losses[rate]))
