"""CUDA's streams, events and pinned memory, behind one object.

Every order among a GPU's work is made by these calls. Tests put a runtime in its place whose
streams are vector clocks: so they find unordered accesses to memory on a machine without a GPU.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

SPINNING = 50e-6
"""Seconds for which a thread polls an event without sleeping in between."""
LONGEST_SLEEP = 1e-3
"""Longest sleep between two polls, in seconds; at most a quarter of the wait so far."""


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
        """Return a new stream."""
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Any:
        """Return the stream on which the calling thread launches."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread launches on a stream."""
        return torch.cuda.stream(stream)

    def record(self, stream: Any, *, is_timed: bool = False) -> Any:
        """Return an event behind all work that a stream has been given.

        It has the methods `synchronize`, in which a thread sleeps, and `elapsed_time` of
        `torch.cuda.Event`.
        """
        event = torch.cuda.Event(enable_timing=is_timed, blocking=True)
        event.record(stream)
        return event

    def is_idle(self, stream: Any) -> bool:
        """Return whether all work that a stream has been given is over."""
        return bool(stream.query())

    def wait(self, stream: Any, event: Any) -> None:
        """Order the later work of a stream after an event."""
        stream.wait_event(event)

    def join(self, event: Any, timeout: float) -> bool:
        """Block the calling thread until an event has passed; return whether it has in time.

        CUDA's own wait has no deadline.
        """
        started = time.perf_counter()
        while not event.query():
            waited = time.perf_counter() - started
            if waited > timeout:
                return False
            if waited > SPINNING:
                time.sleep(min(LONGEST_SLEEP, waited / 4))
        return True

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory from being reused before a stream has done its present work."""
        tensor.record_stream(stream)

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return pinned memory of torch's allocator, which knows when copies are over."""
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)

    def empty(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the GPU."""
        return torch.empty(size, dtype=dtype, device=self.device)

    def resize(self, memory: Tensor, num_bytes: int) -> None:
        """Give a tensor's storage so many bytes, from the current stream's pool, or take all."""
        memory.untyped_storage().resize_(num_bytes)

    def register(self, slab: Tensor) -> int:
        """Pin memory where it is; return CUDA's error code, 0 for success."""
        with torch.cuda.device(self.device):  # else a context is made on GPU 0
            code = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
            if code != 0:
                self._forget_error()
            return code

    def unregister(self, slab: Tensor) -> None:
        """Unpin memory that was registered."""
        with torch.cuda.device(self.device):
            code = int(torch.cuda.cudart().cudaHostUnregister(slab.data_ptr()))
            if code != 0:
                self._forget_error()
                _log.warning("can't unpin %s bytes (CUDA error %d)", f"{slab.nbytes:,}", code)

    def _forget_error(self) -> None:
        """Clear CUDA's last error, which the next kernel's launch would report as its own."""
        with suppress(RuntimeError):
            torch.empty(1, device=self.device).fill_(1.0)

    def synchronize(self) -> None:
        """Wait for all work that the GPU has been given."""
        torch.cuda.synchronize(self.device)

    def memory_use(self) -> tuple[int, int] | None:
        """Return the most bytes that tensors have had, and the bytes that they may have."""
        free, _ = torch.cuda.mem_get_info(self.device)
        own = torch.cuda.memory_reserved(self.device)
        return torch.cuda.max_memory_allocated(self.device), own + free
