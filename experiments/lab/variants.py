"""The strategies by name: a preset, with a few of its knobs changed.

``zenflow k=0.01 S=16`` is the preset ``zenflow`` with another share k and interval S,
``zenflow state=compact gradients=e4m3`` the preset with both 8-bit formats; ``auto`` is
``zenflow`` under the tuner. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zenflow.config import PRESETS, ZenFlowConfig, unknown_name
from zenflow.errors import ConfigError

BASELINE = "on_device"
AUTO = "auto"
FEW_BYTES = (
    "zenflow state=compact",
    "zenflow gradients=e4m3",
    "zenflow state=compact gradients=e4m3",
)
"""The preset ``zenflow`` with fewer bytes in host memory, on the link, and both."""
STRATEGIES = (
    "zero_offload",
    "zenflow_paper",
    "zenflow_paper S=16",
    "zenflow",
    "zenflow S=16",
    "zenflow k=0.02",
    *FEW_BYTES,
    AUTO,
)
"""Compared with the baseline where nothing else is asked for."""

_KNOBS: Mapping[str, tuple[str, type]] = {
    "k": ("topk_ratio", float),
    "S": ("update_interval", int),
    "state": ("host_state", str),
    "gradients": ("gradient_link", str),
}
_CHANGEABLE = ("zenflow", "zenflow_paper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A strategy to train under."""

    name: str
    strategy: str
    """Name of the preset."""
    knobs: Mapping[str, Any]
    """Knobs that differ from the preset's."""
    controller: str | None = None
    """Controller of the knobs while the run goes on."""


def parse_variants(text: str) -> list[Variant]:
    """Return the variants that a list with commas names, the baseline first in any case.

    Raises:
        ConfigError: A name or a knob is unknown, or has an impossible value.
    """
    names = [" ".join(part.split()) for part in text.split(",")]
    wanted = dict.fromkeys([BASELINE, *(name for name in names if name)])
    return [parse_variant(name) for name in wanted]


def parse_variant(name: str) -> Variant:
    """Return the variant of this name.

    Raises:
        ConfigError: It is unknown, or a knob has an impossible value.
    """
    preset, *changes = name.split(" ")
    if preset not in (*PRESETS, AUTO):
        raise ConfigError(f"strategy {unknown_name(preset, (*PRESETS, AUTO))}")
    if changes and preset not in _CHANGEABLE:
        raise ConfigError(
            f"{', '.join(_KNOBS)} can be changed of {' and '.join(_CHANGEABLE)}, but not of "
            f"{preset!r}"
        )
    if preset == AUTO:
        return Variant(name=name, strategy="zenflow", knobs={}, controller="twin")
    knobs = dict(map(_knob, changes))
    ZenFlowConfig.preset(preset, **knobs)  # refuses what can't be
    return Variant(name=name, strategy=preset, knobs=knobs)


def _knob(change: str) -> tuple[str, Any]:
    short, equals, value = change.partition("=")
    if not equals or short not in _KNOBS:
        known = ", ".join(f"{key}=" for key in _KNOBS)
        raise ConfigError(f"a strategy is followed by {known} and a value, but got {change!r}")
    field, kind = _KNOBS[short]
    try:
        return field, kind(value)
    except ValueError as error:
        raise ConfigError(f"{short} must be {kind.__name__}, but is {value!r}") from error
