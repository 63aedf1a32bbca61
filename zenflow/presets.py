"""Strategies as settings of one engine, so that a comparison compares rules only.

``on_device``, ``zero_offload`` and ``delayed`` are the baselines, ``zenflow_paper`` is the
published rule, ``zenflow`` is ours (the defaults of ``ZenFlowConfig``). A sixth one,
``zero_infinity``, has the rule of ``zero_offload`` and other places for weights and states.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

PRESET_CHANGES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Every column on the device: plain AdamW.
        "on_device": {"topk_ratio": 1.0},
        # Every column on the host, updated inside each step: ZeRO-Offload.
        "zero_offload": {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False},
        # As `zero_offload`, but landing one step late, behind the next step's compute.
        "delayed": {"update_rule": "published", "topk_ratio": 0.0, "update_interval": 1},
        # The paper's: aligned windows that land a whole window late.
        "zenflow_paper": {"update_rule": "published"},
        "zenflow": {},
        # The rule of ZeRO-Infinity, whose weights visit the device, with states on a drive.
        "zero_infinity": {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False},
    }
)
"""Changes that each preset makes to the defaults of ``ZenFlowConfig``."""

ZERO_INFINITY = "zero_infinity"
"""Preset that is run with streamed weights and a state folder, and by no other places."""

PRESETS: tuple[str, ...] = tuple(name for name in PRESET_CHANGES if name != ZERO_INFINITY)
"""Names of the presets that differ in the rule alone, baselines first."""
