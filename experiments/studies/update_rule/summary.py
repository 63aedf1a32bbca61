"""What the ablation of the update rule says: arithmetic on its rows.

An *excess* is a run's held-out loss over that of the run on the device with the same seed and
learning rate, less 1. Runs made by the study are compared with runs on the device made by it,
those of earlier records with theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from autotune.efficiency import FITTED
from experiments.lab.record import committed
from experiments.lab.study import OWN
from experiments.studies.staleness.fit import exchanges_of
from experiments.studies.update_rule.design import CENTRE, LADDER_NAMES, LADDER_TEXTS, VARIANTS
from zenflow.config import ZenFlowConfig
from zenflow.knobs import Knobs

_BASELINE = "on_device"
Rows = Sequence[Mapping[str, Any]]
Excesses = Mapping[tuple[str, float, str], Mapping[int, float]]
"""Excess by seed, by regime, learning rate and variant."""
NOTICED = 0.002
"""Least difference of excesses that counts: about what a seed moves a loss by in fine-tuning."""


def summarise(rows: Rows) -> dict[str, Any]:
    """Return what is compared, by regime and learning rate, JSON-ready.

    ``groups`` has every variant's excesses, ``ladder`` the published rule's way to the default,
    ``defaults`` what changing one knob alone does, ``efficiency`` the tuner's model beside the
    runs, ``repeated`` how far runs on the device made twice lie apart.
    """
    bases = {
        (row["source"] == OWN, row["regime"], row["lr"], row["seed"]): row["eval_loss"]
        for row in rows
        if row["variant"] == _BASELINE
    }
    excess: dict[tuple[str, float, str], dict[int, float]] = {}
    for row in rows:
        base = bases.get((row["source"] == OWN, row["regime"], row["lr"], row["seed"]))
        if row["variant"] != _BASELINE and base is not None:
            own = excess.setdefault((row["regime"], row["lr"], row["variant"]), {})
            own.setdefault(row["seed"], row["eval_loss"] / base - 1)
    places = list(dict.fromkeys((regime, lr) for regime, lr, _ in excess))
    groups = [_group(rows, place, excess) for place in places]
    return {
        "groups": groups,
        "ladder": [_ladder(group) for group in groups],
        "defaults": [change for place in places for change in _changes(place, excess)],
        "efficiency": _efficiencies(rows, excess),
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


def _group(rows: Rows, place: tuple[str, float], excess: Excesses) -> dict[str, Any]:
    regime, lr = place
    runs = [row for row in rows if (row["regime"], row["lr"]) == place]
    return {
        "regime": regime,
        "lr": lr,
        "steps": runs[0]["steps"],
        "device_loss": fmean(row["eval_loss"] for row in runs if row["variant"] == _BASELINE),
        "variants": {
            name: {
                "excess": fmean(own.values()),
                "least": min(own.values()),
                "most": max(own.values()),
                "seeds": sorted(own),
            }
            for name in VARIANTS
            if (own := excess.get((*place, name)))
        },
    }


def _ladder(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rungs that were trained, each with its mean excess."""
    rungs: list[dict[str, Any]] = []
    skipped: list[str] = []
    for text, name in zip(LADDER_TEXTS, LADDER_NAMES, strict=True):
        if name not in group["variants"]:
            skipped.append(text)
            continue
        whole = f"{skipped[0]} ... {text}" if skipped else text
        rungs.append({"text": whole, "name": name, "excess": group["variants"][name]["excess"]})
        skipped = []
    return {"regime": group["regime"], "lr": group["lr"], "rungs": rungs}


def _changes(place: tuple[str, float], excess: Excesses) -> list[dict[str, Any]]:
    """Return for each knob changed alone how the loss differs, seed by seed.

    ``better`` or ``worse`` needs all seeds on one side and a mean difference of `NOTICED`.
    """
    centre = excess.get((*place, CENTRE), {})
    found = []
    for name, variant in VARIANTS.items():
        own = excess.get((*place, name), {})
        shared = sorted(set(own) & set(centre))
        if not variant.changed or not shared:
            continue
        apart = [own[seed] - centre[seed] for seed in shared]
        mean = fmean(apart)
        verdict = "same"
        if abs(mean) >= NOTICED and (max(apart) < 0 or min(apart) > 0):
            verdict = "better" if mean < 0 else "worse"
        found.append(
            {
                "regime": place[0], "lr": place[1], "knob": variant.changed, "name": name,
                "difference": mean, "least": min(apart), "most": max(apart),
                "seeds": len(shared), "verdict": verdict,
            }
        )  # fmt: skip
    return found


def _efficiencies(rows: Rows, excess: Excesses) -> list[dict[str, Any]]:
    """Return what the tuner's model says of settings that it covers, beside the runs.

    That are fine-tuning runs at rates whose exchange of loss for steps the staleness record has,
    with step moments, a linear learning rate, prediction 1, overlap and nothing else.
    """
    record = committed("staleness")
    if record is None:
        return []
    exchanges = exchanges_of(record.rows)
    found = []
    for (regime, lr, name), values in excess.items():
        exchange = exchanges.get(lr)
        own = [r for r in rows if (r["regime"], r["lr"], r["variant"]) == (regime, lr, name)]
        config = ZenFlowConfig.from_dict(own[0]["config"])
        energies = [e for row in own if (e := row.get("captured_energy")) is not None]
        is_covered = regime == "fine-tuning" and _is_covered(config, own[0].get("clip"))
        if exchange is None or not energies or not is_covered:
            continue
        mean, rho = fmean(values.values()), 1 - fmean(energies)
        found.append(
            {
                "lr": lr, "name": name, "rho": rho, "excess": mean, "fitted_lr": FITTED_LR,
                "measured": exchange.share(mean),
                "model": FITTED.of(Knobs.of(config), rho),
                "extrapolated": exchange.share(mean) < exchange.least_share,
            }
        )  # fmt: skip
    return found


FITTED_LR = 1e-3
"""Learning rate of the record's constants that the tuner has; at lower ones delays cost less."""


def _is_covered(config: ZenFlowConfig, clip: float | None) -> bool:
    return (
        clip is None
        and config.overlap_step
        and config.full_warm_up_rounds == 0
        and (config.deferred_moments, config.deferred_lr_scale, config.prediction)
        == ("step", "linear", 1.0)
    )


def model_error(settings: Rows) -> float | None:
    """Return the root mean square relative error of the tuner's model at its own rate.

    Settings that lost more than any run on the device tells are left out; None without settings.
    """
    errors = [
        s["model"] / s["measured"] - 1
        for s in settings
        if s["lr"] == s["fitted_lr"] and not s["extrapolated"]
    ]
    return (fmean(error**2 for error in errors)) ** 0.5 if errors else None
