"""Streamed weights at the optimizer's surface: which optimizers can train them."""

from __future__ import annotations

from collections.abc import Sequence

from zenflow.columns.device_rows import NamedParam
from zenflow.columns.placement import why_resident
from zenflow.config import ZenFlowConfig
from zenflow.step.options import EngineOptions
from zenflow.streaming.stream import WeightStream


def stream_of(named: Sequence[NamedParam]) -> WeightStream | None:
    """Return the stream of some parameters' weights; None where all stay on the device.

    Raises:
        ValueError: Parameters are of several models that are streamed, or another optimizer trains
            some already.
    """
    streams = {item.page.stream for item in named if item.page is not None}
    if not streams:
        return None
    if len(streams) > 1:
        raise ValueError(
            f"the parameters are of {len(streams)} streamed models: make an optimizer for each, "
            "or stream them as one model"
        )
    stream = streams.pop()
    if stream.has_optimizer:
        raise ValueError(
            "another ZenFlowAdamW trains the streamed model already: close() that one first"
        )
    return stream


def check_streamed(
    named: Sequence[NamedParam],
    config: ZenFlowConfig,
    options: EngineOptions,
    *,
    is_shared: bool,
) -> None:
    """Refuse settings with which streamed weights can't be trained.

    Args:
        named: Every trainable parameter.
        config: Settings of the update rule.
        options: How the engine runs.
        is_shared: Whether ranks share parameters or the host's work.

    Raises:
        ValueError: A setting breaks its rule.
    """
    if is_shared:
        raise ValueError(
            "streamed weights are trained by one process: leave process_group and FSDP2 out, or "
            "shard the model in place of streaming its weights"
        )
    if not options.releases:
        raise ValueError(
            "streamed weights need gradients that leave during backward, as a full card has no "
            'room for all of them: make the optimizer with offload_gradients="release"'
        )
    for item in named:
        if item.page is not None and (reason := why_resident(item.param, config)) is not None:
            raise ValueError(
                f"{item.name} is streamed, but its optimizer state would stay on the device "
                f"({reason}): choose a topk_ratio below 1 and a smaller min_split_elements, or "
                "name other layers for stream_weights()"
            )
