"""Rules: what each strategy makes of a gradient, and how far that is from AdamW. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from sim.simulate import Strategy

RULES: Mapping[str, str] = {
    "on_device": "AdamW exactly",
    "zero_offload": "AdamW exactly",
    "delayed": "AdamW with every update one step late",
    "zenflow_paper": "the published rule: not AdamW's moments, updates up to 2 S - 1 steps late",
    "zenflow": "AdamW's moments; the host's columns change once in S steps",
    "published_on_device": "AdamW exactly",
    "published_zero_offload": "AdamW exactly",
    "published_delayed": "AdamW with every update one step late",
    "deepspeed_zero_offload": "AdamW exactly",
    "deepspeed_zenflow": "the release's own rule, not AdamW's moments",
    "zero_infinity": "AdamW exactly",
    "deep_optimizer_states": "AdamW exactly",
    "layer_overlapped": "AdamW exactly, without clipping by a global norm",
    "superoffload": "AdamW exactly",
}
"""Update rule of each strategy in words: it decides accuracy, of which predictions say nothing."""

EXACT = ("on_device", "zero_offload")
"""Presets whose rule is AdamW exactly."""
BASELINES = ("delayed", "zenflow_paper")
"""Presets to compare with: recommended only where no other fits."""
WORTH = 1.1
"""Speed-up that a rule must bring to be preferred to one that is nearer to AdamW by 1."""

_DISTANCE: Mapping[str, int] = {"on_device": 0, "zero_offload": 0, "zenflow": 1, "delayed": 2}
"""How far a preset's rule is from AdamW, from records of losses under `experiments/results`."""
_FARTHEST = 4


def rule_of(strategy: Strategy) -> str:
    """Return a strategy's rule in words."""
    config = strategy.config
    if strategy.name == "zenflow" and config and config.deferred_moments == "window":
        return "moments of windows' means, not AdamW's; the host's columns change once in S"
    return RULES.get(strategy.name, "its own rule")


def distance(strategy: Strategy) -> int:
    """Return how far a preset's rule is from AdamW: 0 is AdamW itself.

    Longer windows are farther; so are a longer lag, moments of windows' means, and no columns on
    the device at all.
    """
    config = strategy.config
    assert config is not None
    far = _DISTANCE.get(strategy.name, _FARTHEST)
    if strategy.name != "zenflow":
        return far
    far += max(0, (config.update_interval - 1).bit_length() - 2)  # 4 steps are the default
    far += (config.deferred_moments == "window") + (config.effective_lag() > 1)
    return far + (config.topk_ratio == 0)
