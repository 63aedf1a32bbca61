"""Summary of the update rule's ablation: arithmetic on its rows.

An *excess* is a run's held-out loss over that of the run on the device with the same seed and
learning rate, less 1. Runs made by the study are compared with runs on the device made by it,
those of earlier records with theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from evidence.studies.update_rule.design import CENTRE, VARIANTS
from experiments.lab.study import OWN

_BASELINE = "on_device"
Rows = Sequence[Mapping[str, Any]]
NOTICED = 0.005
"""Least difference of excesses that counts: runs that differ in rounding end up to it apart."""


def summarise(rows: Rows) -> dict[str, Any]:
    """Return the comparisons, by regime and learning rate, JSON-ready.

    ``groups`` has every variant's excesses and how they differ from the preset's, ``repeated`` how
    far runs on the device made twice lie apart.
    """
    bases = {
        (row["source"] == OWN, row["regime"], row["lr"], row["seed"]): row["eval_loss"]
        for row in rows
        if row["variant"] == _BASELINE
    }
    places = dict.fromkeys((row["regime"], row["lr"]) for row in rows)
    groups = [_group(rows, regime, lr, bases) for regime, lr in places]
    return {
        "groups": [group for group in groups if group["variants"]],
        "repeated": _repeated(bases),
        "sources": dict(Counter(row["source"] for row in rows)),
    }


def _repeated(bases: Mapping[tuple[bool, str, float, int], float]) -> float | None:
    """Return the largest relative difference between a run on the device here and recorded."""
    apart = [
        abs(loss / recorded - 1)
        for (own, regime, lr, seed), loss in bases.items()
        if own and (recorded := bases.get((False, regime, lr, seed))) is not None
    ]
    return max(apart, default=None)


def _group(
    rows: Rows, regime: str, lr: float, bases: Mapping[tuple[bool, str, float, int], float]
) -> dict[str, Any]:
    runs = [row for row in rows if (row["regime"], row["lr"]) == (regime, lr)]
    excesses: dict[str, dict[int, float]] = {}
    for row in runs:
        base = bases.get((row["source"] == OWN, regime, lr, row["seed"]))
        if row["variant"] in VARIANTS and base is not None:
            of_variant = excesses.setdefault(row["variant"], {})
            of_variant.setdefault(row["seed"], row["eval_loss"] / base - 1)
    device = [row["eval_loss"] for row in runs if row["variant"] == _BASELINE]
    return {
        "regime": regime,
        "lr": lr,
        "steps": runs[0]["steps"],
        "device_loss": fmean(device) if device else None,
        "variants": {
            name: {
                "excess": fmean(own.values()),
                "least": min(own.values()),
                "most": max(own.values()),
                "seeds": sorted(own),
                "verdict": "" if name == CENTRE else _verdict(own, excesses.get(CENTRE, {})),
            }
            for name in VARIANTS
            if (own := excesses.get(name))
        },
    }


def _verdict(own: Mapping[int, float], centre: Mapping[int, float]) -> str:
    """Return how a variant compares with the preset, empty without a shared seed.

    ``better`` or ``worse`` needs all seeds on one side and a mean difference of `NOTICED`.
    """
    apart = [own[seed] - centre[seed] for seed in own if seed in centre]
    if not apart:
        return ""
    if abs(fmean(apart)) < NOTICED or not (max(apart) < 0 or min(apart) > 0):
        return "same"
    return "better" if max(apart) < 0 else "worse"
