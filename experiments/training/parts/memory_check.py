"""Whether a run's optimizer fits host and device, asked before any of it is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from experiments.training.parts.ranks.ranks import ALONE, Ranks
from sim.memory.engine import EngineMemory, engine_memory
from zenflow.errors import NoRoomError
from zenflow.host.limits import free_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zenflow.config import ZenFlowConfig


def memory_of_engine(
    model: nn.Module, config: ZenFlowConfig, *, on_drive: bool = False
) -> EngineMemory:
    """Return the memory that one engine takes for a model, all ranks' parts together.

    Args:
        model: The model, of which only shapes and dtypes are looked at.
        config: The update rule.
        on_drive: Whether the host's states are on a drive.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    element_bytes = min((p.element_size() for p in trained), default=0)
    shapes = [tuple(p.shape) for p in trained]
    return engine_memory(shapes, config, element_bytes, on_drive=on_drive)


def check_host_memory(
    model: nn.Module,
    config: ZenFlowConfig,
    *,
    on_cpu: bool,
    on_drive: bool = False,
    ranks: Ranks = ALONE,
    beside: int = 0,
) -> None:
    """Refuse a run whose optimizer can't have the memory that it allocates at once.

    Only what is sure is counted, states and staging: activations and gradients may still be too
    much. Gradients that wait are counted where the configuration says how many; otherwise they
    take what memory is left.

    Args:
        model: With its parameters where they will be trained.
        config: The update rule.
        on_cpu: Whether the device's share is in the host's memory too.
        on_drive: Whether the host's states are on a drive.
        ranks: Processes that share the run; those of this machine share its memory.
        beside: Bytes that the run takes beside the optimizer's state.

    Raises:
        NoRoomError: There is not as much; the message says how much and what limits it.
    """

    def least(config: ZenFlowConfig, *, on_drive: bool) -> int:
        own = _least_bytes(model, config, on_cpu=on_cpu, on_drive=on_drive, ranks=ranks)
        return beside + own

    def remedies() -> Iterator[str]:
        if not config.is_exact:
            return
        small = replace(config, host_state="compact", queue_depth=1)
        if not config.is_compact and (size := least(small, on_drive=on_drive)) <= free:
            rule = "the rule" if config.is_factored else "AdamW"
            yield (
                f"; --host-state compact --queue-depth 1 needs {size / 1e9:.1f} GB, and is {rule} "
                "within rounding"
            )
        away = replace(config, topk_ratio=0.0, queue_depth=1)
        may_leave = not on_drive and ranks.count == 1
        if may_leave and (size := least(away, on_drive=True)) <= free:
            flags = "--topk-ratio 0 " * (config.topk_ratio != 0) + "--queue-depth 1 --state-dir"
            yield (
                f"; in one run of fixed settings, {flags} FOLDER needs {size / 1e9:.1f} GB, and "
                "the optimizer's states are on the folder's drive"
            )

    needed = least(config, on_drive=on_drive)
    free, limit = free_bytes()
    ranks.collect(None)  # nobody allocates before all have looked
    if needed > free:
        raise NoRoomError(
            f"the optimizer needs {needed / 1e9:.1f} GB of host memory, and {limit} leaves "
            f"{max(0.0, free) / 1e9:.1f} GB: free some, raise the limit, or train a smaller model "
            f"(zenflow plan says what a machine can do){''.join(remedies())}; --no-memory-check "
            "tries it"
        )


def check_device_memory(
    model: nn.Module,
    config: ZenFlowConfig,
    device: torch.device,
    ranks: Ranks = ALONE,
    *,
    beside: int = 0,
) -> None:
    """Refuse a run whose optimizer can't have the GPU memory that it allocates at once.

    Only what is sure is counted: masters and moments of the device's columns and of parameters
    that stay there whole, and the ring. Gradients and activations come on top.

    Args:
        model: The model, on the device or to come there.
        config: The update rule.
        device: The GPU.
        ranks: Processes that share the run.
        beside: Bytes that have yet to come there: the model's own.

    Raises:
        NoRoomError: Some rank's device has not as much; all ranks raise it.
    """
    plan = memory_of_engine(model, config).plan(has_ring=True)
    needed = plan.device_extra_bytes + plan.device_ring_bytes
    if ranks.parallel == "fsdp":  # where each has its own rows
        needed //= ranks.count
    needed += beside
    free = min(ranks.collect(free_on(device)))
    if needed > free:
        remedy = ""
        if 0 < config.topk_ratio < 1:
            remedy = f", or a smaller --topk-ratio than {config.topk_ratio:g}"
        raise NoRoomError(
            f"the optimizer needs {needed / 1e9:.1f} GB on {device} "
            f"{'with' if beside else 'beside'} the model, and "
            f"{free / 1e9:.1f} GB are free there: free some, take a strategy that keeps its state "
            f"on the host{remedy} (zenflow plan says what fits); --no-memory-check tries it"
        )


def free_on(device: torch.device) -> int:
    """Return the bytes of a GPU that this process may still allocate."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused)


def _least_bytes(
    model: nn.Module, config: ZenFlowConfig, *, on_cpu: bool, on_drive: bool, ranks: Ranks
) -> int:
    """Return the bytes that the ranks of this machine allocate on the host at least."""
    own = memory_of_engine(model, config, on_drive=on_drive)
    plan = replace(own, depth=own.host.depth(0.0)).plan(has_ring=not on_cpu)
    on_device = plan.device_extra_bytes if on_cpu else 0
    if ranks.parallel == "ddp":  # where each device has all of its part
        on_device *= ranks.count
    return (plan.host_bytes + on_device) * ranks.place.local_count // ranks.count
