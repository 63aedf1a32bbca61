"""What the engine asks of CUDA: streams, events, pinned memory.

All order among a GPU's work is made here. Tests put another runtime in its place, whose streams
are vector clocks: it finds accesses to memory that nothing orders, on a machine without a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class CudaRuntime:
    """CUDA's streams, events and pinned memory, for one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Bind to a GPU."""
        self.device = device

    def enter_thread(self, stream: Any = None) -> None:
        """Bind the calling thread to the GPU, and to a stream for life.

        A new thread stands on GPU 0, where its first call would make a context of half a gigabyte.
        """
        torch.cuda.set_device(self.device)
        if stream is not None:
            torch.cuda.set_stream(stream)

    def new_stream(self) -> Any:
        """Return a stream beside all others."""
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Any:
        """Return the stream on which the calling thread launches."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return what lets the calling thread launch on a stream."""
        return torch.cuda.stream(stream)

    def record(self, stream: Any, *, is_timed: bool = False) -> Any:
        """Return an event behind what a stream has been given; a thread that waits for it sleeps.

        It has the methods `synchronize` and `elapsed_time` of `torch.cuda.Event`.
        """
        event = torch.cuda.Event(enable_timing=is_timed, blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Let what a stream is given from now on come after an event."""
        stream.wait_event(event)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory from being used anew before a stream is done with it."""
        tensor.record_stream(stream)

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return pinned memory of torch's allocator, which knows when copies are over."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def empty(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the GPU."""
        return torch.empty(size, dtype=dtype, device=self.device)

    def register(self, slab: Tensor) -> int:
        """Pin memory where it is; return CUDA's error code, 0 for success."""
        with torch.cuda.device(self.device):  # else a context is made on GPU 0
            return int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))

    def unregister(self, slab: Tensor) -> None:
        """Unpin memory that was registered."""
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())

    def synchronize(self) -> None:
        """Wait for all that the GPU has been given."""
        torch.cuda.synchronize(self.device)
