"""All studies by name, in their order; a study's module is loaded when it is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence

from experiments.lab.study import Study
from zenflow.errors import ConfigError

PAPER = "paper"
"""Group of the paper's figures, in the order of the page that shows them."""
WHAT_IF = "whatif"
"""Group of the shipped sweeps, each of which answers a question."""

_FIGURES = (
    "speed.breakdown",
    "speed.utilisation",
    "speed.naive_overlap",
    "speed.pipeline",
    "speed.speedup",
    "speed.stall_reduction",
    "speed.pcie_bytes",
    "importance.selection_traffic",
    "importance.concentration",
    "loss.sensitivity",
    "loss.zen_auto",
    "loss.convergence",
    "loss.ingredients",
    "speed.largest_model",
    "loss.update_rule",
    "loss.accuracy",
    "loss.from_scratch",
)
_QUESTIONS = ("break_even", "cores_against_interval", "dram_for_gpu", "pcie5_or_cpu")
_MODULES = {
    **{f"{PAPER}/{path.rpartition('.')[2]}": f"experiments.paper.{path}" for path in _FIGURES},
    "published": "experiments.studies.published.study",
    "validation": "experiments.studies.validation.study",
    "accuracy": "experiments.studies.accuracy",
    "staleness": "experiments.studies.staleness.study",
    "update_rule": "experiments.studies.update_rule.study",
    "late_updates": "experiments.studies.late_updates.study",
    "stability": "experiments.studies.late_updates.stability",
    "stall_and_loss": "experiments.studies.stall_and_loss",
    "tuned_goodput": "experiments.studies.tuned_goodput.study",
    "tuned_loss": "experiments.studies.tuned_loss",
    "hidden_machines": "experiments.studies.hidden_machines.study",
    "sst2": "experiments.studies.sst2.study",
    **{f"{WHAT_IF}/{name}": "experiments.sweeps.studies" for name in _QUESTIONS},
}
"""Module of each study, which exports it as STUDY, or several as STUDIES."""


def names(group: str | None = None) -> tuple[str, ...]:
    """Return the keys of all studies, or of a group's, in order."""
    return tuple(key for key in _MODULES if group is None or key.startswith(f"{group}/"))


def load(name: str) -> Study:
    """Return a study.

    Raises:
        ConfigError: No study has this name; the message has the nearest ones.
    """
    (name,) = chosen((name,))
    module = importlib.import_module(_MODULES[name])
    studies: Sequence[Study] = getattr(module, "STUDIES", None) or (module.STUDY,)
    return next(study for study in studies if study.key == name)


def chosen(asked: Sequence[str], group: str | None = None) -> tuple[str, ...]:
    """Return the keys that names stand for: a study, a group, or ``all``.

    Args:
        asked: Names; none is all.
        group: Group that names without one belong to, and that all is all of.

    Raises:
        ConfigError: A name is unknown; the message has the nearest ones, or all.
    """
    known = names(group)
    found: dict[str, None] = {}
    for name in asked or ("all",):
        key = name if group is None else f"{group}/{name}"
        if name == "all":
            found |= dict.fromkeys(known)
        elif any(other.startswith(f"{key}/") for other in known):
            found |= dict.fromkeys(names(key))
        elif key in known:
            found[key] = None
        else:
            raise ConfigError(f"no {'figure' if group else 'study'} is called {name!r}: "
                              + _hint(name, known, group))  # fmt: skip
    return tuple(found)


def _hint(name: str, known: Sequence[str], group: str | None) -> str:
    short = [key.removeprefix(f"{group}/") for key in known]
    near = difflib.get_close_matches(name.lower().replace("-", "_"), short, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(short)}"
