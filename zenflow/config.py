"""ZenFlowConfig: all settings of the update rule, checked together.

Names follow DeepSpeed's where DeepSpeed has them. The simulator takes the very object that the
engine takes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, get_args

from zenflow.checks import is_number
from zenflow.errors import ConfigError, raise_violations, unknown_name
from zenflow.host_state import MOST_WAITING, GradientLink, HostState, SecondMoment, Uploads
from zenflow.presets import PRESET_CHANGES, PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "PRESETS",
    "GradientLink",
    "HostState",
    "SecondMoment",
    "SelectStrategy",
    "UpdateRule",
    "Uploads",
    "ZenFlowConfig",
    "raise_violations",
    "unknown_name",
]

SelectStrategy = Literal["step", "epoch"]
UpdateRule = Literal["exact", "published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZenFlowConfig:
    """The settings of the update rule; the defaults are the preset ``zenflow``.

    Both update rules leave important columns to the device, as in ZenFlow (arXiv 2505.12242).
    ``update_rule`` says how the host updates the others.

    No field has a value "auto". A controller (``zenflow.controller``) may change the window length
    while a run goes on; ``update_interval`` is then its first value.

    Raises:
        ConfigError: One or more rules are broken; the message lists them all.
    """

    topk_ratio: float = 0.1
    """Fraction k of each block's columns that the device owns and updates each step, in [0, 1]."""

    select_strategy: SelectStrategy = "step"
    """Unit of ``select_interval``: optimizer steps or epochs of ``steps_per_epoch`` steps."""

    select_interval: int = 100
    """Number of steps (or epochs) between two selections of important columns; 0 selects once."""

    steps_per_epoch: int | None = None
    """Number of optimizer steps in an epoch; needed with ``select_strategy="epoch"`` only."""

    update_interval: int = 4
    """Number of steps in a window, S, from one upload of deferred weights to the next.

    Under the exact rule the host takes an AdamW step for every gradient in between, and under the
    published rule one step for their mean.
    """

    overlap_step: bool = True
    """Whether a host update overlaps the following steps; if not, the step waits for it."""

    update_rule: UpdateRule = "exact"
    """Update rule of the columns that the host owns.

    - ``exact``: the host takes an AdamW step for every gradient. Blocks end their windows in turn,
      1/S of them in each step, and an update lands one step later. Until a gradient's update has
      landed, the device moves the weights by the gradient's expected share of AdamW's motion.
    - ``published``: the host takes one AdamW step for the mean of a window's gradients. All
      blocks end their windows together, and an update lands S steps later.
    """

    forward_delay: bool = True
    """Whether forwards aim at AdamW's weights of some steps before, under the exact rule.

    True leaves weights about as much noise as AdamW's, which fine-tuning needs. False is for
    training from random weights, which ends somewhat lower without that noise. Fine-tuning on few
    sentences fits them too soon with False.
    """

    queue_depth: int | None = None
    """Largest number q of a column's gradients that wait on the host for one pass over its state.

    Changes the host's memory and traffic, and with ``host_state="float32"`` no result. None takes
    the largest depth up to 4 and S that the host's memory allows. The published rule sums
    gradients and has no queue.
    """

    host_state: HostState = "float32"
    """Format of the host's weights and moments.

    - ``float32``: 12 bytes a parameter, AdamW bit for bit.
    - ``compact``: 5.03 bytes: weights of 24 bits, moments of 8 bits with an exponent for each 64.
      All are rounded at random, once in a pass over the state. So ``queue_depth`` is part of the
      result: None is the smaller of 4 and S there. For the exact rule only.
    """

    gradient_link: GradientLink = "model"
    """Format in which deferred gradients leave the device and wait on the host.

    - ``model``: the parameter's dtype.
    - ``e4m3``: 1.02 bytes a number: eight bits, rounded to nearest, with an exponent for each 64.
      Selection, clipping and the device's own columns use the gradient as it is. For the exact
      rule with overlapped updates only.
    """

    uploads: Uploads = "all"
    """Weights that come back to the device at a window's end.

    - ``all``: all deferred weights of the block.
    - ``changed``: those whose two bytes are others than at the last upload, with a bit for each
      weight, where the learning rate is at most a thousandth of the weights' size. Such blocks
      take no fresh steps. For fine-tuning in bfloat16 by the exact rule with overlapped updates.
    """

    second_moment: SecondMoment = "element"
    """Second moments of split parameters, host's and device's columns alike.

    - ``element``: one of each element, as AdamW has them.
    - ``factored``: one of each row and each column of a matrix, as Adafactor has them. The device
      divides gradients by their roots, and first moments are averages of the quotients. Saves
      the second moments' memory: 4 bytes a parameter, or one with ``host_state="compact"``. The
      rule is another optimizer than AdamW: as good in fine-tuning, and often worse from random
      weights. For the exact rule only.
    """

    full_warm_up_rounds: int = 0
    """Number of first steps W in which every update lands inside its own step: plain AdamW."""

    importance_decay: float = 0.9
    """Decay of scores, moving averages of squared column norms, in [0, 1); 0 keeps one step."""

    hysteresis: float = 0.1
    """Fraction by which a column's score must exceed an important one's to take its place."""

    min_split_elements: int = 1 << 16
    """Least number of elements of a parameter that is split between device and host.

    Smaller parameters and all 1-D ones stay on the device whole: their state is small, and
    splitting would cost more time than their update.
    """

    block_elements: int | None = None
    """Largest number of elements in a block; None takes 1/(8 S) of all split elements.

    Blocks have whole columns, so rounding may exceed it. With None a block has at least 64 columns
    and 2^15 elements, unless its parameter has fewer.
    """

    def __post_init__(self) -> None:
        """Check all rules, then make numbers plain ``int`` and ``float``."""
        raise_violations("ZenFlowConfig", _violations(self))
        for name in (*_UNIT_INTERVALS, *_NON_NEGATIVE):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in _COUNTS:
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else int(value))

    @property
    def select_interval_steps(self) -> int:
        """Number of optimizer steps between two selections; 0 for a single selection."""
        if self.select_strategy == "step":
            return self.select_interval
        return self.select_interval * (self.steps_per_epoch or 0)

    @property
    def is_exact(self) -> bool:
        """Whether the host takes an AdamW step for every gradient."""
        return self.update_rule == "exact"

    @property
    def is_compact(self) -> bool:
        """Whether the host's weights and moments are rounded to fewer bytes."""
        return self.host_state == "compact"

    @property
    def is_factored(self) -> bool:
        """Whether a second moment is the product of a row's and a column's."""
        return self.second_moment == "factored"

    @property
    def rounds_gradients(self) -> bool:
        """Whether the host gets gradients rounded to eight bits."""
        return self.gradient_link == "e4m3"

    @property
    def uploads_changes(self) -> bool:
        """Whether uploads may have changed weights alone."""
        return self.uploads == "changed"

    @property
    def rolling(self) -> bool:
        """Whether blocks end their windows in turn, or all together."""
        return self.is_exact

    def effective_lag(self, update_interval: int | None = None) -> int:
        """Return the steps from an update's start to its landing with the S in force.

        Args:
            update_interval: S in force; None is this configuration's own.

        Returns:
            0 without overlap; with it 1, or S under the published rule.
        """
        if not self.overlap_step:
            return 0
        if self.is_exact:
            return 1
        return self.update_interval if update_interval is None else update_interval

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ZenFlowConfig:
        """Return one of ``PRESETS``, or ``zero_infinity``, with ``changes`` on top.

        Raises:
            ConfigError: The preset or a changed key is unknown, or a rule is broken.
        """
        if name not in PRESET_CHANGES:
            raise ConfigError(f"preset {unknown_name(name, tuple(PRESET_CHANGES))}")
        return cls.from_dict({**PRESET_CHANGES[name], **changes})

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> ZenFlowConfig:
        """Return the configuration with the mapping's values and defaults elsewhere.

        Raises:
            ConfigError: A key is unknown (the message names the nearest known one), or a rule
                is broken.
        """
        known = [field.name for field in fields(cls)]
        broken = [
            f"key {key!r} is no longer a setting: {_REMOVED}"
            if key in _FORMER_KEYS
            else f"key {unknown_name(key, known)}"
            for key in mapping
            if key not in known
        ]
        raise_violations("ZenFlowConfig", broken)
        return cls(**mapping)

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, JSON-ready: the inverse of ``from_dict``."""
        return asdict(self)


_UNIT_INTERVALS = ("topk_ratio", "importance_decay")
_NON_NEGATIVE = ("hysteresis",)
_SWITCHES = ("overlap_step", "forward_delay")
# Least value of each count; None is allowed where the default is None.
_COUNTS = {
    "select_interval": 0,
    "steps_per_epoch": 1,
    "update_interval": 1,
    "queue_depth": 1,
    "full_warm_up_rounds": 0,
    "min_split_elements": 0,
    "block_elements": 1,
}
_OPTIONAL = ("steps_per_epoch", "queue_depth", "block_elements")
_FORMER_KEYS = ("lag", "rolling", "deferred_moments", "deferred_lr_scale", "prediction")
_REMOVED = (
    "the exact rule needs none of its kind; leave it out, or set update_rule to 'published' for "
    "the paper's windows"
)
_CHOICES = {
    "select_strategy": get_args(SelectStrategy),
    "update_rule": get_args(UpdateRule),
    "host_state": get_args(HostState),
    "gradient_link": get_args(GradientLink),
    "uploads": get_args(Uploads),
    "second_moment": get_args(SecondMoment),
}
# Settings that a format of fewer bytes needs: the format, and each setting with its value.
_NEEDED: dict[tuple[str, str], dict[str, object]] = {
    ("gradient_link", "e4m3"): {
        "update_rule": "exact",
        "overlap_step": True,
        "full_warm_up_rounds": 0,
    },
    ("uploads", "changed"): {"update_rule": "exact", "overlap_step": True},
    ("second_moment", "factored"): {"update_rule": "exact"},
}


def _violations(config: ZenFlowConfig) -> list[str]:
    """Return rule, value and remedy of each broken rule: first each field's, then across."""
    # Rules across fields mean something only where each field does.
    return list(_field_violations(config)) or list(_cross_violations(config))


def _field_violations(config: ZenFlowConfig) -> Iterator[str]:
    for name in _UNIT_INTERVALS:
        value = getattr(config, name)
        open_end = name == "importance_decay"
        inside = is_number(value) and value <= 1 and not (open_end and value == 1)
        if not inside:
            interval = "[0, 1)" if open_end else "[0, 1]"
            yield f"{name} must be a number in {interval}, got {value!r}: it is a share"
    for name in _NON_NEGATIVE:
        value = getattr(config, name)
        if not is_number(value):
            yield f"{name} must be a finite number >= 0, got {value!r}: 0 switches it off"
    for name, least in _COUNTS.items():
        value = getattr(config, name)
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
            none = " or None" if name in _OPTIONAL else ""
            yield f"{name} must be an integer >= {least}{none}, got {value!r}: {_remedy(name)}"
    for name in _SWITCHES:
        value = getattr(config, name)
        if not isinstance(value, bool):
            yield f"{name} must be True or False, got {value!r}: give a bool"
    for name, choices in _CHOICES.items():
        value = getattr(config, name)
        if value not in choices:
            yield f"{name} must be one of {', '.join(choices)}, got {value!r}: choose one"


def _cross_violations(config: ZenFlowConfig) -> Iterator[str]:
    if config.select_strategy == "epoch" and config.steps_per_epoch is None:
        yield (
            "steps_per_epoch must be given with select_strategy='epoch', got None: give the "
            "optimizer steps in an epoch, or use select_strategy='step'"
        )
    if config.host_state == "compact" and (config.queue_depth or 1) > MOST_WAITING:
        yield (
            f"queue_depth must be at most {MOST_WAITING} with host_state='compact', got "
            f"{config.queue_depth}: no more gradients wait for one pass over the state"
        )
    if config.host_state == "compact" and config.update_rule != "exact":
        yield (
            "host_state must be 'float32' under the published rule, got 'compact': leave it out, "
            "or set update_rule to 'exact'"
        )
    if config.second_moment == "factored" and config.topk_ratio == 1:
        yield (
            "topk_ratio must be less than 1 with second_moment='factored', got 1: all parameters "
            "stay on the device then, with AdamW's second moments; leave second_moment out"
        )
    for (setting, chosen), needed in _NEEDED.items():
        if getattr(config, setting) != chosen:
            continue
        for name, fits in needed.items():
            value = getattr(config, name)
            if value != fits:
                yield (
                    f"{name} must be {fits!r} with {setting}={chosen!r}, got {value!r}: change "
                    f"it, or leave {setting} out"
                )


def _remedy(name: str) -> str:
    if name == "update_interval":
        return "a window that follows the training is set by a controller, not by a string"
    return "give a whole number"
