"""All figures by name, in their order; a figure's module is loaded when it is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence

import experiments.paper as package
from experiments.lab.figure import PaperFigure
from zenflow.errors import ConfigError

_ORDER = (
    "breakdown",
    "utilisation",
    "naive_overlap",
    "pipeline",
    "speedup",
    "stall_reduction",
    "pcie_bytes",
    "selection_traffic",
    "concentration",
    "sensitivity",
    "zen_auto",
    "convergence",
    "ingredients",
    "largest_model",
    "update_rule",
    "accuracy",
    "from_scratch",
)
"""A figure is the module of this package that has its name."""


def names() -> tuple[str, ...]:
    """Return the names of all figures, in order."""
    return _ORDER


def load(name: str) -> PaperFigure:
    """Return a figure.

    Raises:
        ConfigError: No figure has this name; the message has the nearest ones.
    """
    check((name,))
    figure = importlib.import_module(f"{package.__name__}.{name}").FIGURE
    assert isinstance(figure, PaperFigure)
    assert figure.name == name
    return figure


def check(chosen: Sequence[str]) -> None:
    """Refuse names that no figure has.

    Raises:
        ConfigError: With the nearest names, or all.
    """
    known = names()
    for name in chosen:
        if name not in known:
            near = difflib.get_close_matches(
                name.lower().replace("-", "_"), known, n=3, cutoff=0.5
            )
            hint = (
                f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            )
            raise ConfigError(f"no figure is called {name!r}: {hint}")
