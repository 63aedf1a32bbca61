"""A CUDA device: copy streams, events, pinned memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zenflow.device.base import AbstractDevice, Arrival, DeviceSpan, HostValues
from zenflow.host import memory as host_memory
from zenflow.lanes.completion import Completion

CLOCK_SECONDS = 10.0
"""Seconds for which the device's clock is trusted before it is compared with the host's again."""


class CudaDevice(AbstractDevice):
    """A CUDA device with one stream for each direction of copies."""

    is_synchronous = False
    has_ring = True

    def __init__(self, device: torch.device) -> None:
        """Make the copy streams and tie the device's clock to the host's."""
        super().__init__(device)
        self._streams = {"d2h": torch.cuda.Stream(device), "h2d": torch.cuda.Stream(device)}
        self._clock_stream = torch.cuda.Stream(device)
        self._pinned: list[Tensor] = []
        self._tie_clocks()

    def _tie_clocks(self) -> None:
        """Note a moment on both clocks, on a stream of its own: no compute is waited for."""
        self._origin = self._enclose(self._clock_stream)
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def enter_thread(self, lane: str | None = None) -> None:
        """Bind the thread to this GPU, a lane's to its stream for life.

        A new thread stands on GPU 0, where its first call would make a context of half a gigabyte.
        """
        torch.cuda.set_device(self.torch_device)
        if lane is not None:
            torch.cuda.set_stream(self._streams[lane])

    def _on(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        """Return what makes a stream the current one; a lane's thread is on its stream already."""
        if torch.cuda.current_stream(self.torch_device) == stream:
            return nullcontext()
        return torch.cuda.stream(stream)

    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the compute stream."""
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        event.record(self._compute())
        return event

    def _enclose(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event

    def pack(self, jobs: list[tuple[Tensor, Tensor, Tensor]], after: Any) -> DeviceSpan:
        """Pack and send on the d2h stream."""
        stream = self._streams["d2h"]
        with self._on(stream):
            stream.wait_event(after)  # the gradients are final only once backward has passed them
            start = self._enclose(stream)
            for grad_OI, columns_D, host_DO in jobs:
                # Freed at once, reused in stream order: the ring that bounds packed memory is the
                # caching allocator's pool of this stream, about two of the largest blocks.
                packed_DO = torch.index_select(grad_OI.t(), 0, columns_D)
                host_DO.copy_(packed_DO, non_blocking=True)
                grad_OI.record_stream(stream)  # else its memory is reused while it is still read
            return start, self._enclose(stream)

    def send(self, jobs: list[tuple[Tensor, Tensor]], after: Any) -> DeviceSpan:
        """Send on the d2h stream; the ring's memory stays until this has passed."""
        stream = self._streams["d2h"]
        with self._on(stream):
            stream.wait_event(after)
            start = self._enclose(stream)
            for packed_DO, host_DO in jobs:
                host_DO.copy_(packed_DO, non_blocking=True)
            return start, self._enclose(stream)

    def unpack(self, arrivals: Sequence[Arrival], after: Any) -> DeviceSpan:
        """Send and scatter on the h2d stream."""
        stream = self._streams["h2d"]
        with self._on(stream):
            stream.wait_event(after)  # backward may still read the weights before this mark
            start = self._enclose(stream)
            for arrival in arrivals:
                host_DO = arrival.values
                arrived_DO = torch.empty(
                    host_DO.shape, dtype=host_DO.dtype, device=self.torch_device
                )
                arrived_DO.copy_(host_DO, non_blocking=True)
                if arrival.late is not None:
                    arrival.late.move_on(arrived_DO, arrival.columns)
                    if not arrival.late.is_packed:  # else its memory is reused while it is read
                        arrival.late.rows.record_stream(stream)
                arrival.weight.t().index_copy_(0, arrival.columns, arrived_DO)
            return start, self._enclose(stream)

    def energies(self, grad_OI: Tensor, columns: Tensor, rows: Tensor) -> None:
        """Take norms, which need no temporary of the gradient's size, and square them."""
        for dim, out in ((0, columns), (1, rows)):
            if out.numel():
                torch.linalg.vector_norm(grad_OI, dim=dim, dtype=torch.float32, out=out)
                out.square_()

    def order_after(self, completion: Completion) -> None:
        """Make the compute stream wait for the copy's end."""
        if completion.device_event is not None:
            self._compute().wait_event(completion.device_event)

    def to_host(self, values: Tensor) -> HostValues:
        """Copy on the compute stream into pinned memory, without waiting."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        return HostValues(host, self.mark())

    def to_device(self, values: Sequence[float]) -> Tensor:
        """Copy on the compute stream from pinned memory, without waiting."""
        host = torch.tensor(values, dtype=torch.float32, pin_memory=True)
        return host.to(self.torch_device, non_blocking=True)

    def host_slab(self, num_elements: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return zeroed memory; pinned slabs are registered in place.

        torch's pinned allocator rounds up to a power of two, up to twice the bytes asked for.
        """
        slab = host_memory.zeroed(num_elements, dtype, forks=not pinned)
        if pinned and num_elements:
            with torch.cuda.device(self.torch_device):  # else a context is made on device 0
                code = torch.cuda.cudart().cudaHostRegister(
                    slab.data_ptr(), slab.numel() * slab.element_size(), 0
                )
            if int(code) != 0:
                raise RuntimeError(
                    f"can't pin {slab.numel() * slab.element_size():,} bytes of host memory (CUDA "
                    f"error {int(code)}): raise the limit on locked memory (ulimit -l) or free RAM"
                )
            self._pinned.append(slab)
        return slab

    def upload_memory(self, num_bytes: int) -> Tensor:
        """Return pinned memory of torch's allocator, which knows when copies are over.

        It rounds up to a power of two.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def timing_mark(self) -> torch.cuda.Event:
        """Record a timed event on the compute stream."""
        return self._enclose(self._compute())

    def seconds_of(self, moment: torch.cuda.Event) -> float:
        """Return the event's time on the host's clock."""
        moment.synchronize()
        # CUDA gives elapsed time as a float32 of milliseconds, which after an hour can't tell
        # quarters of one apart; the two clocks drift as well.
        if time.perf_counter() - self._origin_seconds > CLOCK_SECONDS:
            self._tie_clocks()
        return self._origin_seconds + float(self._origin.elapsed_time(moment)) / 1e3

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        """Unregister pinned slabs: freed while registered, their addresses stay locked."""
        pinned, self._pinned = self._pinned, []
        if not pinned:
            return
        try:
            self.synchronize()
        finally:
            with torch.cuda.device(self.torch_device):
                for slab in pinned:
                    torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())
