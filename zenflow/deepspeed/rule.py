"""From DeepSpeed's ``zero_optimization`` to the update rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zenflow.checks import is_number
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from zenflow.deepspeed.reading import Reading

AUTO_START = 1
"""First S where ``update_interval`` is "auto": a controller may lengthen windows later."""


WITHOUT_EPOCHS = 100
"""Steps between two selections where ``select_interval`` is "auto" and epochs are unknown."""


def read_rule(
    reading: Reading,
    zero: dict[str, Any],
    steps_per_epoch: int | None,
) -> ZenFlowConfig:
    """Return the update rule; for an invalid one, note the errors and return the default.

    Args:
        reading: Takes what can't be honoured.
        zero: The section ``zero_optimization``, which is emptied.
        steps_per_epoch: Optimizer steps in an epoch; None where the caller doesn't say.
    """
    stage = zero.pop("stage", 0)
    offloads = _offloads(reading, zero, stage)
    zenflow = zero.pop("zenflow", None)
    if stage not in (0, 1, 2, 3):
        reading.correct("zero_optimization.stage", f"must be 0..3, got {stage!r}: correct it")
    elif stage == 3:  # 1 and 2 cut up what is on the host; 3 would cut up the model as well
        reading.unused.append("zero_optimization.stage")
    reading.sort(zero, "zero_optimization.")
    if zenflow is None:
        return ZenFlowConfig.preset("zero_offload" if offloads else "on_device")
    if not offloads:
        reading.correct(
            "zero_optimization.zenflow",
            'must go with offload_optimizer, got none: add "offload_optimizer": {"device": "cpu"}',
        )
    section = reading.section(zenflow, "zero_optimization.zenflow")
    changes = _rule(reading, section, steps_per_epoch)
    try:
        return ZenFlowConfig.preset("zenflow_paper", **changes)
    except ConfigError as error:
        reading.correct("zero_optimization.zenflow", f"breaks a rule: {error}")
        return ZenFlowConfig.preset("zenflow")


def _offloads(reading: Reading, zero: dict[str, Any], stage: object) -> bool:
    """Return whether optimizer states are on the host."""
    name = "zero_optimization.offload_param"
    param = reading.section(zero.pop("offload_param", None), name)
    device = param.pop("device", None) or "none"
    if device != "none":
        reading.correct(
            f"{name}.device",
            f"must be none, got {device!r}: parameters stay on the device; remove offload_param",
        )
    reading.sort(param, f"{name}.")
    name = "zero_optimization.offload_optimizer"
    section = reading.section(zero.pop("offload_optimizer", None), name)
    legacy = "cpu" if zero.pop("cpu_offload", False) else "none"
    device = section.pop("device", legacy) or "none"
    if device not in ("cpu", "none"):
        reading.correct(
            f"{name}.device", f"must be cpu or none, got {device!r}: states are held in memory"
        )
    ratio = section.get("ratio", 1.0)
    if stage != 3 and is_number(ratio) and ratio < 1:
        reading.correct(
            f"{name}.ratio",
            f"must go with stage 3 where it is below 1, as DeepSpeed checks, got {ratio!r} with "
            f"stage {stage!r}: leave it out",
        )
    reading.sort(section, f"{name}.")
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
    reading.sort(section, prefix)
    return changes


def _selection(
    reading: Reading, section: dict[str, Any], steps_per_epoch: int | None
) -> dict[str, Any]:
    """Return the settings of selections: once an epoch, unless the file says otherwise."""
    prefix = "zero_optimization.zenflow."
    strategy = section.pop("select_strategy", "auto")
    interval = section.pop("select_interval", "auto")
    if reading.is_auto(strategy, f"{prefix}select_strategy"):
        if not reading.is_auto(interval, f"{prefix}select_interval"):
            reading.correct(
                f"{prefix}select_interval",
                f"must be 'auto' with select_strategy 'auto', got {interval!r}: set "
                "select_strategy to 'step' or 'epoch'",
            )
        if steps_per_epoch is None:
            reading.notes.append(
                f"{prefix}select_strategy is 'auto', once an epoch, but steps_per_epoch is not "
                f"known: columns are selected every {WITHOUT_EPOCHS} steps; pass steps_per_epoch="
            )
            return {"select_strategy": "step", "select_interval": WITHOUT_EPOCHS}
        strategy, interval = "epoch", 1
    elif interval == "auto":
        reading.correct(
            f"{prefix}select_interval",
            f"must be a number with select_strategy {strategy!r}, got 'auto' (its default): give "
            "steps or epochs",
        )
        interval = 1
    if interval == 0:  # once: then an epoch's length does not matter
        return {"select_strategy": "step", "select_interval": 0}
    if strategy == "epoch" and steps_per_epoch is None:
        reading.correct(
            f"{prefix}select_strategy",
            "goes by epochs, but steps_per_epoch is not known: pass steps_per_epoch=, or set "
            "select_strategy to 'step'",
        )
        steps_per_epoch = 1
    return {
        "select_strategy": strategy,
        "select_interval": interval,
        "steps_per_epoch": steps_per_epoch,
    }
