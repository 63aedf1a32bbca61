"""Parts of a launch over many matrices: tables of them on the device, and ways to read them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import triton.language as tl
from torch import Tensor

EXACT = {"enable_fp_fusion": False}
"""No fused multiply-add: a result is what its formula says, on every architecture."""
ALIGNMENT = 16
"""Alignment in bytes that Triton asks of an address for wide accesses, and number by which sizes
and strides are to be divisible."""
MOST_KNOWN = 1 << 12
"""Largest number of remembered tables; with one more, all are forgotten."""

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Access(NamedTuple):
    """Way in which a kernel reads a matrix: one program text for each.

    The text has an order in which a tile is added up. A matrix's way is that of its shape and
    strides alone, so that its bits depend neither on its address nor on other matrices.
    """

    dtype: torch.dtype
    """Dtype of the elements."""
    along: int
    """Dimension whose elements are neighbours in memory; -1 for none."""
    is_wide: bool
    """Whether all lines along it begin and end at multiples of `ALIGNMENT`."""

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Access:
        """Return the way for a matrix (O, I)."""
        along = 1 if strides[1] == 1 else 0 if strides[0] == 1 else -1
        is_wide = along >= 0 and not (shape[along] % ALIGNMENT or strides[1 - along] % ALIGNMENT)
        return cls(dtype, along, is_wide)

    @property
    def settings(self) -> dict[str, Any]:
        """Constants of a kernel that reads in this way."""
        return {"DTYPE": triton_type(self.dtype), "ALONG": self.along, "IS_WIDE": self.is_wide}


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's type of a tensor's elements."""
    found: tl.dtype = getattr(tl, str(dtype).removeprefix("torch."))
    return found


def readable(matrix_OI: Tensor) -> Tensor:
    """Return a matrix, or a copy of one whose address does not suit its way."""
    if matrix_OI.data_ptr() % ALIGNMENT == 0:
        return matrix_OI
    is_wide = Access.of(matrix_OI.shape, matrix_OI.stride(), matrix_OI.dtype).is_wide
    return matrix_OI.clone() if is_wide else matrix_OI


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows of numbers on the device, and the row that each program of a launch goes by."""

    rows: Tensor
    """Numbers, (n, fields), int64; the last one of a row is its first program."""
    owners: Tensor
    """Row of each program, (programs,), int32."""

    @property
    def grid(self) -> tuple[int]:
        """Grid of the launch."""
        return (len(self.owners),)

    @property
    def settings(self) -> dict[str, Any]:
        """Constants of a kernel that reads the rows."""
        return {"FIELDS": self.rows.shape[1]}


@dataclass(frozen=True, slots=True)
class Launch(Generic[K]):
    """One launch over some of the matrices that are at hand: those of one kind."""

    kind: K
    """Kind of the matrices, by which the kernel's constants are chosen."""
    table: Table
    """A row for each; its last number but one is the matrix's place among all at hand."""


class Tables:
    """Tables on a device, which are remembered: launches of every step ask for equal ones.

    Addresses of gradients are mostly those of a step before, as torch's allocator gives them. One
    thread asks, and all kernels that read the tables follow one another.

    Attributes:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with none."""
        self.device = device
        self._known: dict[Hashable, Any] = {}

    def known(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the thing that was made for a key, or make it."""
        found: T | None = self._known.get(key)
        if found is None:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = make()
        return found

    def addresses(self, numbers: tuple[int, ...]) -> Tensor:
        """Return addresses on the device, (n,), int64."""
        return self.known(
            ("addresses", numbers), lambda: self._sent(torch.tensor(numbers, device="cpu"))
        )

    def table(self, rows: Sequence[Sequence[int]], programs: Sequence[int]) -> Table:
        """Return rows on the device, each with a number of programs of its own."""
        counts = torch.tensor(programs, device="cpu")
        firsts = counts.cumsum(0) - counts
        numbers = torch.tensor(rows, dtype=torch.int64, device="cpu")
        owners = torch.arange(len(rows), dtype=torch.int32, device="cpu").repeat_interleave(counts)
        whole = torch.cat([numbers, firsts.unsqueeze(1)], dim=1)
        return Table(self._sent(whole), self._sent(owners))

    def launches(self, matrices: Sequence[tuple[K, Sequence[int], int]]) -> list[Launch[K]]:
        """Return the launches over matrices: (kind, row of the table, number of programs) each.

        A matrix without a program is in none: CUDA launches no empty grid.
        """
        kinds: dict[K, list[int]] = {}
        for place, (kind, _, num_programs) in enumerate(matrices):
            if num_programs:
                kinds.setdefault(kind, []).append(place)
        found = []
        for kind, places in kinds.items():
            rows = [[*matrices[place][1], place] for place in places]
            found.append(Launch(kind, self.table(rows, [matrices[place][2] for place in places])))
        return found

    def _sent(self, host: Tensor) -> Tensor:
        """Return a copy on the device, for which nothing waits: it comes from pinned memory."""
        pinned = host.pin_memory() if self.device.type == "cuda" else host
        there = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        return there.copy_(pinned, non_blocking=True)
