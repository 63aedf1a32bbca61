"""Assembly: from parameter groups and settings to a running engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from zenflow.columns.device_rows import NamedParam, Resident
from zenflow.columns.host_shares import HostShares
from zenflow.columns.layout import SplitParam
from zenflow.columns.placement import build_layout, is_split
from zenflow.columns.shards import Shards, check_same
from zenflow.config import ZenFlowConfig
from zenflow.controller import AbstractController, FixedInterval
from zenflow.device.base import AbstractDevice
from zenflow.device.cpu import CpuDevice
from zenflow.device.cuda import CudaDevice
from zenflow.device.kernels.choice import kernels_for
from zenflow.host.limits import free_bytes
from zenflow.host.memory import is_refused
from zenflow.host.ranks import num_ranks
from zenflow.host_state import state_bytes
from zenflow.rule.adamw import Hyper
from zenflow.rule.sizes import AUTOMATIC_DEPTH
from zenflow.step.engine import Engine
from zenflow.step.host.changed import check_changed
from zenflow.step.options import EngineOptions
from zenflow.surface.arguments import (
    common_device,
    default_host_threads,
    least_topk_ratio_for,
    named_params,
)
from zenflow.surface.drive import check_on_drive, put_on_drive
from zenflow.surface.streamed import check_streamed, stream_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger(__name__)


def start_engine(
    param_groups: Sequence[dict[str, Any]],
    config: ZenFlowConfig,
    *,
    options: EngineOptions,
    process_group: ProcessGroup | None,
    controller: AbstractController | None,
    settings: Mapping[str, Any],
) -> tuple[Engine, list[SplitParam | Resident]]:
    """Allocate the state of all trainable parameters and start the threads that work on it.

    Args:
        param_groups: The parameters, and AdamW's settings of each group.
        config: Settings of the update rule.
        options: How the engine runs.
        process_group: Ranks whose hosts share the work; None for none.
        controller: Chooses the knobs; None keeps the config's.
        settings: Further values that must be equal on all ranks which share parameters or the
            host's work.

    Returns:
        The engine, and every trainable parameter's place in registration order.

    Raises:
        ValueError: The parameters do not go together, or not with the link.
        MemoryError: The host has too little memory.
        RuntimeError: The system gives too few threads.
    """
    named = named_params(param_groups)
    shards = Shards.of(named, options.wait_timeout)
    where = common_device(named)
    shares = HostShares.of(named, process_group, options.wait_timeout)
    sharing = shards.group or shares.group
    _check_ranks(controller, releases=options.releases and sharing is None)
    stream = stream_of(named)
    _check_together(
        named, config, options, is_shared=sharing is not None, has_stream=stream is not None
    )
    device = bind(where, options.wait_timeout)
    device.kernels = kernels_for(options.kernels, where, device.kernels)
    own = _shared_settings(named, param_groups, config, controller)
    check_same(sharing, {**settings, **own, "kernels": device.kernels.name})
    if options.link is not None and not device.is_synchronous:
        raise ValueError("link emulates a link for a CPU device: leave it out on a GPU")
    options = replace(options, host_threads=options.host_threads or default_host_threads())
    _log.info("the host's rows have %d threads", options.host_threads)
    deciding = controller or FixedInterval(config.update_interval)
    largest = max(config.update_interval, deciding.largest_interval or 0)
    ending = ExitStack()
    ending.callback(device.close)  # memory that stays pinned can't be pinned by the next attempt
    if stream is not None:
        ending.callback(stream.stop_training)
        stream.start_training()
    try:
        layout = build_layout(
            named,
            config,
            device,
            least_topk_ratio=least_topk_ratio_for(config, deciding),
            largest_interval=largest,
            shards=shards,
            shares=shares,
            on_drive=options.state_dir is not None,
        )
        drive = None
        if options.state_dir is not None:
            drive = put_on_drive(layout, config, options, ending)
        engine = Engine(
            layout,
            config,
            device,
            deciding,
            options,
            hypers=lambda: [Hyper.of(group) for group in param_groups],
            largest_interval=_longest_window(largest, deciding),
            ending=ending,
            stream=stream,
            drive=drive,
        )
        deciding.attach(engine)
    except BaseException as error:
        ending.close()
        if is_refused(error):
            raise MemoryError(_too_much(named, config, options)) from error
        raise
    places = {place.param: place for place in layout.places}
    return engine, [places[item.param] for item in named]


def _check_together(
    named: Sequence[NamedParam],
    config: ZenFlowConfig,
    options: EngineOptions,
    *,
    is_shared: bool,
    has_stream: bool,
) -> None:
    """Refuse what does not go with the parameters, with ranks, or with each other."""
    has_drive = options.state_dir is not None
    if options.offload_sums and is_shared:
        raise ValueError(
            "offload_sums is for one process: leave it out under a process_group or FSDP2, where "
            "sums wait in gradient buckets"
        )
    if has_stream:
        check_streamed(named, config, options, is_shared=is_shared)
    if has_drive:
        check_on_drive(config, is_shared=is_shared)
    if config.uploads_changes:
        check_changed(
            [item.data for item in named if is_split(item.param, config)],
            is_shared=is_shared,
            has_stream=has_stream,
            has_drive=has_drive,
        )


def _too_much(named: Sequence[NamedParam], config: ZenFlowConfig, options: EngineOptions) -> str:
    """Return the message for host memory that the system refused."""
    count = sum(item.data.numel() for item in named)
    free, limit = free_bytes()
    state = (
        f"the state of {count:,} parameters takes at least "
        f"{state_bytes(config.host_state, 1, count, config.second_moment):,} bytes"
    )
    remedy = ""
    if options.state_dir is not None:
        state = f"gradients of {count:,} parameters wait there, though states are on a drive"
    elif config.is_exact:
        remedy = ", put the states on a drive (state_dir and topk_ratio=0, in one process)"
    return (
        f"the host has too little memory for the optimizer: {state}, and {limit} leaves "
        f"{max(free, 0):,.0f}. Free memory, raise that limit{remedy}, or train fewer parameters; "
        "zenflow plan says what a run needs"
    )


def _shared_settings(
    named: Sequence[NamedParam],
    param_groups: Sequence[dict[str, Any]],
    config: ZenFlowConfig,
    controller: AbstractController | None,
) -> dict[str, Any]:
    """Return the settings that decide about columns, which must be equal on all ranks."""
    params = [(item.name, tuple(item.param.shape), str(item.param.dtype)) for item in named]
    return {
        "config": config.to_dict(),
        "controller": type(controller).__name__,
        "parameters": [(*param, item.group) for param, item in zip(params, named, strict=True)],
        "parameter groups": [str(Hyper.of(group)) for group in param_groups],
    }


def add_residents(engine: Engine, param_groups: Sequence[dict[str, Any]]) -> list[Resident]:
    """Give the last group's trainable parameters a place on the device, and return it.

    Raises:
        ValueError: A parameter can't be trained, or is on another device.
    """
    group = len(param_groups) - 1
    named = [item for item in named_params(param_groups) if item.group == group]
    if not named:
        return []
    Shards.of([*engine.layout.places, *named])  # refuses another kind
    device = common_device(named)
    if device != engine.device.torch_device:
        raise ValueError(
            f"the group is on {device} and the optimizer's parameters on "
            f"{engine.device.torch_device}: move the model before parameters are added"
        )
    added = [Resident.of(item.param, item.name, group) for item in named]
    engine.layout.residents += added
    engine.layout.version += 1
    _log.info("%d parameters added: they stay on the device", len(added))
    return added


def _longest_window(known: int, controller: AbstractController) -> int:
    """Return the largest S to allocate for: the controller's, or the first S if it names none."""
    is_known = isinstance(controller, FixedInterval) or controller.largest_interval is not None
    return known if is_known else max(known, AUTOMATIC_DEPTH)


def _check_ranks(controller: AbstractController | None, *, releases: bool) -> None:
    """Refuse a mode that ranks can't use, and a controller that could decide otherwise by rank."""
    ranks = num_ranks()
    if releases and ranks > 1:
        raise ValueError(
            "release mode takes gradients before data-parallel ranks have averaged them: under "
            "DistributedDataParallel give a process_group and call release_from(model), or use "
            'offload_gradients="keep" and clip after backward'
        )
    if controller is not None and controller.follows_clock and ranks > 1:
        raise ValueError(
            f"{type(controller).__name__} decides by the clock, and {ranks} ranks would "
            "decide differently: let the first one decide for all by SharedController"
        )


def bind(device: torch.device, wait_timeout: float) -> AbstractDevice:
    """Return the device operations for a torch device; a wait longer than `wait_timeout` fails.

    Raises:
        ValueError: The device is neither a CPU nor CUDA.
    """
    if device.type == "cuda":
        return CudaDevice(device, wait_timeout)
    if device.type == "cpu":
        return CpuDevice(device)
    raise ValueError(
        f"parameters are on {device}: move the model to a cuda device (or the CPU) before the "
        "optimizer is made"
    )
