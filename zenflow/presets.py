"""The five strategies as settings of one engine, so that a comparison compares rules only.

``on_device``, ``zero_offload`` and ``delayed`` are the baselines, ``zenflow_paper`` is the
published rule, ``zenflow`` is ours (the defaults of ``ZenFlowConfig``).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# The corrections of the published rule, switched off.
_PLAIN: dict[str, Any] = {
    "deferred_moments": "window",
    "deferred_lr_scale": "none",
    "rolling": False,
    "prediction": 0.0,
}

PRESET_CHANGES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Every column on the device: plain AdamW.
        "on_device": {"topk_ratio": 1.0},
        # Every column on the host, updated inside each step: ZeRO-Offload.
        "zero_offload": {
            **_PLAIN,
            "topk_ratio": 0.0,
            "update_interval": 1,
            "overlap_step": False,
            "lag": None,
        },
        # The same, landing one step late behind the next step's compute: delayed update.
        "delayed": {**_PLAIN, "topk_ratio": 0.0, "update_interval": 1, "lag": 1},
        # The paper's: aligned windows that land a whole window late.
        "zenflow_paper": {**_PLAIN, "topk_ratio": 0.1, "update_interval": 4, "lag": None},
        "zenflow": {},
    }
)
"""Changes that each preset makes to the defaults of ``ZenFlowConfig``."""

PRESETS: tuple[str, ...] = tuple(PRESET_CHANGES)
"""Names of the presets, baselines first."""
