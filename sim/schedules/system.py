"""A system that is not the engine: all that the simulator knows of it, in one record."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sim.memory.systems import SystemCase, SystemParts
from sim.schedules.schedule import AbstractSchedule
from zenflow.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Another system, by its papers, its code and measurements of it."""

    name: str
    """Name of the strategy."""
    rule: str
    """Update rule in words; it decides accuracy, of which predictions say nothing."""
    schedule: Callable[..., AbstractSchedule]
    """Maker of its schedule from a machine, a step's costs, and options by keyword."""
    memory: Callable[[SystemCase], SystemParts]
    """Function that returns its parts of memory."""

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return every option of the schedule: as given, or its default.

        Raises:
            ConfigError: The schedule has no such option.
        """
        parameters = inspect.signature(self.schedule).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        unknown = [name for name in given if name not in defaults]
        if unknown:
            raise ConfigError(
                f"{self.name} does not take {', '.join(unknown)}: its options are "
                f"{', '.join(defaults) or 'none'}"
            )
        return {**defaults, **given}
