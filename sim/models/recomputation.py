"""Recomputation: which layers backward computes again, and what of them.

- A share of the layers, evenly spread, each as a whole. A half is every second layer
  (torchtitan's `selective_ac_option` 2), 20/32 are 20 of 32 (Megatron's `recompute_num_layers`
  with its block method).
- `BY_OPERATION`: of every layer all but attention's output and every second product's, from the
  first one on (torchtitan, `selective_ac_option` "op": distributed/activation_checkpoint.py,
  until 2025 in parallelisms/parallelize_llama.py). Of Llama's layer these are the outputs of
  queries' product, values', the gate's and the last one's. Where the last one is not kept, it is
  not computed again either: nothing needs it, and PyTorch's checkpoints stop before it
  (`set_checkpoint_early_stop`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sim.models.shapes.parts import Layer, Parameter

BY_OPERATION = "op"
Recomputation = float | str
"""A share of the layers, True being all and False none, or `BY_OPERATION`."""

_ROUNDING = 1e-9
"""Rounding error of a number of layers, as of 49 times 1/49."""


def violations(
    asked: Recomputation, layers: Sequence[Layer], attention: str, *, is_traced: bool
) -> Iterator[str]:
    """Yield the rules that a workload's recomputation breaks.

    Args:
        asked: Work that backward is to compute again.
        layers: Layers of the model.
        attention: Kernels of attention.
        is_traced: Whether times come from a trace.
    """
    if asked == BY_OPERATION:
        yield from _violations_by_operation(layers, attention, is_traced=is_traced)
    elif not isinstance(asked, int | float) or not 0 <= asked <= 1:
        yield (
            f"checkpointing must be a share of the layers from 0 to 1, or {BY_OPERATION!r}, got "
            f"{asked!r}: every second layer is 1/2"
        )


def _violations_by_operation(
    layers: Sequence[Layer], attention: str, *, is_traced: bool
) -> Iterator[str]:
    if attention == "eager":
        yield (
            f"checkpointing {BY_OPERATION!r} keeps the output of fused attention, got "
            f"{attention!r}: take attention 'fused'"
        )
    inner = [layer for layer in layers if layer.is_inner]
    if any(not _is_llamas(layer) for layer in inner):
        yield (
            f"checkpointing {BY_OPERATION!r} is known of Llama's family without experts: take a "
            "share of the layers"
        )
    if is_traced:
        yield (
            f"checkpointing {BY_OPERATION!r} can't be told from a trace: take a share of the "
            "layers, or leave the trace out"
        )


def _is_llamas(layer: Layer) -> bool:
    attends = layer.mixer is not None and layer.mixer.is_attention and not layer.mixer.between
    return attends and layer.is_gated and not layer.routed


def recomputed(layers: Sequence[Layer], asked: Recomputation) -> list[bool]:
    """Return whether each layer is recomputed, as a whole or in part, in the order of forward.

    Of n layers between embedding and head it is the share of n, rounded down. No other layer is.
    """
    share = 1.0 if isinstance(asked, str) else asked
    found, count = [], 0
    for layer in layers:
        before = math.floor(count * share + _ROUNDING)
        count += layer.is_inner
        found.append(math.floor(count * share + _ROUNDING) > before)
    return found


def kept_products(layer: Layer) -> tuple[list[Parameter], Parameter | None]:
    """Return the matrices whose products are kept by operation, in the order of forward.

    The layer's last one, whose product backward does not read, stands by itself; None where it is
    not kept.
    """
    matrices = _matrices(layer)
    return matrices[:-1:2], matrices[-1] if len(matrices) % 2 else None


def products_again(layer: Layer) -> list[Parameter]:
    """Return the matrices whose products are computed again by operation."""
    return _matrices(layer)[1:-1:2]


def _matrices(layer: Layer) -> list[Parameter]:
    return [parameter for parameter in layer.parameters if len(parameter.shape) > 1]
