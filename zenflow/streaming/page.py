"""Page: the streamed weights of one layer, which come to the device and go home together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zenflow.lanes.completion import Completion
from zenflow.lanes.lease import Lease
from zenflow.rule.sizes import aligned

if TYPE_CHECKING:
    from torch import nn

    from zenflow.device.base import AbstractDevice
    from zenflow.streaming.stream import WeightStream

_pages: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def page_of(param: Tensor) -> Page | None:
    """Return the page that a parameter is on; None for one that stays on the device."""
    found: weakref.ref[Page] | None = _pages.get(param)
    return None if found is None else found()


class Page:
    """One layer's streamed parameters: at home on the host, or here, on the device.

    The device's tensors are the same ones at each visit, and only their storage comes and goes. So
    views that autograd has kept of a weight in forward are whole again in backward.

    Attributes:
        index: Rank of the page in the order of forward.
        module: The layer.
        params: The streamed parameters.
        num_bytes: Bytes of the weights, with gaps between them.
        on_device: All weights on the device, (num_bytes,), uint8; without memory while away.
        lease: Users of `on_device` beside compute: copies and landing updates.
        is_here: Whether the parameters are the device's tensors.
        coming: The copy to the device, from its start until the page is here.
        holders: Number of users on the training thread, beside forward and backward.
        stays: Whether the page stays here after its use, and does not count as a visitor.
        is_changed: Whether the device's weights differ from those at home.
        in_graph: Whether a graph of autograd may hold the parameters.
        released: Mark of the last compute that has used the weights, and its rank among marks.
        newer: Function that writes the columns that the device's optimizer has stepped since the
            last visit; None for none.
        home_is_stale: Whether `newer` has not been written at home.
        device_is_stale: Whether `newer` has not been written on the device.
        left_in: Number of the backward in which all gradients have come; -1 for none.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        device: AbstractDevice,
        lane: str,
    ) -> None:
        """Move the parameters home, into memory of their own.

        Args:
            index: Rank of the page in the order of forward.
            module: The layer.
            params: Contiguous parameters, on any device.
            device: Device that uses them.
            lane: Name of the lane whose memory they visit.
        """
        self.index, self.module, self.params = index, module, list(params)
        firsts, last = [], 0
        for param in params:
            firsts.append(last)
            last += aligned(param.nbytes)
        self.num_bytes = last
        memory = device.pinned_slab(last, torch.uint8)
        self.on_device = torch.empty(last, dtype=torch.uint8, device=device.torch_device)
        places = list(zip(params, firsts, strict=True))
        self._at_home = [_part_at_home(memory, first, param) for param, first in places]
        self._visiting = [
            self.on_device[first : first + param.nbytes].view(param.dtype).view(param.shape)
            for param, first in places
        ]
        device.resize(self.on_device, 0, lane, device.mark())
        self._blanks = _blanks(params, device.torch_device)
        away = (*self._at_home, *self._blanks)
        self._addresses = {tensor.untyped_storage().data_ptr() for tensor in away}
        self.lease = Lease()
        self.is_here = self.is_changed = self.in_graph = self.stays = False
        self.coming: Completion | None = None
        self.holders = 0
        self.released: tuple[int, Any] = (0, None)
        self.newer: Callable[[], None] | None = None
        self.home_is_stale = self.device_is_stale = False
        self.left_in = -1
        self.stream: WeightStream
        with torch.no_grad():
            for param, home in zip(self.params, self._at_home, strict=True):
                home.copy_(param.data)
                param.data = home
                _pages[param] = weakref.ref(self)  # its layer's hooks keep it

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter at home, and on the device."""
        return list(zip(self._at_home, self._visiting, strict=True))

    @property
    def is_trained(self) -> bool:
        """Whether any of the weights is trained; those of a frozen page never go home."""
        return any(param.requires_grad for param in self.params)

    def held(self, *, changes: bool = False) -> AbstractContextManager[None]:
        """Have the page here inside of a `with` block, for work on the training thread.

        Args:
            changes: Whether the block, or what it launches, writes to the weights.
        """
        return self.stream.held(self, changes=changes)

    def show_on_device(self) -> None:
        """Let the parameters be the device's tensors."""
        for param, visiting in zip(self.params, self._visiting, strict=True):
            param.data = visiting

    def show_at_home(self) -> None:
        """Let the parameters be those at home, which anybody may read; all copies are over.

        While a graph of autograd holds them they have to stay on the device: there they read NaN.
        """
        instead = self._blanks if self.in_graph else self._at_home
        for param, other in zip(self.params, instead, strict=True):
            param.data = other

    def forget(self) -> None:
        """Let the parameters be plain ones, at home."""
        for param in self.params:
            del _pages[param]

    def device_tensor(self, param: Tensor) -> Tensor:
        """Return the device's tensor of a parameter, of its shape and dtype."""
        return self._visiting[self._index(param)]

    def _index(self, param: Tensor) -> int:
        return next(i for i, own in enumerate(self.params) if own is param)

    def shows(self, param: Tensor) -> bool:
        """Whether a parameter's data is the page's own, and no tensor that somebody has set."""
        address = param.untyped_storage().data_ptr()
        return address in self._addresses or address == self.on_device.untyped_storage().data_ptr()


def _part_at_home(memory: Tensor, first: int, param: Tensor) -> Tensor:
    """Return one parameter's part of host memory, as a storage of its own.

    Formats for weights take tensors of one storage for tied.
    """
    buffer, count = memory.numpy(), param.numel()
    return torch.frombuffer(buffer, dtype=param.dtype, count=count, offset=first).view(param.shape)


def _blanks(params: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return a tensor of each parameter's shape and dtype that takes next to no memory."""
    nans = {
        dtype: torch.full((), float("nan"), dtype=dtype, device=device)
        for dtype in {param.dtype for param in params}
    }
    return [nans[param.dtype].expand(param.shape) for param in params]
