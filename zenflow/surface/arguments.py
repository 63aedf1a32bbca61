"""The optimizer's arguments, checked before any work: rule, value, remedy."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zenflow.columns.device_rows import NamedParam
from zenflow.config import ZenFlowConfig
from zenflow.controller import AbstractController
from zenflow.errors import ConfigError
from zenflow.host.limits import usable_cores
from zenflow.host.ranks import ranks_on_this_machine

_log = logging.getLogger(__name__)

TRAINED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that a trainable parameter may have."""

SETTINGS = ("lr", "betas", "eps", "weight_decay")
"""AdamW's settings, which every parameter group has."""

OTHER_RULES = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
}
"""Settings of torch's groups that would ask for another update, each with its only valid value."""


def named_params(param_groups: Sequence[dict[str, Any]]) -> list[NamedParam]:
    """Return every trainable parameter with its group's index and a name for messages.

    Raises:
        ValueError: A parameter is sparse, of another dtype, made under `torch.inference_mode` or
            given twice, or two share one storage.
    """
    named = []
    storages: dict[int, NamedParam] = {}
    for group_index, group in enumerate(param_groups):
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            name = names[index] if names else f"group {group_index}, parameter {index}"
            if not param.requires_grad:
                continue
            if param.dtype not in TRAINED:
                raise ValueError(
                    f"{name} is {param.dtype}: only float32, bfloat16 and float16 are trained; "
                    "cast the model first, then make the optimizer"
                )
            if param.is_inference():
                raise ValueError(made_for_inference(name))
            if param.layout != torch.strided:
                raise ValueError(
                    f"{name} is a {param.layout} tensor: only dense parameters are trained; use "
                    "param.to_dense()"
                )
            item = NamedParam(param, name, group_index)
            # A streamed parameter has several places, and its page knows that they are its own.
            key = item.data.untyped_storage().data_ptr() if item.page is None else id(param)
            other = storages.setdefault(key, item)
            if other.param is param and other is not item:
                raise ValueError(f"{name} is {other.name} again: give each parameter once")
            if other is not item and item.data.numel():
                raise ValueError(
                    f"{name} and {other.name} are two parameters over one storage: tie "
                    "them by using the same nn.Parameter in both modules"
                )
            named.append(item)
    return named


def made_for_inference(name: str) -> str:
    """Return the message for a parameter that autograd leaves out for good."""
    return (
        f"{name} was made under torch.inference_mode(), and what is made there can't be trained: "
        "make, load or move the model outside of it, then make the optimizer; torch.no_grad() "
        "does no such harm"
    )


def checked_config(config: object) -> ZenFlowConfig:
    """Return the settings of the update rule; the preset "zenflow" for None.

    Raises:
        TypeError: The argument is something else, such as a dict of settings.
    """
    if config is None:
        return ZenFlowConfig()
    if isinstance(config, ZenFlowConfig):
        return config
    remedy = "ZenFlowConfig(**config)" if isinstance(config, dict) else "ZenFlowConfig(...)"
    raise TypeError(
        f"config must be a ZenFlowConfig or None, got {type(config).__name__}: pass {remedy}, or "
        "zenflow.read_deepspeed(...).config for a DeepSpeed JSON"
    )


def note_unused(**flags: bool | None) -> None:
    """Log the flags of torch's AdamW that were given and have no effect here."""
    given = [name for name, value in flags.items() if value is not None]
    if given:
        _log.info("%s: of no effect here, they choose among torch's own", ", ".join(given))


def check_settings(lr: Any, betas: Any, eps: float, weight_decay: float) -> None:
    """Check the settings of AdamW.

    Raises:
        TypeError: The learning rate is no number.
        ValueError: A setting breaks its rule; the message lists all that do.
    """
    if isinstance(lr, str):
        raise TypeError(f"lr must be a number, got the text {lr!r}: write 0.001 for 1e-3 in YAML")
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"an lr that is a tensor must have one element, got {lr.numel()}")
    rules = [
        (float(lr) >= 0, f"lr must be at least 0, got {lr}"),
        (
            len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
            f"betas must be two numbers in [0, 1), got {betas}",
        ),
        (eps >= 0, f"eps must be at least 0, got {eps}"),
        (weight_decay >= 0, f"weight_decay must be at least 0, got {weight_decay}"),
    ]
    broken = [text for holds, text in rules if not holds]
    if broken:
        raise ValueError("; ".join(broken))


def check_gradients(offload_gradients: object, max_grad_norm: object) -> None:
    """Check the mode of the gradients, and the norm that step() clips them to.

    Raises:
        ValueError: One of the two breaks its rule.
    """
    if offload_gradients not in ("release", "keep"):
        raise ValueError(
            f'offload_gradients must be "release" or "keep", got {offload_gradients!r}'
        )
    if max_grad_norm is not None:
        check_norm(
            max_grad_norm, "max_grad_norm", "None does not clip; offload_gradients is the mode"
        )


def check_norm(norm: object, name: str, remedy: str) -> None:
    """Check a norm that gradients are to be clipped to.

    Raises:
        ValueError: The norm is no positive number.
    """
    is_number = isinstance(norm, (int, float, torch.Tensor)) and norm is not True
    if not is_number or not norm > 0:  # type: ignore[operator]
        raise ValueError(f"{name} must be a positive number, got {norm!r}: {remedy}")


def check_group(group: Mapping[str, Any]) -> None:
    """Check a parameter group's settings.

    Raises:
        TypeError: The learning rate is no number.
        ValueError: A setting breaks its rule, or asks for another update than AdamW's.
    """
    check_settings(group["lr"], group["betas"], group["eps"], group["weight_decay"])
    for name, only in OTHER_RULES.items():
        if group.get(name, only) != only:
            raise ValueError(
                f"{name}={group[name]} in a parameter group is for torch's own AdamW: this "
                f"optimizer has {name}={only} only; leave it out"
            )


def common_device(named: Sequence[NamedParam]) -> torch.device:
    """Return the device of all parameters.

    Raises:
        ValueError: The parameters are on several devices, or there is no parameter.
    """
    if not named:
        raise ValueError(
            "there is no trainable parameter: set requires_grad before the optimizer is made"
        )
    devices = {item.device for item in named}
    if len(devices) != 1:
        raise ValueError(
            f"all trainable parameters must be on one device, got {sorted(map(str, devices))}: "
            "move the model there before the optimizer is made"
        )
    return devices.pop()


def default_host_threads(cores: int | None = None) -> int:
    """Return the number of host threads: all cores but a quarter, at most four, for the others.

    The others are the training thread, autograd's, and on a GPU the copy lanes'; of two cores
    they have one. The host's update is bound by memory long before the last core. Ranks that
    torchrun starts on one machine divide its cores.

    Args:
        cores: Cores of this process; None for an equal share of the machine's.
    """
    if cores is None:
        cores = max(1, usable_cores() // ranks_on_this_machine())
    return max(1, cores - min(4, max(1, cores // 4)))


def least_topk_ratio_for(config: ZenFlowConfig, controller: AbstractController) -> float:
    """Return the smallest k for which the host's memory is laid out.

    Raises:
        ConfigError: The controller would change a k that can't be changed, or to one that can't.
    """
    least, ratio = controller.least_topk_ratio, config.topk_ratio
    if least is None or least == ratio:
        return ratio
    if not (0 < least < 1 and 0 < ratio < 1):
        raise ConfigError(
            f"a topk_ratio that changes must stay between 0 and 1, but it starts at {ratio:g} and "
            f"{type(controller).__name__} may go down to {least:g}: 0 and 1 place parameters "
            "for good; start above 0 and below 1, and bound the controller likewise"
        )
    return min(least, ratio)
