"""The five strategies as settings of one engine, so that a comparison compares rules only.

``on_device``, ``zero_offload`` and ``delayed`` are the baselines, ``zenflow_paper`` is the
published rule, ``zenflow`` is ours (the defaults of ``ZenFlowConfig``).
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
    }
)
"""Changes that each preset makes to the defaults of ``ZenFlowConfig``."""

PRESETS: tuple[str, ...] = tuple(PRESET_CHANGES)
"""Names of the presets, baselines first."""
