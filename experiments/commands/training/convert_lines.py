"""Python lines that train as a DeepSpeed JSON says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from experiments.commands.training.config_file import nearest_preset
from zenflow.deepspeed.schedule import DeepSpeedSchedule
from zenflow.deepspeed.settings import DeepSpeedSettings

_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
_OF_THE_OPTIMIZER = ("lr", "betas", "eps", "weight_decay")


def python_lines(found: DeepSpeedSettings) -> list[str]:
    """Return the lines of a loop, which end with the body of its ``for``.

    They use ``model``, ``loader``, ``loss_of(model, batch)`` and the names that
    ``left_to_the_user`` returns.
    """
    strategy, knobs = nearest_preset(found)
    by_epochs = knobs.get("select_strategy") == "epoch"
    if by_epochs:
        knobs["steps_per_epoch"] = _Name("steps_per_epoch")
    is_auto = "update_interval" in found.auto_knobs
    if found.config.update_rule == "published":  # said although the preset has them, maybe
        own = ("topk_ratio", "update_interval", "overlap_step", "full_warm_up_rounds")
        knobs = {**{name: getattr(found.config, name) for name in own}, **knobs}
    accumulation = _accumulation(found)
    lines = ["import torch"] if found.dtype != "fp32" else []
    names = ["ZenFlowAdamW", "ZenFlowConfig"]
    if found.schedule is not None:
        names = ["DeepSpeedSchedule", *names, "deepspeed_lr_scheduler"]
    lines.append(f"from zenflow import {', '.join(names)}")
    if is_auto:
        lines.append("from autotune.online.zen_auto import ZenAuto")
    lines.append("")
    if found.dtype != "fp32":
        lines.append(f"model.to({_DTYPES.get(found.dtype or '', 'dtype')})")
    if by_epochs:
        per_step = "" if accumulation == 1 else f" // {accumulation!r}"
        lines.append(f"steps_per_epoch = len(loader){per_step}")
    lines += _call("config = ZenFlowConfig.preset", [_literal(strategy)], knobs)
    lines += _call("optimizer = ZenFlowAdamW", ["model.parameters()"], _arguments(found))
    lines += _scheduler(found.schedule)
    if found.dtype == "fp16":
        lines += _call("scaler = torch.amp.GradScaler", [], found.grad_scaler or {})
    return [*lines, "", *_loop(found, accumulation)]


def left_to_the_user(found: DeepSpeedSettings) -> list[str]:
    """Return the names that the lines use and that the file leaves to the program."""
    names = [name for name in _OF_THE_OPTIMIZER if name not in found.optimizer]
    if found.dtype is None:
        names.append("dtype")
    if "gradient_clipping" in found.auto:
        names.append("max_grad_norm")
    if isinstance(_accumulation(found), _Name):
        names.append("accumulation_steps")
    return names + list(_auto_steps(found.schedule))


def _arguments(found: DeepSpeedSettings) -> dict[str, Any]:
    """Return the optimizer's arguments behind the parameters."""
    arguments: dict[str, Any] = {
        name: found.optimizer.get(name, _Name(name)) for name in _OF_THE_OPTIMIZER
    }
    arguments["config"] = _Name("config")
    if "update_interval" in found.auto_knobs:
        arguments["controller"] = _Name("ZenAuto()")
    if found.dtype != "fp16":
        arguments["offload_gradients"] = "release"
        arguments["max_grad_norm"] = _norm(found)
        if _accumulation(found) != 1:
            arguments["accumulation_steps"] = _accumulation(found)
    return arguments


class _Name(str):
    """A name in the lines, where a string would have quotes."""

    def __repr__(self) -> str:
        return str(self)


def _norm(found: DeepSpeedSettings) -> Any:
    return _Name("max_grad_norm") if "gradient_clipping" in found.auto else found.max_grad_norm


def _accumulation(found: DeepSpeedSettings) -> Any:
    if "gradient_accumulation_steps" in found.auto:
        return _Name("accumulation_steps")
    return found.batch_on(found.num_gpus or 1)[1] or 1


def _auto_steps(schedule: DeepSpeedSchedule | None) -> dict[str, _Name]:
    """Return arguments for the numbers of steps that a schedule needs and that are "auto"."""
    if schedule is None:
        return {}
    needed = {"warmup_steps": schedule.warmup_steps, "total_steps": schedule.total_steps}
    if schedule.kind == "WarmupLR":
        del needed["total_steps"]
    return {name: _Name(name) for name, value in needed.items() if value is None}


def _scheduler(schedule: DeepSpeedSchedule | None) -> Iterator[str]:
    if schedule is None:
        yield "# The file has no scheduler: the learning rate is constant."
        return
    defaults = DeepSpeedSchedule(kind=schedule.kind)
    changes = {
        field.name: value
        for field in fields(schedule)
        if (value := getattr(schedule, field.name)) != getattr(defaults, field.name)
    }
    yield from _call("schedule = DeepSpeedSchedule", [], {"kind": schedule.kind, **changes})
    steps = _auto_steps(schedule)
    yield from _call("scheduler = deepspeed_lr_scheduler", ["optimizer", "schedule"], steps)


def _loop(found: DeepSpeedSettings, accumulation: Any) -> Iterator[str]:
    accumulates = accumulation != 1
    yield "for number, batch in enumerate(loader, 1):" if accumulates else "for batch in loader:"
    divided = f" / {accumulation!r}" if accumulates else ""
    loss = f"loss_of(model, batch){divided}"
    is_fp16 = found.dtype == "fp16"
    if is_fp16:
        yield f"    scaler.scale({loss}).backward()"
    elif accumulates:
        yield f"    ({loss}).backward()"
    else:
        yield f"    {loss}.backward()"
    if accumulates:
        yield f"    if number % {accumulation!r} == 0:"
    body = _scaled_step(found) if is_fp16 else _step(found)
    yield from (f"{'        ' if accumulates else '    '}{line}" for line in body)


def _step(found: DeepSpeedSettings) -> Iterator[str]:
    yield "optimizer.step()"
    if found.schedule is not None:
        yield "scheduler.step()"


def _scaled_step(found: DeepSpeedSettings) -> Iterator[str]:
    if found.schedule is not None:
        yield "scale = scaler.get_scale()"
    norm = _norm(found)
    if norm is not None:
        yield f"optimizer.clip_grad_norm_({norm!r})"
    yield "scaler.step(optimizer)"
    yield "scaler.update()"
    yield "optimizer.zero_grad()  # what a step that overflowed has left"
    if found.schedule is not None:
        yield "if scaler.get_scale() >= scale:  # a step that overflowed is none"
        yield "    scheduler.step()"


def _literal(value: Any) -> str:
    return json.dumps(value) if type(value) is str else repr(value)


def _call(start: str, arguments: list[str], named: Mapping[str, Any]) -> list[str]:
    """Return a call in as many lines as it takes."""
    parts = [*arguments, *(f"{name}={_literal(value)}" for name, value in named.items())]
    line = f"{start}({', '.join(parts)})"
    return [line] if len(line) <= 88 else [f"{start}(", *(f"    {part}," for part in parts), ")"]
