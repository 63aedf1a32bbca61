"""Shards: parameters whose rows are spread over ranks by FSDP2's `fully_shard`.

A rank has some rows of every matrix, and whole columns lie across the ranks. All that this
optimizer does to a column is done row by row, but for two numbers: a column's squared norm, and
the norm of all gradients together. Those are added up over the ranks, one number a column and one
for the rest. Every rank then has the same numbers, bit for bit, and takes the same decisions.

With HSDP's two dimensions of a mesh the ranks of one dimension have the same rows, whose gradients
FSDP2 has averaged: numbers are added up over the other dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from zenflow.columns.device_rows import NamedParam
from zenflow.columns.local import is_sharded, local_of
from zenflow.errors import DeadlineError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class RowSpread:
    """Spread of a parameter's rows over ranks, as torch's DTensor says it."""

    mesh: DeviceMesh
    """Mesh of the ranks that have the rows."""
    placements: tuple[Placement, ...]
    """Placement along each dimension of the mesh: some of the rows, or copies."""
    num_rows: int
    """Number of rows on all ranks together."""

    @classmethod
    def of(cls, param: Tensor) -> RowSpread | None:
        """Return the spread of a sharded parameter's rows; None for one that is not sharded."""
        if not is_sharded(param):
            return None
        return cls(param.device_mesh, tuple(param.placements), param.shape[0])


def spread(local: Tensor, rows: RowSpread | None, dim: int) -> Tensor:
    """Return this rank's part of a tensor as that of a DTensor, cut as a parameter's rows are.

    Args:
        local: Part of the tensor, on any device: FSDP2's own offloading has host memory there too.
        rows: How the rows are spread; None leaves the part as it is.
        dim: Dimension of the part that goes by the rows.
    """
    if rows is None:
        return local
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    placements = tuple(Shard(dim) if place.is_shard() else place for place in rows.placements)
    shape = torch.Size([*local.shape[:dim], rows.num_rows, *local.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(shape, stride, local.dtype)
    spec = DTensorSpec(rows.mesh, placements, tensor_meta=meta)
    # Saving in the background takes a DTensor with an offset for one with memory of its own. By a
    # capsule: from_dlpack alone asks the tensor, which says that pinned memory is not the CPU's.
    own = local if local.storage_offset() == 0 else from_dlpack(to_dlpack(local))
    return DTensor(own, spec, requires_grad=False)


def part_of(whole: Tensor, rows: RowSpread | None, dim: int) -> Tensor:
    """Return this rank's part of a tensor, one of whose dimensions is a parameter's rows.

    Args:
        whole: A DTensor that is cut so already, or a plain tensor of all rows.
        rows: How the rows are spread; None for rows that every rank has.
        dim: The dimension.
    """
    if is_sharded(whole):
        return local_of(whole if rows is not None else whole.full_tensor())
    if rows is None:
        return whole
    return whole.narrow(dim, *_own_rows(rows))


def first_row(rows: RowSpread | None) -> int:
    """Return the first of this rank's rows, counted over all ranks' rows."""
    return 0 if rows is None else _own_rows(rows)[0]


def _own_rows(rows: RowSpread) -> tuple[int, int]:
    """Return the first of this rank's rows, and their number."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        (rows.num_rows,), rows.mesh, rows.placements
    )
    return offset[0], shape[0]


def is_of_another_rank(part: Tensor, rows: RowSpread | None) -> bool:
    """Whether a tensor has another rank's rows: that rank saved it with `torch.save`."""
    if rows is None or not is_sharded(part):
        return False
    there, here = part.device_mesh, rows.mesh
    return (there.size(), there.get_coordinate()) != (here.size(), here.get_coordinate())


@contextmanager
def waiting_for_ranks() -> Iterator[None]:
    """Turn a wait that ended in vain into an error that says what ranks have to do.

    Raises:
        DeadlineError: Another rank has not come, or has ended.
    """
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL have no class of their own for it
        raise DeadlineError(
            f"this rank waited for another one in vain ({error}). All ranks have to take the same "
            "steps: as many batches, backward passes, step(), zero_grad() and eval(). If one has "
            "ended, its own error says why; start all of them again from the last checkpoint"
        ) from error


@dataclass(frozen=True, slots=True)
class Adding:
    """A sum over the ranks that is under way."""

    work: Work
    """Handle of torch's all-reduce."""
    timeout: timedelta | None
    """Time after which a wait is an error; None leaves the limit to the ranks' group."""

    def wait(self) -> None:
        """Order the sums before the device's later work.

        Raises:
            DeadlineError: Another rank has not come in time.
        """
        with waiting_for_ranks():
            if self.timeout is None:
                self.work.wait()
            else:
                self.work.wait(self.timeout)


@dataclass(slots=True, eq=False)
class Shards:
    """Ranks over which the rows of all parameters are spread."""

    group: ProcessGroup | None = None
    """Group of the ranks; None where every rank has all rows."""
    num_bytes: int = 0
    """Bytes of the numbers that were summed so far."""
    wait_timeout: float | None = None
    """Seconds after which a wait for another rank is an error, on a CPU. None leaves the limit to
    the group, as on a GPU, where such a wait would hold up the thread that launches work."""

    @classmethod
    def of(cls, params: Sequence[NamedParam], wait_timeout: float | None = None) -> Shards:
        """Return the ranks of these parameters.

        Args:
            params: The parameters.
            wait_timeout: Seconds after which waiting for another rank is an error, on a CPU.

        Raises:
            ValueError: The parameters are spread in a way that can't be trained.
        """
        first = params[0] if params else None
        if first is None or not is_sharded(first.param):
            for item in params:
                if is_sharded(item.param):
                    raise _mixed(item, first)
            return cls()
        mesh = first.param.device_mesh
        for item in params:
            if not is_sharded(item.param):
                raise _mixed(first, item)
            _check_placements(item)
            if item.param.device_mesh != mesh:
                raise ValueError(
                    f"{item.name} is on another mesh than {first.name}: shard the whole model "
                    "with fully_shard over one DeviceMesh"
                )
        places = [place.is_shard() for place in first.param.placements]
        return cls(mesh.get_group(places.index(True)), wait_timeout=wait_timeout)

    def add_up(self, values: Tensor) -> Tensor:
        """Add a contiguous tensor up over the ranks, in place, in order with the device's work.

        Returns:
            The tensor.
        """
        work = self.begin_adding(values)
        if work is not None:
            work.wait()
        return values

    def begin_adding(self, values: Tensor) -> Adding | None:
        """Begin to sum a contiguous tensor over the ranks, in place; a collective call.

        Returns:
            Handle whose ``wait`` orders the sums before the device's later work; None where there
            is nothing to add.
        """
        if self.group is None or not values.numel():
            return None
        self.num_bytes += values.nbytes
        with waiting_for_ranks():
            work: Work = torch.distributed.all_reduce(values, group=self.group, async_op=True)
        limit = self.wait_timeout if values.device.type == "cpu" else None
        return Adding(work, None if limit is None else timedelta(seconds=limit))


def check_same(group: ProcessGroup | None, settings: Any) -> None:
    """Check that all ranks of a group make the optimizer with equal settings.

    Args:
        group: The ranks; None for a rank that is alone.
        settings: What has to be equal, plain values.

    Raises:
        ValueError: Some rank has other settings; every rank gets this error.
    """
    if group is None:
        return
    found: list[Any] = [None] * group.size()
    with waiting_for_ranks():
        torch.distributed.all_gather_object(found, settings, group=group)
    differing = [rank for rank, there in enumerate(found) if there != found[0]]
    if differing:
        names = [key for key, value in found[0].items() if found[differing[0]][key] != value]
        raise ValueError(
            f"ranks make different optimizers: rank {differing[0]} of the group differs from "
            f"rank 0 in {', '.join(names)}. Pass the same settings on every rank"
        )


def _mixed(sharded: NamedParam, whole: NamedParam | None) -> ValueError:
    other = "another" if whole is None else whole.name
    return ValueError(
        f"{sharded.name} is sharded and {other} is not: call fully_shard on the root module too, "
        "or make one optimizer for each kind"
    )


def _check_placements(item: NamedParam) -> None:
    """Refuse a parameter that is not cut along its rows, once.

    Raises:
        ValueError: It is cut in another way, or its rows are in another kind of memory.
    """
    from torch.distributed.tensor import Replicate, Shard

    param = item.param
    assert is_sharded(param)
    placements = param.placements
    by_rows = [place for place in placements if type(place) is Shard and place.dim == 0]
    replicas = [place for place in placements if type(place) is Replicate]
    if len(by_rows) != 1 or len(replicas) != len(placements) - 1:
        raise ValueError(
            f"{item.name} has the placements {placements}: only parameters that are sharded along "
            "their first dimension are trained, as fully_shard does it over one dimension of a "
            "mesh, or over two with replicas (HSDP); leave out shard_placement_fn and tensor "
            "parallelism"
        )
    mesh = param.device_mesh
    if param.device.type != mesh.device_type:
        raise ValueError(
            f"{item.name} is on {param.device} and its mesh on {mesh.device_type}: leave out "
            "CPUOffloadPolicy, as this optimizer keeps its own state on the host"
        )
