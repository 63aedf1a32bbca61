"""Inputs of layers that wait on the host from forward to backward.

Where every layer is recomputed in backward, autograd keeps each layer's input and little else. One
layer's input is the output of the layer before. It goes to pinned host memory while forward
computes on, and comes back while backward computes the layer behind.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zenflow.lanes.completion import Completion
from zenflow.lanes.lease import Lease
from zenflow.streaming.transfers import Transfers

MOST_LEAVING = 2
"""Number of inputs on their way to the host whose memory on the device is kept for them."""


@dataclass(eq=False)
class _Buffer:
    """Pinned memory for one input at a time."""

    slab: Tensor
    """Bytes, (size,), uint8."""
    lease: Lease = field(default_factory=Lease)
    """Users of the memory."""


class _Buffers:
    """Pinned memory, used again from step to step; it grows with the largest input."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._free: list[_Buffer] = []

    def take(self, num_bytes: int) -> _Buffer:
        """Return memory of at least so many bytes, which nobody else has."""
        fitting = [b for b in self._free if b.slab.nbytes >= num_bytes]
        buffer = min(fitting or self._free, key=lambda b: b.slab.nbytes, default=None)
        if buffer is not None:
            self._free.remove(buffer)
            if fitting:
                buffer.lease.renew()
                return buffer
            self._transfers.wait_for_users(buffer.lease)
            self._transfers.device.free_slab(buffer.slab)
        return _Buffer(self._transfers.device.pinned_slab(num_bytes, torch.uint8))

    def give_back(self, buffer: _Buffer) -> None:
        """Let memory be used again behind the copies that use it now."""
        self._free.append(buffer)


class _Input:
    """One layer's input, which autograd holds in place of the tensor."""

    def __init__(self, tensor: Tensor, buffer: _Buffer, before: _Input | None) -> None:
        self.buffer = buffer
        self.home = buffer.slab[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.device = tensor.device
        self.before = None if before is None else weakref.ref(before)
        self.coming: tuple[Completion, Tensor] | None = None


class LayerInputs:
    """Sends layers' inputs to the host, and brings them back before backward needs them.

    Attributes:
        num_sent: Number of inputs that have gone to the host.
    """

    def __init__(self, transfers: Transfers) -> None:
        """Start without an input.

        Args:
            transfers: Lanes that move the inputs.
        """
        self.num_sent = 0
        self._transfers, self._buffers = transfers, _Buffers(transfers)
        self._passed_on: weakref.ref[Tensor] | None = None
        self._packed: _Input | None = None
        self._last: weakref.ref[_Input] | None = None
        self._leaving: deque[tuple[Completion, Tensor, int]] = deque()

    def watch(self, model: nn.Module, layers: Sequence[nn.Module], ending: ExitStack) -> None:
        """Let inputs go while the modules that call the layers run.

        Args:
            model: Model of the layers.
            layers: Layers, in the order of forward.
            ending: Gets a callback to undo each change of the model.
        """
        never_compiled: Any = torch.compiler.disable
        entered: list[saved_tensors_hooks] = []

        def begin(*_: Any) -> None:
            entered.append(saved_tensors_hooks(self._pack, self._unpack))
            entered[-1].__enter__()

        def end(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)
            self._pass_on(None)
            self._forget_sent(0)

        def passed(goes: bool, module: nn.Module, args: Any, output: Any) -> None:
            if entered and torch.is_grad_enabled():
                first = output[0] if isinstance(output, tuple) else output
                self._pass_on(first if goes and isinstance(first, Tensor) else None)

        for caller, called in by_caller(model, layers):
            ending.callback(caller.register_forward_pre_hook(never_compiled(begin)).remove)
            handle = caller.register_forward_hook(never_compiled(end), always_call=True)
            ending.callback(handle.remove)
            for rank, layer in enumerate(called):
                goes = rank < len(called) - 2  # the last layer's input is needed at once
                hook = never_compiled(partial(passed, goes))
                ending.callback(layer.register_forward_hook(hook).remove)

    def _pass_on(self, tensor: Tensor | None) -> None:
        """Note the tensor that the next layer gets."""
        self._passed_on = None if tensor is None else weakref.ref(tensor)
        self._packed = None

    def _pack(self, tensor: Tensor) -> Tensor | _Input:
        """Return the tensor for autograd to keep; in place of a layer's input its handle."""
        passed_on = None if self._passed_on is None else self._passed_on()
        if passed_on is None or not (
            tensor.data_ptr() == passed_on.data_ptr()
            and tensor.shape == passed_on.shape
            and tensor.is_contiguous()
        ):
            return tensor
        if self._packed is None:  # else several operations keep the same input
            self._packed = self._send(tensor)
        return self._packed

    def _send(self, tensor: Tensor) -> _Input:
        self._forget_sent(MOST_LEAVING - 1)
        buffer = self._buffers.take(tensor.nbytes)
        sent = _Input(tensor, buffer, None if self._last is None else self._last())
        weakref.finalize(sent, self._buffers.give_back, buffer)
        done = self._transfers.submit(
            *(self._transfers.down, "a layer's input"),
            [(tensor.detach(), sent.home)],
            after=self._transfers.device.mark(),
            fills=[buffer.lease],
        )
        self._leaving.append((done, tensor, tensor._version))
        self._last = weakref.ref(sent)
        self.num_sent += 1
        return sent

    def _forget_sent(self, most: int) -> None:
        """Let go of all but the last few inputs: compute uses their memory behind the copies."""
        while len(self._leaving) > most:
            done, tensor, version = self._leaving.popleft()
            self._transfers.wait(done)
            if tensor._version != version:
                self._leaving.clear()  # of a forward that ends here
                raise RuntimeError(
                    "a layer's input was changed in place after autograd had kept it: such a "
                    "model can't be trained with offload_activations=True; leave that out"
                )

    def _unpack(self, kept: Tensor | _Input) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            self._fetch(kept)
            assert kept.coming is not None
            done, tensor = kept.coming
            kept.coming = None
            before = None if kept.before is None else kept.before()
            if before is not None:
                self._fetch(before)
            self._transfers.wait(done)
        return tensor

    def _fetch(self, kept: _Input) -> None:
        """Start to bring an input back, unless it is on its way."""
        if kept.coming is not None:
            return
        there = torch.empty(kept.home.shape, dtype=kept.home.dtype, device=kept.device)
        done = self._transfers.submit(
            *(self._transfers.up, "a layer's input"),
            [(kept.home, there)],
            after=self._transfers.device.mark(),
            reads=[kept.buffer.lease],
            keeps=[there],
        )
        kept.coming = done, there


def by_caller(
    model: nn.Module, layers: Sequence[nn.Module]
) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Return the modules that call layers, owners of the layers' lists, each with its layers."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[nn.Module, list[nn.Module]] = {}
    for layer in layers:
        path = names[id(layer)].split(".")[:-1]
        owner = model.get_submodule(".".join(path))
        if isinstance(owner, nn.ModuleList):
            owner = model.get_submodule(".".join(path[:-1]))
        found.setdefault(owner, []).append(layer)
    return list(found.items())
