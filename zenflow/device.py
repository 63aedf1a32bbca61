"""What differs between a CUDA device and a CPU that plays one: streams, events, pinned memory.

Both give the optimizer the same few operations. On a CPU a "stream" is the copy lane's thread,
so a copy is over when its function returns, and there are no events.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from zenflow.completion import Completion
from zenflow.recorder import DeviceSpan

CLOCK_SECONDS = 10.0
"""How long the device's clock is trusted before it is compared with the host's again."""


class AbstractDevice(ABC):
    """The operations of a device that the engine needs.

    `pack` and `unpack` run on the copy lanes' threads, everything else on the training thread.
    """

    is_synchronous: bool
    """Whether compute is over when its launch returns."""

    def __init__(self, device: torch.device) -> None:
        """Bind to a torch device."""
        self.torch_device = device

    @abstractmethod
    def mark(self) -> Any:
        """Return a mark of all compute launched so far (None where nothing is asynchronous)."""

    @abstractmethod
    def pack(self, jobs: list[tuple[Tensor, Tensor, Tensor]], after: Any) -> DeviceSpan | None:
        """Copy columns of gradients to the host once `after` has passed.

        Args:
            jobs: (gradient (O, I), column indices (D,), host buffer (D, O)) each.
            after: A mark of the compute that produces the gradients.
        """

    @abstractmethod
    def unpack(self, jobs: list[tuple[Tensor, Tensor, Tensor]], after: Any) -> DeviceSpan | None:
        """Copy host columns into weights that are not in use, once `after` has passed.

        Args:
            jobs: (host buffer (D, O), column indices (D,), weight (O, I)) each.
            after: A mark of the last compute that reads the weights.
        """

    @abstractmethod
    def column_energies(self, grad_OI: Tensor, out: Tensor) -> None:
        """Write the squared norm of each column of (O, I) into `out`, shape (I,), float32.

        It is ZenFlow's proxy for a column's importance (arXiv 2505.12242).
        """

    @abstractmethod
    def order_after(self, completion: Completion) -> None:
        """Let compute launched from now on wait for a copy that has been launched."""

    @abstractmethod
    def to_host(self, values: Tensor) -> HostValues:
        """Start bringing a few float32 scalars to the host."""

    @abstractmethod
    def host_slab(self, num_elements: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return zeroed host memory of exactly this many elements."""

    @abstractmethod
    def upload_memory(self, num_bytes: int) -> Tensor:
        """Return bytes from which copies to the device are fast; freed with the tensor."""

    @abstractmethod
    def timing_mark(self) -> Any:
        """Return a moment on the compute stream that `seconds_of` can read later."""

    @abstractmethod
    def seconds_of(self, moment: Any) -> float:
        """Return a moment as seconds of `time.perf_counter`; waits until it has come."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything that was launched."""

    @abstractmethod
    def close(self) -> None:
        """Unpin host memory; nothing is copied any more."""


class HostValues:
    """Scalars on their way to the host; `get` blocks until they are there."""

    def __init__(self, values: Tensor, event: Any = None) -> None:
        """Wrap a host tensor that is complete once `event` has passed."""
        self._values = values
        self._event = event
        self._list: list[float] | None = None

    def get(self) -> list[float]:
        """Return the values as Python floats."""
        if self._list is None:
            if self._event is not None:
                self._event.synchronize()
            self._list = self._values.tolist()
        return self._list


class CpuDevice(AbstractDevice):
    """A CPU in the role of the device; copies are plain memory copies, paced by the lane."""

    is_synchronous = True

    def mark(self) -> None:
        """Return None: what was launched is done."""
        return

    def pack(self, jobs: list[tuple[Tensor, Tensor, Tensor]], after: Any) -> None:
        """Gather columns into host rows."""
        for grad_OI, columns_D, host_DO in jobs:
            # A blocked transpose and a gather of rows: a third of the time of a strided gather.
            torch.index_select(grad_OI.t().contiguous(), 0, columns_D, out=host_DO)

    def unpack(self, jobs: list[tuple[Tensor, Tensor, Tensor]], after: Any) -> None:
        """Scatter host rows into columns."""
        for host_DO, columns_D, weight_OI in jobs:
            weight_OI.index_copy_(1, columns_D, host_DO.t().contiguous())

    def column_energies(self, grad_OI: Tensor, out: Tensor) -> None:
        """Square and sum: on a CPU many times faster than a norm over rows."""
        torch.sum(
            grad_OI.float().square_() if grad_OI.dtype != torch.float32 else grad_OI.square(),
            0,
            out=out,
        )

    def order_after(self, completion: Completion) -> None:
        """Do nothing: whoever waited for the completion has the data."""

    def to_host(self, values: Tensor) -> HostValues:
        """Return the values."""
        return HostValues(values)

    def host_slab(self, num_elements: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return zeroed memory; there is nothing to pin for."""
        return torch.zeros(num_elements, dtype=dtype)

    def upload_memory(self, num_bytes: int) -> Tensor:
        """Return plain memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def timing_mark(self) -> float:
        """Return the clock."""
        return time.perf_counter()

    def seconds_of(self, moment: float) -> float:
        """Return the moment, which is seconds already."""
        return moment

    def synchronize(self) -> None:
        """Do nothing: nothing is launched ahead."""

    def close(self) -> None:
        """Do nothing: nothing is pinned."""


class CudaDevice(AbstractDevice):
    """A CUDA device with one stream for each direction of copies."""

    is_synchronous = False

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
        with torch.cuda.stream(stream):
            stream.wait_event(after)  # the gradients are final only once backward has passed them
            start = self._enclose(stream)
            for grad_OI, columns_D, host_DO in jobs:
                # Freed at once, reused in stream order: the ring that bounds packed memory is the
                # caching allocator's pool of this stream, about two of the largest blocks.
                packed_DO = torch.index_select(grad_OI.t(), 0, columns_D)
                host_DO.copy_(packed_DO, non_blocking=True)
                grad_OI.record_stream(stream)  # else its memory is reused while it is still read
            return DeviceSpan(start, self._enclose(stream))

    def unpack(self, jobs: list[tuple[Tensor, Tensor, Tensor]], after: Any) -> DeviceSpan:
        """Send and scatter on the h2d stream."""
        stream = self._streams["h2d"]
        with torch.cuda.stream(stream):
            stream.wait_event(after)  # backward may still read the weights before this mark
            start = self._enclose(stream)
            for host_DO, columns_D, weight_OI in jobs:
                arrived_DO = torch.empty(
                    host_DO.shape, dtype=host_DO.dtype, device=self.torch_device
                )
                arrived_DO.copy_(host_DO, non_blocking=True)
                weight_OI.t().index_copy_(0, columns_D, arrived_DO)
            return DeviceSpan(start, self._enclose(stream))

    def column_energies(self, grad_OI: Tensor, out: Tensor) -> None:
        """Take a norm, which needs no temporary of the gradient's size, and square it."""
        torch.linalg.vector_norm(grad_OI, dim=0, dtype=torch.float32, out=out)
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

    def host_slab(self, num_elements: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return zeroed memory; pinned slabs are registered in place.

        torch's pinned allocator rounds up to a power of two, up to twice the bytes asked for.
        """
        slab = torch.zeros(num_elements, dtype=dtype)
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


def bind(device: torch.device) -> AbstractDevice:
    """Return the operations for a torch device.

    Raises:
        ValueError: The device is neither a CPU nor CUDA.
    """
    if device.type == "cuda":
        return CudaDevice(device)
    if device.type == "cpu":
        return CpuDevice(device)
    raise ValueError(
        f"parameters are on {device}: move the model to a cuda device (or the CPU) before the "
        "optimizer is made"
    )
