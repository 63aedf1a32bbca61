"""Knobs: the settings of the update rule that may change while a run goes on.

Everything else of a ``ZenFlowConfig`` is fixed when the optimizer is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from zenflow.config import ZenFlowConfig, unknown_name
from zenflow.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Settings that a controller decides; units and checks are those of ``ZenFlowConfig``."""

    topk_ratio: float
    """Fraction k of each block's columns that the device owns, in [0, 1]."""
    update_interval: int
    """Number of steps in a window, S, from one upload of deferred weights to the next."""
    select_interval: int
    """Number of steps between two selections of the important columns; 0 selects once."""

    @classmethod
    def of(cls, config: ZenFlowConfig) -> Knobs:
        """Return the knobs as a configuration has them.

        >>> Knobs.of(ZenFlowConfig(update_interval=2)).update_interval
        2
        """
        return cls(
            topk_ratio=config.topk_ratio,
            update_interval=config.update_interval,
            select_interval=config.select_interval_steps,
        )

    def applied_to(self, config: ZenFlowConfig) -> ZenFlowConfig:
        """Return the configuration with these knobs; its rules check them.

        Raises:
            ConfigError: A knob breaks its rule.
        """
        return replace(config, select_strategy="step", **asdict(self))

    def to_dict(self) -> dict[str, Any]:
        """Return every knob by name, JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Knobs:
        """Return the knobs that ``to_dict`` gave.

        Raises:
            ConfigError: A knob is missing or unknown, or breaks its rule.
        """
        known = [field.name for field in fields(cls)]
        for key in mapping:
            if key not in known:
                raise ConfigError(f"knob {unknown_name(key, known)}")
        missing = [name for name in known if name not in mapping]
        if missing:
            raise ConfigError(
                f"knobs need {', '.join(known)}, but {', '.join(missing)} is missing"
            )
        knobs = cls(**mapping)
        knobs.applied_to(ZenFlowConfig())
        return knobs

    def __str__(self) -> str:
        """Return the knobs in a few words, as in 'k=0.1 S=4 select=100'."""
        return f"k={self.topk_ratio:g} S={self.update_interval} select={self.select_interval}"
