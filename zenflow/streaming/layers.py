"""Layers of a model: which weights are streamed, and which stay on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's layers in order: the members of its largest lists of equal modules.

    An encoder and a decoder of one model have a list each. A list inside of a layer, such as that
    of its experts, is a part of the layer.

    Raises:
        ValueError: The model has no list of equal modules.
    """
    found: list[tuple[int, list[nn.Module]]] = []
    inside: set[int] = set()
    for module in model.modules():  # outer ones first
        children = list(dict.fromkeys(module)) if isinstance(module, nn.ModuleList) else []
        if id(module) in inside or len(children) < 2 or len(set(map(type, children))) > 1:
            continue
        inside |= {id(part) for child in children for part in child.modules()}
        found.append((sum(p.numel() for p in module.parameters()), children))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no list of equal layers (torch.nn.ModuleList): name the "
            "modules whose weights are streamed, in the order of forward, with layers=[...]"
        )
    most = max(size for size, _ in found)
    # A list of small adapters or convolutions beside the layers is not worth a page each.
    return [child for size, children in found if 10 * size >= most for child in children]


def check_layers(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Check layers that a user has named.

    Raises:
        ValueError: A layer is not the model's, is given twice, or is inside of another.
    """
    names = {id(module): name for name, module in model.named_modules()}
    inside: dict[int, str] = {}
    for layer in layers:
        if id(layer) not in names:
            raise ValueError(
                f"a {type(layer).__name__} of layers is no part of the model: take modules of "
                "model.named_modules()"
            )
        name = names[id(layer)]
        for part in layer.modules():
            if id(part) in inside:
                raise ValueError(
                    f"layers overlap: {name} and {inside[id(part)]} have modules in common; name "
                    "each weight's layer once"
                )
            inside[id(part)] = name


def streamed_params(
    model: nn.Module, layers: Sequence[nn.Module], least_elements: int
) -> Iterator[tuple[int, nn.Module, list[nn.Parameter]]]:
    """Yield (rank, layer, parameters that are streamed) of each layer that has such parameters.

    Vectors, small matrices, parameters that other layers or the rest of the model share, and those
    whose memory has gaps stay on the device.
    """
    inside = {id(part) for layer in layers for part in layer.modules()}
    outside = {
        id(param)
        for module in model.modules()
        if id(module) not in inside
        for param in module.parameters(recurse=False)
    }
    users = Counter(id(param) for layer in layers for param in layer.parameters())
    for rank, layer in enumerate(layers):
        params = [
            param
            for param in layer.parameters()
            if param.ndim >= 2
            and param.numel() >= least_elements
            and param.is_contiguous()
            and users[id(param)] == 1
            and id(param) not in outside
        ]
        if params:
            yield rank, layer, params
