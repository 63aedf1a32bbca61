"""Hooks of a layer, which let its page come before forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zenflow.streaming.page import Page
from zenflow.streaming.stream import backward_number


def hook(page: Page) -> None:
    """Let a page come when its layer is used, and settle when its state is read or loaded."""
    stream = page.stream

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is not page.module:
            raise RuntimeError(
                "a copy of a streamed model can't be used: copy the model before stream_weights()"
            )
        again = backward_number() != -1
        if torch.is_grad_enabled() and not again and page.is_trained:
            page.in_graph = True
        stream.begin(page, backward=again)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if backward_number() != -1:
            return  # computed again in backward, which follows at once
        if torch.is_grad_enabled():
            given = {id(tensor) for tensor in _tensors((args, kwargs))}
            for tensor in _tensors(output):
                if tensor.requires_grad and id(tensor) not in given:
                    tensor.register_hook(backward_begins)
        stream.end()

    def backward_begins(_: Tensor) -> None:
        # An output that other layers pass on may get its gradient long after the layer was left.
        if page.left_in != backward_number():
            check_trained(page)
            stream.begin(page, backward=True)

    def settle(*_: Any) -> None:
        stream.settle(page)

    never_compiled: Callable[[Any], Any] = torch.compiler.disable
    module = page.module
    for handle in (
        module.register_state_dict_pre_hook(settle),
        module.register_load_state_dict_pre_hook(settle),
        module.register_forward_pre_hook(never_compiled(before), with_kwargs=True),
        module.register_forward_hook(never_compiled(after), with_kwargs=True),
    ):
        stream.ending.callback(handle.remove)


def check_trained(page: Page) -> None:
    """Refuse a backward whose gradients nobody would apply where the weights live.

    Raises:
        RuntimeError: Weights are trained, and by no optimizer that knows of pages.
    """
    if not page.stream.has_optimizer and page.is_trained:
        raise RuntimeError(
            "streamed weights are trained by ZenFlowAdamW alone, and there is none: make it after "
            "stream_weights(), or freeze the streamed layers (requires_grad_(False)). Another "
            "optimizer would step weights at home that the device does not see"
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
