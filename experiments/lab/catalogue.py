"""All studies by name, in their order; a study's module is loaded when it is asked for.

Studies that prove this project are in the folder ``evidence`` beside this package. A clone of the
repository has that folder, and an installed wheel has not.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from pathlib import Path

from experiments.lab.study import Study
from zenflow.errors import ConfigError

PAPER = "paper"
"""Group of the paper's figures, in the order of the page that shows them."""
WHAT_IF = "whatif"
"""Group of the shipped sweeps, each of which answers a question."""

_EVIDENCE = "evidence"
_FIGURES = (
    "experiments.paper.speed.breakdown",
    "experiments.paper.speed.utilisation",
    "experiments.paper.speed.naive_overlap",
    "experiments.paper.speed.pipeline",
    "experiments.paper.speed.speedup",
    "experiments.paper.speed.stall_reduction",
    "experiments.paper.speed.pcie_bytes",
    "evidence.paper.importance.selection_traffic",
    "evidence.paper.importance.concentration",
    "evidence.paper.loss.sensitivity",
    "evidence.paper.loss.zen_auto",
    "evidence.paper.loss.convergence",
    "evidence.paper.loss.ingredients",
    "experiments.paper.speed.largest_model",
    "evidence.paper.loss.update_rule",
    "evidence.paper.loss.accuracy",
    "evidence.paper.loss.from_scratch",
)
_QUESTIONS = ("break_even", "cores_against_interval", "dram_for_gpu", "pcie5_or_cpu")
_MODULES = {
    **{f"{PAPER}/{path.rpartition('.')[2]}": path for path in _FIGURES},
    "published": "evidence.studies.published.study",
    "validation": "experiments.validation.study",
    "accuracy": "evidence.studies.accuracy",
    "staleness": "evidence.studies.staleness.study",
    "update_rule": "evidence.studies.update_rule.study",
    "late_updates": "evidence.studies.late_updates.study",
    "stability": "evidence.studies.late_updates.stability",
    "stall_and_loss": "evidence.studies.stall_and_loss",
    "tuned_goodput": "evidence.studies.tuned_goodput.study",
    "hidden_machines": "evidence.studies.hidden_machines.study",
    "sst2": "evidence.studies.sst2.study",
    "small_data": "evidence.studies.small_data.study",
    "glue": "evidence.studies.glue.study",
    "glue_decoder": "evidence.studies.glue.study",
    "language_model": "evidence.studies.language_model.study",
    "host_state": "evidence.studies.host_state",
    "host_state_seeds": "evidence.studies.host_state_seeds",
    "host_state_larger": "evidence.studies.host_state_seeds",
    "host_state_larger_small_rate": "evidence.studies.host_state_seeds",
    "factored_moments": "evidence.studies.factored_moments",
    "changed_weights": "evidence.studies.changed_weights",
    "compression": "evidence.studies.compression.study",
    "what_fits": "evidence.studies.what_fits",
    **{f"{WHAT_IF}/{name}": "experiments.sweeps.studies" for name in _QUESTIONS},
}
"""Module of each study, which exports it as STUDY, or several as STUDIES."""


def names(group: str | None = None) -> tuple[str, ...]:
    """Return the keys of the studies that this installation has, or of a group's, in order."""
    return tuple(
        key
        for key, module in _MODULES.items()
        if (group is None or key.startswith(f"{group}/")) and (_is_clone() or not _proves(module))
    )


def _is_clone() -> bool:
    return (Path(__file__).resolve().parents[2] / _EVIDENCE / "studies").is_dir()


def _proves(module: str) -> bool:
    return module.startswith(f"{_EVIDENCE}.")


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
        elif key in _MODULES:
            raise ConfigError(
                f"{name} needs the folder evidence/, which no wheel contains: install from a "
                'clone of the repository, with pip install -e "."'
            )
        else:
            raise ConfigError(f"no {'figure' if group else 'study'} is called {name!r}: "
                              + _hint(name, known, group))  # fmt: skip
    return tuple(found)


def _hint(name: str, known: Sequence[str], group: str | None) -> str:
    short = [key.removeprefix(f"{group}/") for key in known]
    near = difflib.get_close_matches(name.lower().replace("-", "_"), short, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(short)}"
