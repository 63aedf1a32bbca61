"""ZenFlow: train with the optimizer's state on the host, without waiting for the host.

    from zenflow import ZenFlowAdamW, ZenFlowConfig

    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-4, config=ZenFlowConfig())

Names are loaded when first used, so that the simulator and the command line's help, which need
settings and timelines only, never load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zenflow.config import PRESETS, ZenFlowConfig
    from zenflow.controller import (
        AbstractController,
        AbstractIntervalController,
        FixedInterval,
        LoggedDecisions,
    )
    from zenflow.deepspeed.read import DeepSpeedSchedule, DeepSpeedSettings, read_deepspeed
    from zenflow.errors import (
        CheckpointError,
        ConfigError,
        DeadlineError,
        GradientError,
        NormError,
        WorkerError,
        ZenFlowError,
    )
    from zenflow.knobs import Knobs
    from zenflow.lanes.copies import PacedLink
    from zenflow.optimizer import ZenFlowAdamW
    from zenflow.report import MemoryPlan, StepReport, WindowNorms
    from zenflow.surface.lr_schedule import deepspeed_lr_scheduler
    from zenflow.surface.shared_controller import SharedController
    from zenflow.surface.stream_weights import stream_weights
    from zenflow.trace.timeline import LANES, Span, Timeline, compare

__version__ = "0.1.0"
"""The version of the package; pyproject.toml reads it here."""

__all__ = [
    "LANES",
    "PRESETS",
    "AbstractController",
    "AbstractIntervalController",
    "CheckpointError",
    "ConfigError",
    "DeadlineError",
    "DeepSpeedSchedule",
    "DeepSpeedSettings",
    "FixedInterval",
    "GradientError",
    "Knobs",
    "LoggedDecisions",
    "MemoryPlan",
    "NormError",
    "PacedLink",
    "SharedController",
    "Span",
    "StepReport",
    "Timeline",
    "WindowNorms",
    "WorkerError",
    "ZenFlowAdamW",
    "ZenFlowConfig",
    "ZenFlowError",
    "__version__",
    "compare",
    "deepspeed_lr_scheduler",
    "read_deepspeed",
    "stream_weights",
]

_HOMES: dict[str, tuple[str, ...]] = {
    "zenflow.config": ("PRESETS", "ZenFlowConfig"),
    "zenflow.controller": (
        "AbstractController",
        "AbstractIntervalController",
        "FixedInterval",
        "LoggedDecisions",
    ),
    "zenflow.deepspeed.read": ("DeepSpeedSchedule", "DeepSpeedSettings", "read_deepspeed"),
    "zenflow.errors": (
        "CheckpointError",
        "ConfigError",
        "DeadlineError",
        "GradientError",
        "NormError",
        "WorkerError",
        "ZenFlowError",
    ),
    "zenflow.knobs": ("Knobs",),
    "zenflow.optimizer": ("ZenFlowAdamW",),
    "zenflow.report": ("MemoryPlan", "StepReport", "WindowNorms"),
    "zenflow.trace.timeline": ("LANES", "Span", "Timeline", "compare"),
    "zenflow.lanes.copies": ("PacedLink",),
    "zenflow.surface.lr_schedule": ("deepspeed_lr_scheduler",),
    "zenflow.surface.shared_controller": ("SharedController",),
    "zenflow.surface.stream_weights": ("stream_weights",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'zenflow' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # next time Python finds it without asking here
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted(__all__)
