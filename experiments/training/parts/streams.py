"""Whether and how the weights of a run's layers are streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.training.parts.memory_check import free_on, memory_of_engine

if TYPE_CHECKING:
    import torch
    from torch import nn

    from experiments.training.settings.training import TrainSettings
    from zenflow.config import ZenFlowConfig

FOR_ACTIVATIONS = 0.5
"""Share of a GPU's free memory below which ``--stream auto`` lets layers visit. Those for which
steps show room stay after all, so that a share too large costs two slow steps and host memory."""


def stream_arguments(
    model: nn.Module, config: ZenFlowConfig, device: torch.device, settings: TrainSettings
) -> dict[str, Any] | None:
    """Return the arguments of `stream_weights` for a run; None where its weights stay.

    Args:
        model: The model, on the CPU.
        config: The update rule.
        device: Device that computes.
        settings: The run's settings.
    """
    if settings.stream == "no":
        return None
    if settings.stream == "auto" and not _fills(model, config, device):
        return None
    return {
        "resident_layers": settings.resident_layers,
        "offload_activations": settings.offload_activations,
    }


def _fills(model: nn.Module, config: ZenFlowConfig, device: torch.device) -> bool:
    """Whether weights and optimizer leave a device too little memory; a CPU's is the host's."""
    if device.type != "cuda":
        return False
    plan = memory_of_engine(model, config).plan(has_ring=True)
    weights = sum(p.nbytes for p in model.parameters())
    needed = weights + plan.device_extra_bytes + plan.device_ring_bytes
    return needed > (1 - FOR_ACTIVATIONS) * free_on(device)
