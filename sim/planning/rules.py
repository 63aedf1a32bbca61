"""Rules: the update that each strategy makes of a gradient, and its distance from AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sim.simulate import Strategy
from zenflow.config import ZenFlowConfig

WORTH = 1.1
"""Speed-up that a rule must bring to be preferred to one that is nearer to AdamW by 1."""


@dataclass(frozen=True, slots=True)
class PresetRule:
    """Update rule of a preset of the engine, and its distance from AdamW."""

    words: str
    """Update rule in words; it decides accuracy, of which predictions say nothing."""
    distance: int
    """Distance of the rule from AdamW, from records of losses under `evidence/results`."""
    is_baseline: bool = False
    """Whether the preset is there to compare with: recommended only where no other fits."""


PRESET_RULES: Mapping[str, PresetRule] = {
    "on_device": PresetRule("AdamW exactly", 0),
    "zero_offload": PresetRule("AdamW exactly", 0),
    "zero_infinity": PresetRule("AdamW exactly", 0, is_baseline=True),
    "delayed": PresetRule("AdamW with every update one step late", 2, is_baseline=True),
    "zenflow_paper": PresetRule(
        "the published rule: not AdamW's moments, updates up to 2 S - 1 steps late",
        4,
        is_baseline=True,
    ),
    "zenflow": PresetRule(
        "AdamW for every gradient; the host's columns land once in S steps, estimated meanwhile", 1
    ),
}
"""Rule of each preset; other systems' are in their records."""

FEW_BYTES: Mapping[str, str] = {
    "gradient_link": "e4m3",
    "uploads": "changed",
    "second_moment": "factored",
}
"""Settings of fewer bytes, which are held where they are asked for."""

EXACT = tuple(
    name for name, rule in PRESET_RULES.items() if not (rule.distance or rule.is_baseline)
)
"""Presets whose rule is AdamW exactly, without those to compare with."""
BASELINES = tuple(name for name, rule in PRESET_RULES.items() if rule.is_baseline)
"""Presets to compare with."""


_STATE = "the host's state is rounded at random, to 24 bits and 8"
_GRADIENTS = "the host's gradients are rounded to 8 bits"


def rounds(config: ZenFlowConfig) -> bool:
    """Whether any state or gradient is rounded to fewer bytes than AdamW's."""
    return (config.is_compact or config.rounds_gradients) and config.topk_ratio < 1


def _rounded(config: ZenFlowConfig) -> str:
    """Return the numbers that are rounded, in words."""
    parts = [_STATE] * config.is_compact + [_GRADIENTS] * config.rounds_gradients
    return f"{', '.join(parts)}: within rounding of AdamW"


_FACTORED = "second moments are of rows and columns, as Adafactor's: another optimizer than AdamW"


def _departures(config: ZenFlowConfig) -> str:
    """Return a rule's departures from AdamW's numbers, in words; "" for none."""
    parts = [_FACTORED] * config.is_factored
    return "; ".join([*parts, _rounded(config)] if rounds(config) else parts)


def rule_of(strategy: Strategy) -> str:
    """Return a strategy's rule in words."""
    config = strategy.config
    if config is None:
        system = strategy.system
        if system.options(strategy.options).get("float32_master", True):
            return system.rule
        return f"{system.rule.removesuffix(' exactly')}, without float32 masters"
    if strategy.name == "zenflow" and not config.is_exact:
        return PRESET_RULES["zenflow_paper"].words
    words = PRESET_RULES[strategy.name].words
    departures = _departures(config)
    return f"{words.removesuffix(' exactly')}; {departures}" if departures else words


def distance(strategy: Strategy) -> int:
    """Return the distance of a preset's rule from AdamW: 0 is AdamW itself.

    Longer windows are farther; so are no columns on the device at all, state that is rounded, and
    second moments of rows and columns.
    """
    config = strategy.config
    assert config is not None
    if strategy.name == "zenflow" and not config.is_exact:
        return PRESET_RULES["zenflow_paper"].distance
    far = PRESET_RULES[strategy.name].distance + rounds(config) + config.is_factored
    if strategy.name != "zenflow":
        return far
    far += max(0, (config.update_interval - 1).bit_length() - 2)  # 4 steps are the default
    return far + (config.topk_ratio == 0)
