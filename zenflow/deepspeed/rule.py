"""From DeepSpeed's ``zero_optimization`` to the update rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zenflow.deepspeed import keys
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from zenflow.config import ZenFlowConfig
    from zenflow.deepspeed.reading import Reading

_READ_ZERO = ("stage", "zenflow", "offload_optimizer", "offload_param", "cpu_offload")
_READ_ZENFLOW = (
    "topk_ratio", "select_strategy", "select_interval", "update_interval", "overlap_step",
    "full_warm_up_rounds", "steps_per_epoch",
)  # fmt: skip

AUTO_START = 1
"""S where ``update_interval`` is "auto": a controller lengthens windows as training settles."""


WITHOUT_EPOCHS = 100
"""Steps from one selection to the next where that is "auto" and epochs are unknown."""


def read_rule(
    reading: Reading,
    zero: dict[str, Any],
    preset: Callable[..., ZenFlowConfig],
    steps_per_epoch: int | None,
) -> ZenFlowConfig:
    """Return the update rule; an invalid one is noted, and a default returned in its place.

    Args:
        reading: Takes what can't be honoured.
        zero: The section ``zero_optimization``, which is emptied.
        preset: ``ZenFlowConfig.preset``: makes the rule from a preset's name and changes.
        steps_per_epoch: Optimizer steps in an epoch; None where the caller doesn't say.
    """
    offloads = _offloads(reading, zero)
    zenflow = zero.pop("zenflow", None)
    stage = zero.pop("stage", 0)
    if stage not in (0, 1, 2, 3):
        reading.refused.append(f"zero_optimization.stage must be 0..3, got {stage!r}: correct it")
    elif stage == 3:  # 1 and 2 cut up what is on the host; 3 would cut up the model as well
        reading.unused.append("zero_optimization.stage")
    prefix = "zero_optimization."
    reading.sort(zero, prefix, keys.UNUSED_ZERO, keys.REFUSED_ZERO, _READ_ZERO)
    if zenflow is None:
        return preset("zero_offload" if offloads else "on_device")
    if not offloads:
        reading.refused.append(
            "zero_optimization.zenflow must go with offload_optimizer, got none: "
            'add "offload_optimizer": {"device": "cpu"}'
        )
    section = reading.section(zenflow, "zero_optimization.zenflow")
    changes = _rule(reading, section, steps_per_epoch)
    try:
        return preset("zenflow_paper", **changes)
    except ConfigError as error:
        reading.refused.append(f"zero_optimization.zenflow: {error}")
        return preset("zenflow")


def _offloads(reading: Reading, zero: dict[str, Any]) -> bool:
    """Return whether optimizer states are on the host."""
    param = reading.section(zero.pop("offload_param", None), "zero_optimization.offload_param")
    if param.get("device", "none") not in ("none", None):
        reading.refused.append(
            f"zero_optimization.offload_param.device must be none, got {param['device']!r}: "
            "parameters stay on the device; remove offload_param"
        )
    name = "zero_optimization.offload_optimizer"
    section = reading.section(zero.pop("offload_optimizer", None), name)
    legacy = "cpu" if zero.pop("cpu_offload", False) else "none"
    device = section.pop("device", legacy) or "none"
    if device not in ("cpu", "none"):
        reading.refused.append(
            f"{name}.device must be cpu or none, got {device!r}: states are held in memory"
        )
    reading.sort(section, f"{name}.", keys.UNUSED_OFFLOAD, {}, ("device",))
    return device != "none"


def _rule(
    reading: Reading, section: dict[str, Any], steps_per_epoch: int | None
) -> dict[str, Any]:
    """Return the section's changes to the preset ``zenflow_paper``; see DeepSpeed's defaults."""
    prefix = "zero_optimization.zenflow."
    in_file = section.pop("steps_per_epoch", None)
    steps_per_epoch = in_file if steps_per_epoch is None else steps_per_epoch
    interval = section.pop("update_interval", "auto")
    if reading.is_auto(interval, f"{prefix}update_interval"):
        interval = AUTO_START
    changes = {
        "update_interval": interval,
        "overlap_step": section.pop("overlap_step", False),
        "topk_ratio": section.pop("topk_ratio", 0.1),
        "full_warm_up_rounds": section.pop("full_warm_up_rounds", 0),
        **_selection(reading, section, steps_per_epoch),
    }
    reading.sort(section, prefix, keys.UNUSED_ZENFLOW, {}, _READ_ZENFLOW)
    return changes


def _selection(
    reading: Reading, section: dict[str, Any], steps_per_epoch: int | None
) -> dict[str, Any]:
    """Return when important columns are selected: by epochs and each one, unless it says."""
    prefix = "zero_optimization.zenflow."
    strategy = section.pop("select_strategy", "auto")
    interval = section.pop("select_interval", "auto")
    if reading.is_auto(strategy, f"{prefix}select_strategy"):
        if not reading.is_auto(interval, f"{prefix}select_interval"):
            reading.refused.append(
                f"{prefix}select_interval must be 'auto' with select_strategy 'auto', got "
                f"{interval!r}: set select_strategy to 'step' or 'epoch'"
            )
        if steps_per_epoch is None:
            reading.notes.append(
                f"{prefix}select_strategy is 'auto', once an epoch, but steps_per_epoch is not "
                f"known: columns are selected every {WITHOUT_EPOCHS} steps; pass steps_per_epoch="
            )
            return {"select_strategy": "step", "select_interval": WITHOUT_EPOCHS}
        strategy, interval = "epoch", 1
    elif interval == "auto":
        reading.refused.append(
            f"{prefix}select_interval must be a number with select_strategy {strategy!r}, got "
            "'auto' (its default): give steps or epochs"
        )
        interval = 1
    if interval == 0:  # once: then an epoch's length does not matter
        return {"select_strategy": "step", "select_interval": 0}
    if strategy == "epoch" and steps_per_epoch is None:
        reading.refused.append(
            f"{prefix}select_strategy goes by epochs, but steps_per_epoch is not "
            "known: pass steps_per_epoch=, or set select_strategy to 'step'"
        )
        steps_per_epoch = 1
    return {
        "select_strategy": strategy,
        "select_interval": interval,
        "steps_per_epoch": steps_per_epoch,
    }
