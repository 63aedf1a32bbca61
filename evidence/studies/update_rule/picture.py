"""Effect of each setting of the update rule on the loss: findings and picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evidence.studies.update_rule.design import CENTRE, PUBLISHED
from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data

_SAME = 0.005
"""Excess of the loss that counts as none."""
_LEAST_CHANGES = 3
"""Fewer say nothing of the preset."""
_LOSS = "ZenFlow paper (arXiv 2505.12242), per a secondary summary: no loss of accuracy"
_PUBLISHED_RULE = "Own record; no publication varies the rule"
_COLOURS = {"better": "#1b9e77", "same": "#bbbbbb", "worse": "#d95f02", "": "#7570b3"}
_MOST_SHOWN = 0.3


def _groups(data: Data) -> list[Mapping[str, Any]]:
    return sorted(data["groups"], key=lambda group: (group["regime"], group["lr"]))


def findings(data: Data) -> Sequence[Finding]:
    """Return how far the loss of each rule lies from the device's, by regime and rate."""
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
        found.append(_default_finding(group, where))
    return found


def _default_finding(group: Mapping[str, Any], where: str) -> Finding:
    """Return whether a change of one setting beats the preset in all seeds."""
    changes = {name: v for name, v in group["variants"].items() if v["verdict"]}
    better = [name for name, variant in changes.items() if variant["verdict"] == "better"]
    return Finding(
        claim=f"No other rule beats the default one in all seeds ({where})",
        source=_PUBLISHED_RULE, unit="rules",
        published=0.0 if len(changes) >= _LEAST_CHANGES else None,
        tolerance=Tolerance.at_most(), measured=float(len(better)),
        note=f"Of {len(changes)} tried; better: {', '.join(better) or 'none'}.",
    )  # fmt: skip


def draw(data: Data) -> Figure:
    """Return a panel for each group, with a bar for each rule."""
    groups = _groups(data)
    tallest = max((len(group["variants"]) for group in groups), default=1)
    count = max(1, len(groups))  # nothing is compared yet where only runs on the device are there
    figure = Figure(figsize=(3.6 * count, 1.6 + 0.3 * tallest), layout="constrained")
    for axes, group in zip(figure.subplots(1, count, squeeze=False)[0], groups, strict=False):
        _draw_group(axes, group["variants"])
        axes.set_ylim(tallest - 0.4, -0.6)  # bars are as high in every panel
        title = f"{group['regime']}, lr {group['lr']:g}"
        axes.set_title(f"{title}, {group['steps']} steps", fontsize=10)
    figure.suptitle(
        "Loss above the device's, %\n(green and orange: better and worse than the default in all "
        "seeds)",
        fontsize=12,
    )
    return figure


def _draw_group(axes: Axes, variants: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw each rule's excess with its seeds' range; far ones are cut, not their number."""
    bound = 100 * _MOST_SHOWN
    for place, variant in enumerate(variants.values()):
        low, mean, high = (100 * variant[key] for key in ("least", "excess", "most"))
        colour = _COLOURS[variant["verdict"]]
        axes.barh(place, max(-bound, min(bound, mean)), color=colour, height=0.6)
        axes.hlines(place, max(-bound, low), min(bound, high), color="#444444", linewidth=1)
        axes.annotate(f"{mean:+.1f}", (min(bound, max(0, mean, high)), place), (4, 0), fontsize=8,
                      va="center", textcoords="offset points")  # fmt: skip
    axes.axvline(0, color="#444444", linewidth=1)
    axes.set_yticks(range(len(variants)), list(variants), fontsize=8)
    axes.margins(x=0.18)
    axes.spines[["top", "right"]].set_visible(False)
