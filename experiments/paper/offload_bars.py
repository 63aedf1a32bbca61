"""Bars of a number for each of the paper's models, one panel a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes

from experiments.literature import zenflow as paper
from experiments.paper.offload_runs import SEQUENCES

_COLOURS = ("#1b9e77", "#7fc8b2", "#c9e7dd")
_TITLES = {"a100-epyc-7742": "4x A100, EPYC 7742", "h100-xeon-8462y": "4x H100, Xeon 8462Y"}


def draw_bars(
    axes: Axes,
    rows: Sequence[dict[str, Any]],
    machine: str,
    value: Callable[[Any], float],
    form: str,
) -> None:
    """Draw one machine's bars: a colour for each sequence length, values in ``form``."""
    for place, model in enumerate(paper.MODELS):
        for shift, (sequence, colour) in enumerate(zip(SEQUENCES, _COLOURS, strict=True)):
            chosen = [
                value(row) for row in rows
                if (row["machine"], row["model"], row["sequence"]) == (machine, model, sequence)
            ]  # fmt: skip
            at = place + 0.27 * (shift - 1)
            for height in chosen:
                axes.bar(at, height, width=0.25, color=colour,
                         label=f"{sequence} tokens" if place == 0 else None)  # fmt: skip
                axes.text(at, height, format(height, form), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(
        range(len(paper.MODELS)), [_named(model) for model in paper.MODELS], fontsize=8
    )
    axes.set_title(_TITLES[machine], loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _named(model: str) -> str:
    devices, batch = paper.SET_UPS.get(model, (1, 64))
    known = "" if model in paper.SET_UPS else "*"
    return f"{model}\n{devices} GPU{'s' if devices > 1 else ''}, {batch}{known}"
