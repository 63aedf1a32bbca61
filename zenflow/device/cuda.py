"""A CUDA device: copy streams, events, pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zenflow.device.base import (
    AbstractDevice,
    Arrival,
    DeviceSpan,
    Gather,
    HostValues,
    gathered_together,
)
from zenflow.device.clock import DeviceClock
from zenflow.device.kernels.base import HostColumns, LateGradient
from zenflow.device.kernels.torch_kernels import TorchKernels
from zenflow.device.runtime import CudaRuntime
from zenflow.errors import DeadlineError
from zenflow.host import changes
from zenflow.host import memory as host_memory
from zenflow.lanes.completion import Completion


class CudaDevice(AbstractDevice):
    """A CUDA device with one stream for each copy lane."""

    is_synchronous = False
    has_ring = True

    def __init__(
        self, device: torch.device, wait_timeout: float, runtime: CudaRuntime | None = None
    ) -> None:
        """Make the copy streams and tie the device's clock to the host's.

        Args:
            device: The GPU.
            wait_timeout: Seconds after which a wait is an error.
            runtime: Streams and events to use, for tests; None for CUDA's own.
        """
        super().__init__(device)
        self.kernels = TorchKernels()
        self._wait_timeout = wait_timeout
        self._runtime = runtime or CudaRuntime(device)
        self._streams = {lane: self._runtime.new_stream() for lane in ("d2h", "h2d")}
        self._pinned: dict[int, Tensor] = {}
        self._clock = DeviceClock(self._runtime, self._wait)

    def _wait(self, event: Any) -> None:
        """Block the calling thread until an event has passed.

        Raises:
            DeadlineError: It has not within the deadline.
        """
        if not self._runtime.join(event, self._wait_timeout):
            raise DeadlineError(
                f"waited {self._wait_timeout:g} s for {self.torch_device}, which has not come to "
                "the end of its work: a kernel or a copy hangs, or takes far longer than the "
                "steps before. Raise wait_timeout if that is expected"
            )

    def enter_thread(self, lane: str | None = None) -> None:
        """Bind the thread to this GPU, a lane's to its stream for life."""
        self._runtime.enter_thread(None if lane is None else self._streams[lane])

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which a stream is current; a lane's thread needs none."""
        if self._runtime.current_stream() == stream:
            return nullcontext()
        return self._runtime.on(stream)

    def mark(self) -> Any:
        """Record an event on the compute stream."""
        return self._runtime.record(self._runtime.current_stream())

    def has_run_dry(self) -> bool:
        """Ask the compute stream, which waits for nothing."""
        return self._runtime.is_idle(self._runtime.current_stream())

    def _enclose(self, stream: Any) -> Any:
        return self._runtime.record(stream, is_timed=True)

    def pack(self, jobs: list[tuple[Tensor, HostColumns, Tensor]], after: Any) -> DeviceSpan:
        """Pack and send on the d2h stream."""
        stream = self._streams["d2h"]
        with self._on(stream):
            # The gradients are final only once backward has passed them.
            self._runtime.wait(stream, after)
            start = self._enclose(stream)
            for grad_OI, columns, host_DO in jobs:
                # Freed at once, reused in stream order: the ring that bounds packed memory is the
                # caching allocator's pool of this stream, about two of the largest blocks.
                packed_DO = self.kernels.packed(grad_OI, columns, host_DO)
                host_DO.copy_(packed_DO, non_blocking=True)
                self._runtime.keep(grad_OI, stream)
            return start, self._enclose(stream)

    def open_lane(self, lane: str) -> None:
        """Make the lane's stream."""
        self._streams[lane] = self._runtime.new_stream()

    def transfer(self, lane: str, jobs: Sequence[tuple[Tensor, Tensor]], after: Any) -> DeviceSpan:
        """Copy on the lane's stream; the memory stays until this has passed."""
        stream = self._streams[lane]
        with self._on(stream):
            if after is not None:
                self._runtime.wait(stream, after)
            start = self._enclose(stream)
            for source, target in jobs:
                target.copy_(source, non_blocking=True)
            return start, self._enclose(stream)

    def keep(self, tensors: Sequence[Tensor], lane: str) -> None:
        """Tell the allocator of the lane's stream."""
        for tensor in tensors:
            self._runtime.keep(tensor, self._streams[lane])

    def memory_use(self) -> tuple[int, int] | None:
        """Ask torch's allocator; memory of other processes is none that this one may have."""
        return self._runtime.memory_use()

    def resize(self, memory: Tensor, num_bytes: int, lane: str, after: Any) -> None:
        """Resize the storage in the caching allocator's pool of the lane's stream.

        Compute allocates from another pool, so that the memory is never cut up.
        """
        stream = self._streams[lane]
        self._runtime.wait(stream, after)
        with self._on(stream):
            self._runtime.resize(memory, num_bytes)

    def unpack(
        self, arrivals: Sequence[Arrival], after: Any, gather: Gather | None = None
    ) -> DeviceSpan:
        """Send and scatter on the h2d stream."""
        stream = self._streams["h2d"]
        with self._on(stream):
            self._runtime.wait(stream, after)  # backward may still read the weights before it
            start = self._enclose(stream)
            for run in gathered_together(arrivals, gather):
                arrived: Sequence[Tensor] = [self._arrived(arrival) for arrival in run]
                if gather is None:
                    late: Sequence[LateGradient | None] = [arrival.late for arrival in run]
                else:  # each rank moves its own rows on
                    for arrival, arrived_DO in zip(run, arrived, strict=True):
                        if arrival.late is not None:
                            self.kernels.move_on(arrived_DO, arrival.columns, arrival.late)
                    arrived = gather(arrived, [len(arrival.weight) for arrival in run])
                    late = [None] * len(run)
                for arrival, arrived_DO, newer in zip(run, arrived, late, strict=True):
                    self.kernels.land(arrived_DO, arrival.columns, arrival.weight, newer)
                    if arrival.late is not None and not arrival.late.is_packed:
                        self._runtime.keep(arrival.late.rows, stream)  # else the ring holds it
            return start, self._enclose(stream)

    def _arrived(self, arrival: Arrival) -> Tensor:
        """Return the arriving columns on the device, as the host has them."""
        if arrival.changed is None or arrival.marks is None:
            return self.send(arrival.values)
        # These columns and no others: the device's own are written meanwhile.
        arrived_DO = arrival.weight.t().index_select(0, arrival.columns.indices)
        changes.put(arrived_DO, self.send(arrival.marks), self.send(arrival.changed))
        return arrived_DO

    def order_after(self, completion: Completion) -> None:
        """Make the compute stream wait for the copy's end."""
        if completion.device_event is not None:
            self._runtime.wait(self._runtime.current_stream(), completion.device_event)

    def to_host(self, values: Tensor) -> HostValues:
        """Copy on the compute stream into pinned memory, without waiting."""
        host = self._runtime.pinned(values.shape, values.dtype)
        host.copy_(values, non_blocking=True)
        return HostValues(host, partial(self._wait, self.mark()))

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return pinned memory of torch's allocator, which knows when copies are over."""
        return self._runtime.pinned((num_elements,), dtype)

    def send(self, host: Tensor) -> Tensor:
        """Copy on the current stream from pinned memory, without waiting."""
        return self._runtime.empty(host.shape, host.dtype).copy_(host, non_blocking=True)

    def to_device(self, values: Sequence[float]) -> Tensor:
        """Copy on the compute stream from pinned memory, without waiting."""
        host = self.host_memory(len(values), torch.float32)
        return self.send(host.copy_(torch.tensor(values, dtype=torch.float32, device="cpu")))

    def pinned_slab(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed memory that is registered where it is.

        torch's pinned allocator rounds up to a power of two, up to twice the bytes asked for.
        """
        slab = host_memory.zeroed(num_elements, dtype, forks=False)
        if num_elements:
            code = self._runtime.register(slab)
            if code != 0:
                raise RuntimeError(
                    f"can't pin {slab.nbytes:,} bytes of host memory (CUDA error {code}): raise "
                    "the limit on locked memory (ulimit -l) or free RAM"
                )
            self._pinned[slab.data_ptr()] = slab
        return slab

    def free_slab(self, slab: Tensor) -> None:
        """Unregister the memory first: if freed while registered, its addresses stay locked."""
        if slab.numel():
            self._runtime.unregister(self._pinned.pop(slab.data_ptr()))

    def timing_mark(self) -> Any:
        """Record a timed event on the compute stream."""
        return self._enclose(self._runtime.current_stream())

    def seconds_of(self, moment: Any) -> float:
        """Return the event's time on the host's clock."""
        self._wait(moment)
        return self._clock.seconds_of(moment)

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        for stream in (self._runtime.current_stream(), *self._streams.values()):
            self._wait(self._runtime.record(stream))
        self._runtime.synchronize()  # has no deadline, but the engine's own work is over

    def close(self) -> None:
        """Unregister pinned memory."""
        if not self._pinned:
            return
        try:
            self.synchronize()
        finally:
            for slab in list(self._pinned.values()):
                self.free_slab(slab)
