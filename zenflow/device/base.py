"""What the engine needs of a device: a CUDA device and a CPU that plays one both provide it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zenflow.lanes.completion import Completion

DeviceSpan = tuple[Any, Any]
"""Two events of a GPU stream: before and behind a piece of work."""

Gather = Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]
"""Function that completes columns (D, some rows) to a number of rows each, over all ranks."""

MOST_GATHERED_BYTES = 1 << 26
"""Bytes of weights that are completed at once; those of one arrival may be more."""


@dataclass(frozen=True, slots=True)
class LateGradient:
    """A gradient that came since an update was made, and is not in it."""

    rows: Tensor
    """Columns of the gradient as rows, (I, O), or (D, O) where they are the landing's."""
    is_packed: bool
    """Whether they are the landing's."""
    column_factors: Tensor
    """Factor on each column of the parameter, (I,), float32."""
    row_factors: Tensor
    """Factor on each element of a column, (O,), float32."""
    rate: float
    """Factor on all of them."""

    def move_on(self, values_DO: Tensor, columns_D: Tensor) -> None:
        """Move the landing's weights, in place."""
        rows_DO = self.rows if self.is_packed else self.rows.index_select(0, columns_D)
        factors_D1 = self.column_factors.index_select(0, columns_D).unsqueeze(1)
        values_DO.addcmul_(rows_DO * factors_D1, self.row_factors, value=-self.rate)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Columns on their way from the host into a weight."""

    values: Tensor
    """Host's buffer, (D, O), or some rows of these columns, with the same rows of `late`."""
    columns: Tensor
    """Indices of the columns, (D,), int64."""
    weight: Tensor
    """Weight, (O, I)."""
    late: LateGradient | None = None
    """Gradient that the columns still have to be moved by."""


def gathered_together(
    arrivals: Sequence[Arrival], gather: Gather | None
) -> Iterator[Sequence[Arrival]]:
    """Yield arrivals in runs that are completed at once; one by one where nothing is.

    They go by whole weights, so that all ranks have the same runs.
    """
    run: list[Arrival] = []
    filled = 0
    for arrival in arrivals:
        size = len(arrival.columns) * len(arrival.weight) * arrival.values.itemsize
        if run and (gather is None or filled + size > MOST_GATHERED_BYTES):
            yield run
            run, filled = [], 0
        run.append(arrival)
        filled += size
    if run:
        yield run


class AbstractDevice(ABC):
    """The operations of a device that the engine needs.

    `pack`, `send` and `unpack` run on the copy lanes' threads, the rest on the training thread.
    """

    is_synchronous: bool
    """Whether compute is over when its launch returns."""

    has_ring = False
    """Whether compute packs released gradients into a ring, from which they are sent."""

    def __init__(self, device: torch.device) -> None:
        """Bind to a torch device."""
        self.torch_device = device

    @abstractmethod
    def enter_thread(self, lane: str | None = None) -> None:
        """Make the calling thread one of this device's, before it does anything.

        Args:
            lane: "d2h" or "h2d" of a thread that only copies in that direction.
        """

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
    def send(self, jobs: list[tuple[Tensor, Tensor]], after: Any) -> DeviceSpan | None:
        """Copy what lies packed in a gradient ring to the host once `after` has passed.

        Args:
            jobs: (packed columns (D, O), host buffer (D, O)) each.
            after: A mark of the compute that packs.
        """

    @abstractmethod
    def unpack(
        self, arrivals: Sequence[Arrival], after: Any, gather: Gather | None = None
    ) -> DeviceSpan | None:
        """Copy host columns into weights that are not in use, once `after` has passed.

        Args:
            arrivals: What comes, and where it goes.
            after: A mark of the last compute that reads the weights.
            gather: What completes the columns on the device, of which the host has some rows; None
                where it has all.
        """

    @abstractmethod
    def energies(self, measured: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Write the squared norms of each column and each row of some matrices, float32.

        A column's is ZenFlow's proxy for its importance (arXiv 2505.12242).

        Args:
            measured: (matrix (O, I), what gets those of its columns (I,), what gets those of its
                rows (O,); empty where nobody asks for them) each.
        """

    @abstractmethod
    def order_after(self, completion: Completion) -> None:
        """Let compute launched from now on wait for a copy that has been launched."""

    @abstractmethod
    def to_host(self, values: Tensor) -> HostValues:
        """Start bringing a few float32 scalars to the host."""

    @abstractmethod
    def to_device(self, values: Sequence[float]) -> Tensor:
        """Return a few float32 numbers on the device; nothing waits for the copy."""

    @abstractmethod
    def pinned_slab(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed host memory of exactly this many elements, from which copies are fast."""

    @abstractmethod
    def free_slab(self, slab: Tensor) -> None:
        """Take pinned memory back, which no copy uses any more."""

    @abstractmethod
    def timing_mark(self) -> Any:
        """Return a moment on the compute stream that `seconds_of` can read later."""

    @abstractmethod
    def seconds_of(self, moment: Any) -> float:
        """Return a moment as seconds of `time.perf_counter`; waits until it has come."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything that was launched.

        Raises:
            DeadlineError: The device takes longer than the deadline, as in every wait for it.
        """

    @abstractmethod
    def close(self) -> None:
        """Unpin host memory; nothing is copied any more."""


class HostValues:
    """Scalars on their way to the host; `get` blocks until they are there."""

    def __init__(self, values: Tensor, wait: Callable[[], None] | None = None) -> None:
        """Wrap a host tensor that is complete once `wait` has returned."""
        self._values = values
        self._wait = wait
        self._list: list[float] | None = None

    def get(self) -> list[float]:
        """Return the values as Python floats."""
        if self._list is None:
            if self._wait is not None:
                self._wait()
            self._list = self._values.tolist()
        return self._list
