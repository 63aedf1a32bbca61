"""Interface of a device, which CUDA devices and a CPU in the role of one provide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zenflow.device.kernels.base import DeviceKernels, HostColumns, LateGradient
from zenflow.host import changes
from zenflow.lanes.completion import Completion
from zenflow.rule.sizes import GATHERED_BYTES

DeviceSpan = tuple[Any, Any]
"""Two events of a GPU stream: before and behind a piece of work."""

Gather = Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]
"""Function that completes columns (D, some rows) to a number of rows each, over all ranks."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Columns on their way from the host into a weight."""

    values: Tensor
    """Host's buffer of the columns, (D, O), or of this host's rows of them; `late` is alike."""
    columns: HostColumns
    """Columns that these values are of."""
    weight: Tensor
    """Weight that the columns are written to, (O, I)."""
    late: LateGradient | None = None
    """Gradient whose fresh step the columns still need; None where there is none."""
    marks: Tensor | None = None
    """Marks of the values that differ from the weight's, on the host, as `zenflow.host.changes`
    has them; None where all may."""
    changed: Tensor | None = None
    """Values of the marked elements, (n,), on the host; None where all values are sent."""

    def ready(self) -> Arrival:
        """Return the arrival with its marked values gathered, in the memory of all values."""
        changed = None if self.marks is None else changes.gather(self.values, self.marks)
        return self if changed is None else replace(self, changed=changed)

    @property
    def num_bytes(self) -> int:
        """Bytes that are sent, once the arrival is ready."""
        if self.changed is None or self.marks is None:
            return self.values.nbytes
        return self.changed.nbytes + self.marks.nbytes


def gathered_together(
    arrivals: Sequence[Arrival], gather: Gather | None
) -> Iterator[Sequence[Arrival]]:
    """Yield arrivals in groups small enough for one all-gather.

    Without a gather each group is one arrival. Sizes are those of whole columns, so that all ranks
    form the same groups.
    """
    run: list[Arrival] = []
    filled = 0
    for arrival in arrivals:
        size = len(arrival.columns) * len(arrival.weight) * arrival.values.itemsize
        if run and (gather is None or filled + size > GATHERED_BYTES):
            yield run
            run, filled = [], 0
        run.append(arrival)
        filled += size
    if run:
        yield run


class AbstractDevice(ABC):
    """Operations of a device that the engine needs.

    `pack`, `transfer` and `unpack` run on the copy lanes' threads, the rest on the training
    thread.
    """

    is_synchronous: bool
    """Whether compute is over when its launch returns."""

    has_ring = False
    """Whether compute packs released gradients into a ring, from which they are sent."""

    kernels: DeviceKernels
    """Kernels of the engine's own pass over gradients and weights."""

    def __init__(self, device: torch.device) -> None:
        """Bind to a torch device."""
        self.torch_device = device

    @abstractmethod
    def enter_thread(self, lane: str | None = None) -> None:
        """Prepare the calling thread for work on this device; its first call.

        Args:
            lane: Name of the lane of a thread that only copies in one direction.
        """

    @abstractmethod
    def mark(self) -> Any:
        """Return a mark behind all compute launched so far; None where nothing is asynchronous."""

    def has_run_dry(self) -> bool:
        """Return whether all compute launched so far is over, and nothing but a launch is missing.

        False where compute is over when its launch returns.
        """
        return False

    @abstractmethod
    def pack(
        self, jobs: list[tuple[Tensor, HostColumns, Tensor]], after: Any
    ) -> DeviceSpan | None:
        """Copy columns of gradients to the host once `after` has passed.

        Args:
            jobs: (gradient (O, I), its columns, host buffer (D, O)) each.
            after: A mark of the compute that produces the gradients.
        """

    @abstractmethod
    def open_lane(self, lane: str) -> None:
        """Prepare for a further copy lane, beside "d2h" and "h2d", before its thread starts."""

    @abstractmethod
    def transfer(
        self, lane: str, jobs: Sequence[tuple[Tensor, Tensor]], after: Any
    ) -> DeviceSpan | None:
        """Copy contiguous memory between device and host on a lane, once `after` has passed.

        Args:
            lane: Name of the lane, whose thread calls.
            jobs: (source, target) each, of one shape and dtype.
            after: A mark of the compute that has used the memory before; None for none.
        """

    @abstractmethod
    def keep(self, tensors: Sequence[Tensor], lane: str) -> None:
        """Keep compute's memory from being used again before a lane has done its present work."""

    def memory_use(self) -> tuple[int, int] | None:
        """Return the most bytes that this process's tensors have had, and those it may have.

        None where the device has no memory of its own.
        """
        return None

    @abstractmethod
    def resize(self, memory: Tensor, num_bytes: int, lane: str, after: Any) -> None:
        """Give a tensor's storage so many bytes of device memory in place of those that it has.

        The memory is a lane's: nothing but what the lane copies to gets it again.

        Args:
            memory: A tensor with a storage of its own. Views of it stay views of it.
            num_bytes: Bytes of the whole storage, or 0. All copies from and to it are over.
            lane: Name of the lane.
            after: A mark of the last compute that has used the memory; the lane's later copies
                wait for it.
        """

    @abstractmethod
    def unpack(
        self, arrivals: Sequence[Arrival], after: Any, gather: Gather | None = None
    ) -> DeviceSpan | None:
        """Copy host columns into weights that are not in use, once `after` has passed.

        Args:
            arrivals: Columns on the host, and the weights that they go to.
            after: A mark of the last compute that reads the weights.
            gather: Function that completes columns on the device, of which this host has some
                rows; None where it has all.
        """

    @abstractmethod
    def order_after(self, completion: Completion) -> None:
        """Let compute launched from now on wait for a copy that has been launched."""

    @abstractmethod
    def to_host(self, values: Tensor) -> HostValues:
        """Begin to copy numbers to the host; `HostValues` has them. Nobody changes them then."""

    @abstractmethod
    def host_memory(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return memory on the host for `send`; its contents may be anything."""

    @abstractmethod
    def send(self, host: Tensor) -> Tensor:
        """Return numbers on the device that are in memory of `host_memory`; nothing waits."""

    @abstractmethod
    def to_device(self, values: Sequence[float]) -> Tensor:
        """Return a few float32 numbers on the device; nothing waits for the copy."""

    @abstractmethod
    def pinned_slab(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed host memory of exactly this many elements, from which copies are fast."""

    @abstractmethod
    def free_slab(self, slab: Tensor) -> None:
        """Unpin memory of `pinned_slab` early; no copy may use it."""

    @abstractmethod
    def timing_mark(self) -> Any:
        """Return a moment on the compute stream that `seconds_of` can read later."""

    @abstractmethod
    def seconds_of(self, moment: Any) -> float:
        """Return a mark's time as seconds of `time.perf_counter`; waits until it has come."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything that was launched.

        Raises:
            DeadlineError: The device takes longer than the deadline, as in every wait for it.
        """

    @abstractmethod
    def close(self) -> None:
        """Unpin all host memory; no copy may follow."""


class HostValues:
    """Numbers on their way to the host; who asks for them waits until they are there."""

    def __init__(self, values: Tensor, wait: Callable[[], None] | None = None) -> None:
        """Wrap a host tensor that is complete once `wait` has returned."""
        self._values = values
        self._wait = wait
        self._list: list[float] | None = None

    def get(self) -> list[float]:
        """Return the values as Python floats."""
        if self._list is None:
            self._list = self.tensor().tolist()
        return self._list

    def tensor(self) -> Tensor:
        """Return the values."""
        if self._wait is not None:
            self._wait()
        return self._values
