"""What each knob of the update rule wins back: findings and picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data
from experiments.studies.update_rule.design import CENTRE, PUBLISHED
from experiments.studies.update_rule.summary import model_error

_SAME = 0.005
"""Excess of the loss that counts as none."""
_MODEL_ERROR = 0.05
_LEAST_CHANGES = 3
"""Fewer say nothing of the preset."""
_LOSS = "ZenFlow paper (arXiv 2505.12242), per a secondary summary: no loss of accuracy"
_PUBLISHED_RULE = "Own record; no publication varies the rule"
_COLOURS = {"better": "#1b9e77", "same": "#bbbbbb", "worse": "#d95f02"}
_MOST_SHOWN = 0.3


def _groups(data: Data) -> list[Mapping[str, Any]]:
    order = {"fine-tuning": 0, "from scratch": 1}
    return sorted(data["groups"], key=lambda g: (order[g["regime"]], g["lr"]))


def findings(data: Data) -> Sequence[Finding]:
    found = []
    for group in _groups(data):
        where = f"{group['regime']}, learning rate {group['lr']:g}"
        for name, text in ((PUBLISHED, "the published rule"), (CENTRE, "the default rule")):
            if name not in group["variants"]:
                continue
            variant = group["variants"][name]
            finding = Finding(
                claim=f"{text.capitalize()} learns as the device alone does ({where})",
                source=_LOSS, unit="x the device's loss", published=1.0,
                tolerance=Tolerance.at_most(_SAME), measured=1 + variant["excess"],
                note=f"{len(variant['seeds'])} seeds, {variant['least']:+.1%} to "
                f"{variant['most']:+.1%}; {_SAME:.1%} counts as none.",
            )  # fmt: skip
            found.append(finding)
        found.append(_default_finding(data, group, where))
    error = model_error(data["efficiency"])
    found.append(
        Finding(
            claim="The tuner's model of efficiency agrees with the runs (rms relative error)",
            source="autotune.efficiency.FITTED, fitted to the staleness record", unit="",
            published=_MODEL_ERROR, tolerance=Tolerance.at_most(), measured=error,
            note="At the learning rate that it was fitted at, in settings whose loss a shorter "
            "run on the device has too; most of them are runs of the fit.",
        )
    )  # fmt: skip
    return found


def _default_finding(data: Data, group: Mapping[str, Any], where: str) -> Finding:
    """Return whether a change of one knob beats the preset in all seeds."""
    changes = _changes_of(group, data)
    better = [c for c in changes if c["verdict"] == "better"]
    names = ", ".join(f"{c['name']} ({c['difference']:+.1%})" for c in better) or "none"
    return Finding(
        claim=f"No change of one knob beats the default rule in all seeds ({where})",
        source=_PUBLISHED_RULE, unit="changes",
        published=0.0 if len(changes) >= _LEAST_CHANGES else None,
        tolerance=Tolerance.at_most(), measured=float(len(better)),
        note=f"Of {len(changes)} changes tried; better: {names}.",
    )  # fmt: skip


def draw(data: Data) -> Figure:
    groups = _groups(data)
    tallest = max(len(_changes_of(group, data)) for group in groups)
    figure = Figure(figsize=(4.6 * len(groups), 4.4 + 0.3 * tallest), layout="constrained")
    top, bottom = figure.subplots(
        2, len(groups), squeeze=False, height_ratios=[3.4, max(1.0, 0.28 * tallest)]
    )
    ladders = {(ladder["regime"], ladder["lr"]): ladder for ladder in data["ladder"]}
    for place, group in enumerate(groups):
        _draw_ladder(top[place], ladders[group["regime"], group["lr"]])
        top[place].set_title(
            f"{group['regime']}, lr {group['lr']:g}, {group['steps']} steps", fontsize=11
        )
        _draw_changes(bottom[place], _changes_of(group, data))
        bottom[place].set_ylim(tallest - 0.4, -0.6)  # bars are as high in every panel
    top[0].set_ylabel("loss above the device's, %")
    figure.suptitle(
        "The update rule, measured. Above: from the published rule to the default. "
        "Below: the default with one knob changed, against the default",
        fontsize=12,
    )
    return figure


def _changes_of(group: Mapping[str, Any], data: Data) -> list[Mapping[str, Any]]:
    """Return what changing one knob does in a group."""
    place = group["regime"], group["lr"]
    return [change for change in data["defaults"] if (change["regime"], change["lr"]) == place]


def _draw_ladder(axes: Axes, ladder: Mapping[str, Any]) -> None:
    rungs = ladder["rungs"]
    values = [100 * rung["excess"] for rung in rungs]
    places = range(len(rungs))
    axes.bar(places, values, color=["#7570b3", *["#9fc8b8"] * (len(rungs) - 2), "#1b9e77"],
             width=0.65)  # fmt: skip
    for place, value in zip(places, values, strict=True):
        axes.annotate(f"{value:+.1f}", (place, max(value, 0)), (0, 2), fontsize=8, ha="center",
                      textcoords="offset points")  # fmt: skip
    axes.axhline(0, color="#444444", linewidth=1)
    axes.set_xticks(places, [rung["text"] for rung in rungs], rotation=35, ha="right", fontsize=8)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_changes(axes: Axes, changes: Sequence[Mapping[str, Any]]) -> None:
    """Draw each change's difference with its seeds' range; far ones are cut, not their number."""
    for place, change in enumerate(changes):
        low, mean, high = (100 * change[key] for key in ("least", "difference", "most"))
        bound = 100 * _MOST_SHOWN
        colour = _COLOURS[change["verdict"]]
        axes.barh(place, max(-bound, min(bound, mean)), color=colour, height=0.6)
        axes.hlines(place, max(-bound, low), min(bound, high), color="#444444", linewidth=1)
        axes.annotate(f"{mean:+.1f}", (min(bound, max(0, mean, high)), place), (4, 0), fontsize=8,
                      va="center", textcoords="offset points")  # fmt: skip
    axes.axvline(0, color="#444444", linewidth=1)
    axes.set_yticks(range(len(changes)), [change["name"] for change in changes], fontsize=8)
    axes.margins(x=0.18)
    axes.set_xlabel("difference of the excess, percentage points", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
