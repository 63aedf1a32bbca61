"""Host shares: under data parallelism each rank's host works on some rows of every matrix.

All ranks have the same gradients and the same weights. So each rank's device works on whole
matrices, as without ranks. The hosts divide the deferred columns by rows, as a `Shard` along the
first dimension does. A rank sends its own rows to its host, and uploads these rows. An all-gather
between the devices then completes the columns, in the lane that uploads them.

All ranks take the same steps in the same order, so that their all-gathers meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zenflow.columns.host_rows import aligned
from zenflow.columns.shards import RowSpread, first_row, waiting_for_ranks
from zenflow.errors import CheckpointError, ZenFlowError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from zenflow.columns.device_rows import NamedParam


@dataclass(frozen=True, slots=True)
class HostPart:
    """Rows of a parameter that this rank's host works on, out of its device's rows."""

    first: int
    """First row of the part."""
    last: int
    """Row after the part's last one."""
    most: int
    """Largest number of rows that a host of the group has of this parameter."""
    is_whole: bool
    """Whether the part is all rows of the device."""
    spread: RowSpread | None
    """Spread of the rows over the ranks' hosts; None where each host has all rows."""
    whole_first: int
    """First row of the part, counted over the rows of all ranks."""

    @property
    def num_rows(self) -> int:
        """Number of rows in the part."""
        return self.last - self.first

    def of(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return the host's part of a tensor, one of whose dimensions is the device's rows."""
        return tensor if self.is_whole else tensor.narrow(dim, self.first, self.num_rows)


@dataclass(slots=True, eq=False)
class HostShares:
    """Ranks whose hosts divide the work on all parameters by rows."""

    group: ProcessGroup | None = None
    """Group of the ranks, used by nothing else; None where each host does all its rank's work."""
    mesh: DeviceMesh | None = None
    """Mesh of the ranks, by which saved states name them."""

    @classmethod
    def of(
        cls,
        params: Sequence[NamedParam],
        process_group: ProcessGroup | None,
        wait_timeout: float,
    ) -> HostShares:
        """Return the division of work for a group of ranks; a collective call of all of them.

        Args:
            params: The parameters, which all ranks have whole.
            process_group: The ranks; None where each host does all of its rank's work.
            wait_timeout: Seconds after which waiting for another rank is an error.

        Raises:
            ValueError: The parameters are spread over ranks, or this rank is none of the group.
        """
        if process_group is None:
            return cls()
        from torch import distributed
        from torch.distributed.device_mesh import DeviceMesh

        for item in params:
            if item.is_sharded:
                raise ValueError(
                    f"{item.name} is sharded, and its ranks share the host's work already: leave "
                    "process_group out, which is for DistributedDataParallel"
                )
        if not isinstance(process_group, distributed.ProcessGroup):  # such as NON_GROUP_MEMBER
            raise ValueError(
                f"process_group must be a group that has this rank, got {process_group!r}: pass "
                "the process_group of the DistributedDataParallel module"
            )
        group = distributed.new_group(
            distributed.get_process_group_ranks(process_group),
            timeout=timedelta(seconds=wait_timeout),
            use_local_synchronization=True,
        )
        return cls(group, DeviceMesh.from_group(group, params[0].param.device.type))

    def part_of(self, named: NamedParam) -> HostPart:
        """Return the rows of a parameter that this rank's host works on."""
        num_rows = named.data.shape[0]
        if self.group is None or self.mesh is None:
            spread = RowSpread.of(named.param)
            return HostPart(0, num_rows, num_rows, True, spread, first_row(spread))
        from torch.distributed.tensor import Shard

        first, last = self._rows(num_rows, self.group.rank())
        return HostPart(
            first,
            last,
            self._most(num_rows),
            last - first == num_rows,
            RowSpread(self.mesh, (Shard(0),), num_rows),
            first,
        )

    def _most(self, num_rows: int) -> int:
        """Return the largest number of rows that a rank has: only the last ranks have fewer."""
        assert self.group is not None
        return -(-num_rows // self.group.size())

    def _rows(self, num_rows: int, rank: int) -> tuple[int, int]:
        """Return a rank's first row and the row after its last, cut as torch's `Shard` cuts."""
        most = self._most(num_rows)
        return min(num_rows, rank * most), min(num_rows, (rank + 1) * most)

    def gather(self, parts: Sequence[Tensor], num_rows: Sequence[int]) -> Sequence[Tensor]:
        """Complete columns by one all-gather: every rank brings its rows and gets all.

        The all-gather runs in order with the calling thread's work on the device.

        Args:
            parts: This rank's rows of some columns, (D, this rank's rows) each, on the device.
            num_rows: Number of rows of each on all ranks together, O.

        Returns:
            The columns, (D, O) each.
        """
        if self.group is None or not parts:
            return parts
        sizes = [
            aligned(len(part) * self._most(count) * part.itemsize)
            for part, count in zip(parts, num_rows, strict=True)
        ]
        if not any(sizes):  # no column
            return [part.new_empty(0, n) for part, n in zip(parts, num_rows, strict=True)]
        own = torch.empty(sum(sizes), dtype=torch.uint8, device=parts[0].device)
        for part, room in zip(parts, own.split(sizes), strict=True):
            _matrix(room, part.shape, part.dtype).copy_(part)
        found = own.new_empty(self.group.size(), own.numel())
        with waiting_for_ranks():
            all_gather(found.view(-1), own, group=self.group)
        whole = []
        for part, count, rooms in zip(parts, num_rows, found.split(sizes, dim=1), strict=True):
            pieces = []
            for rank, room in enumerate(rooms):
                first, last = self._rows(count, rank)
                pieces.append(_matrix(room, (len(part), last - first), part.dtype))
            whole.append(torch.cat(pieces, dim=1))
        return whole

    def largest(self, values: Tensor) -> Tensor:
        """Write the largest of each value over the ranks, in place, and return the tensor.

        The reduction runs in order with the device's work. No upload may be under way: collective
        calls meet in their order.
        """
        distributed = torch.distributed
        with waiting_for_ranks():
            distributed.all_reduce(values, distributed.ReduceOp.MAX, group=self.group)
        return values

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Raise on every rank if one has an error: any that went on would wait for it in vain.

        Raises:
            ZenFlowError: This rank can't take a state up.
            CheckpointError: Another rank can't take its state up.
        """
        error: ZenFlowError | None = None
        try:
            yield
        except ZenFlowError as own:
            error = own
        if self.group is not None:
            found: list[str | None] = [None] * self.group.size()
            text = None if error is None else str(error)
            with waiting_for_ranks():
                torch.distributed.all_gather_object(found, text, group=self.group)
            others = [f"rank {rank}: {there}" for rank, there in enumerate(found) if there]
            if error is None and others:
                error = CheckpointError(f"another rank can't take up the state. {others[0]}")
        if error is not None:
            raise error


def all_gather(found: Tensor, own: Tensor, group: ProcessGroup | None = None) -> None:
    """Gather one tensor of each rank on all ranks. Torch 2.13 has another name for the call.

    Args:
        found: Where all ranks' elements come to be, one rank's after another's, on the device.
        own: Elements of this rank.
        group: The ranks; None is all of them.
    """
    distributed = torch.distributed
    newest = getattr(distributed, "all_gather_single", None)
    (newest or distributed.all_gather_into_tensor)(found, own, group=group)


def _matrix(room: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the first bytes as a matrix of this shape and dtype."""
    return room[: shape[0] * shape[1] * dtype.itemsize].view(dtype).view(*shape)
