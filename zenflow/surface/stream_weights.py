"""stream_weights: lets the weights of a model's layers live on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zenflow.host.limits import free_bytes
from zenflow.rule.sizes import LEAST_SLOTS, STREAMED_ELEMENTS, spread
from zenflow.streaming.activations import LayerInputs
from zenflow.streaming.hooks import hook
from zenflow.streaming.layers import check_layers, find_layers, streamed_params
from zenflow.streaming.page import Page, page_of
from zenflow.streaming.stream import WeightStream
from zenflow.streaming.transfers import UP
from zenflow.surface import assembly

_DISTRIBUTED = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


@torch.inference_mode(False)
def stream_weights(
    model: nn.Module,
    device: torch.device | str,
    *,
    layers: Sequence[nn.Module] | None = None,
    resident_layers: int | None = None,
    slots: int = 3,
    offload_activations: bool = False,
    least_elements: int = STREAMED_ELEMENTS,
    wait_timeout: float = 600.0,
) -> WeightStream:
    """Let the weights of a model's layers live on the host, and visit the device to be used.

    For models whose weights don't fit the device. A layer's weights come to the device before its
    forward and before its backward. Everything else of the model moves to the device for good.
    Call this before the optimizer is made; the result of training does not change by a bit.

    Vectors, matrices of fewer than 65,536 elements, and weights that layers share stay on the
    device, as do embeddings and output layers. Gradient checkpointing is advised: activations take
    the memory that weights have left.

    Args:
        model: Model on the CPU, whose dtype is the one to train with. Changed in place.
        device: Device that computes.
        layers: Modules whose weights are streamed, in the order of forward; None takes the
            members of the model's lists of equal layers (`torch.nn.ModuleList`).
        resident_layers: Number of layers that stay on the device, evenly spread over the depth.
            None lets as many stay as a GPU has room for, once two steps have shown their need, and
            fewer after a step that needs more. These have their place at home too.
        slots: Largest number of layers on the device beside these, at least 2. With 3, one
            computes, one comes, and one goes home.
        offload_activations: Whether layers' inputs wait on the host from forward to backward, but
            for those of the first and the last. Of use where each layer is checkpointed, and
            autograd keeps little else.
        least_elements: Number of elements below which a weight stays on the device.
        wait_timeout: Seconds after which a wait for a copy is an error.

    Returns:
        The stream: who is where, and the bytes that have moved. `close()` ends it.

    Raises:
        TypeError: The model is no module.
        ValueError: An argument breaks its rule, or the model can't be streamed.
        MemoryError: The host has too little memory for the weights.
        RuntimeError: The system can't pin so much memory.

    Examples:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        >>> stream = stream_weights(model, "cpu", layers=list(model), slots=2)
        >>> model(torch.ones(1, 256)).shape, stream.num_fetches, stream.most_here
        (torch.Size([1, 256]), 4, 2)
        >>> stream.close()
    """
    chosen = _checked_layers(model, layers)
    staying = resident_layers or 0
    if not 0 <= staying <= len(chosen):
        raise ValueError(
            f"resident_layers must be in 0..{len(chosen)}, the number of layers, got "
            f"{resident_layers}: {len(chosen)} keeps all on the device, None as many as fit"
        )
    if slots < LEAST_SLOTS:
        raise ValueError(
            f"slots must be at least {LEAST_SLOTS}, got {slots}: one layer computes while the "
            "next one comes"
        )
    stay = spread(len(chosen), staying)
    found = [
        each for each in streamed_params(model, chosen, least_elements) if each[0] not in stay
    ]
    if not found and staying < len(chosen):
        raise ValueError(
            f"the {len(chosen)} layers have no weight to stream: those of fewer than "
            f"{least_elements:,} elements, of gaps in memory, or shared with other layers stay on "
            "the device. Train the model without stream_weights(), or name other layers"
        )
    _check_host(found)
    where = torch.device(device)
    if where == torch.device("cuda"):
        where = torch.device("cuda", torch.cuda.current_device())
    _check_device(model, found, slots, where)
    bound = assembly.bind(where, wait_timeout)
    stream = WeightStream(bound, slots=slots, wait_timeout=wait_timeout)
    stream.lets_stay = resident_layers is None
    weakref.finalize(model, _end, stream.transfers, bound)
    try:
        for rank, (_, layer, params) in enumerate(found):
            page = Page(rank, layer, params, bound, UP)
            stream.add(page)
            hook(page)
        if offload_activations:
            LayerInputs(stream.transfers).watch(model, chosen, stream.ending)
        model._apply(lambda tensor: tensor if page_of(tensor) else tensor.to(where))
        for module in (model, *(page.module for page in stream.pages)):
            _guard(module, where)
            stream.ending.callback(vars(module).pop, "_apply")
    except BaseException:
        stream.close()
        raise
    stream.staying_bytes = sum(p.nbytes for p in model.parameters() if page_of(p) is None)
    return stream


def _checked_layers(model: object, layers: Sequence[nn.Module] | None) -> list[nn.Module]:
    """Return the layers that are streamed.

    Raises:
        TypeError: The model is no module.
        ValueError: The model or its layers can't be streamed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if type(model).__name__ in _DISTRIBUTED:
        raise ValueError(
            f"weights of {type(model).__name__} can't be streamed: that is for one process, with "
            "the plain model"
        )
    for name, param in model.named_parameters():
        if page_of(param) is not None:
            raise ValueError(f"the model is streamed already: close() that stream first ({name})")
        if param.is_meta:
            raise ValueError(
                f"{name} is on the meta device, without values: load the weights on the CPU first"
            )
        if hasattr(param, "placements"):
            raise ValueError(
                f"{name} is sharded over ranks (DTensor): stream_weights is for one process, with "
                "the plain model"
            )
        if hasattr(param, "quant_state") or not param.is_floating_point():
            raise ValueError(
                f"{name} is quantized ({param.dtype}): stream_weights moves weights as they are "
                "trained; load the model in bfloat16"
            )
    if layers is None:
        return find_layers(model)
    check_layers(model, layers)
    return list(layers)


def _check_host(found: Sequence[tuple[int, nn.Module, list[nn.Parameter]]]) -> None:
    """Refuse weights that don't fit the host beside the model, of which one layer is copied.

    Raises:
        MemoryError: They don't.
    """
    largest = max((sum(p.nbytes for p in params) for _, _, params in found), default=0)
    on_device = sum(p.nbytes for _, _, params in found for p in params if not p.is_cpu)
    free, limit = free_bytes()
    if largest + on_device > free:
        raise MemoryError(
            f"the host has too little memory for the streamed weights: {largest + on_device:,} "
            f"bytes are needed beside the model, and {limit} leaves {max(free, 0):,.0f}"
        )


def _check_device(
    model: nn.Module,
    found: Sequence[tuple[int, nn.Module, list[nn.Parameter]]],
    slots: int,
    where: torch.device,
) -> None:
    """Refuse a GPU that has too little memory for what stays there, and for the slots.

    Raises:
        MemoryError: It has.
    """
    if where.type != "cuda":
        return
    sizes = sorted((sum(p.nbytes for p in params) for _, _, params in found), reverse=True)
    staying = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    visiting = sum(sizes[:slots])
    free, _ = torch.cuda.mem_get_info(where)
    if staying + visiting > free:
        raise MemoryError(
            f"{where} has too little memory: {staying:,} bytes of the model stay there, "
            f"{slots} visiting layers take {visiting:,}, and {free:,} are free. Choose fewer "
            "slots or resident layers; zenflow plan says what a run needs"
        )


def _guard(module: nn.Module, where: torch.device) -> None:
    """Let `.to()` and its kind leave streamed weights alone, and refuse another place or dtype."""
    apply: Callable[..., nn.Module] = module._apply

    def guarded(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def kept(tensor: Tensor) -> Tensor:
            return tensor if page_of(tensor) is not None else fn(tensor)

        for tensor in module.parameters():
            if (page := page_of(tensor)) is not None:
                probe: Any = torch.empty_like(page.device_tensor(tensor)[:0], device=where)
                moved = fn(probe)
                if (moved.device, moved.dtype) != (probe.device, probe.dtype):
                    raise RuntimeError(
                        f"streamed weights can't be moved to {moved.device} or cast to "
                        f"{moved.dtype}: move and cast the model before stream_weights(), or "
                        "close() the stream first"
                    )
        return apply(kept, recurse)

    module._apply = guarded  # type: ignore[method-assign]


def _end(*parts: Any) -> None:
    """End the lanes and unpin memory, when the model is collected."""
    for part in parts:
        part.close()
