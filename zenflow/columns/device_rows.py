"""Device memory of the optimizer: banks of important columns, and resident parameters.

Important columns of many parameters share a *bank*, a (K, O) matrix with one row per column, so
that one step costs a few kernels per column length and not a few per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from zenflow.columns.local import is_sharded, local_of
from zenflow.device.kernels.base import ColumnState
from zenflow.rule.adamw import Hyper
from zenflow.streaming.page import Page, page_of


@dataclass(slots=True, eq=False)
class Bank:
    """Important columns of one length, parameter group and dtype, as rows: (K, O), float32."""

    group: int
    """Index of the parameter group."""
    num_rows: int
    """Length O of a column, the width of this matrix."""
    num_columns: int = 0
    """Number of columns, K, the rows of this matrix."""
    has_second: bool = True
    """Whether the columns have second moments."""
    master: Tensor = field(default_factory=lambda: torch.empty(0))
    """True weights of the columns, (K, O), float32."""
    exp_avg: Tensor = field(default_factory=lambda: torch.empty(0))
    """AdamW's first moments of the columns, (K, O), float32."""
    exp_avg_sq: Tensor = field(default_factory=lambda: torch.empty(0))
    """AdamW's second moments of the columns, (K, O), float32; (K, 0) without."""
    step: Tensor = field(default_factory=lambda: torch.empty(0))
    """Number of Adam steps that each row has taken, (K,), int64."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the tensors that have no elements."""
        return () if self.has_second else ("exp_avg_sq",)

    def allocate(self, device: torch.device) -> None:
        """Allocate memory for all columns counted so far."""
        widths = (self.num_rows, self.num_rows, self.num_rows * self.has_second)
        self.master, self.exp_avg, self.exp_avg_sq = (
            torch.zeros(self.num_columns, width, dtype=torch.float32, device=device)
            for width in widths
        )
        self.step = torch.zeros(self.num_columns, dtype=torch.int64, device=device)

    def free(self) -> None:
        """Give the memory back."""
        self.num_columns = 0
        self.master = self.exp_avg = self.exp_avg_sq = self.step = torch.empty(0)

    def part(self, first: int, last: int) -> ColumnState:
        """Return views of rows first..last-1."""
        part = slice(first, last)
        return ColumnState(
            *(self.master[part], self.exp_avg[part], self.exp_avg_sq[part], self.step[part])
        )


@dataclass(slots=True, eq=False)
class NamedParam:
    """A parameter with the group it is in and a name for messages."""

    param: Tensor
    """Parameter of the model, changed in place."""
    name: str
    """Name of the parameter in messages."""
    group: int
    """Index of the parameter group."""
    is_sharded: bool = field(init=False)
    """Whether the parameter's rows are spread over ranks."""
    page: Page | None = field(init=False)
    """Page with which the parameter visits the device; None for one that stays there."""

    def __post_init__(self) -> None:
        """Find out once what every step needs to know."""
        self.is_sharded = is_sharded(self.param)
        self.page = page_of(self.param)

    @property
    def device(self) -> torch.device:
        """Device that computes with the parameter."""
        if self.page is None:
            return self.param.device
        return self.page.stream.device.torch_device

    @contextmanager
    def held(self, *, changes: bool = False) -> Iterator[None]:
        """Have the parameter on its device inside of a `with` block.

        Args:
            changes: Whether the block, or what it launches, writes to the parameter.
        """
        if self.page is None:
            yield
        else:
            with self.page.held(changes=changes):
                yield

    @property
    def data(self) -> Tensor:
        """Local rows of the parameter, without autograd; all rows if it is not sharded."""
        return local_of(self.param) if self.is_sharded else self.param.data


@dataclass(slots=True, eq=False)
class Resident(NamedParam):
    """A parameter that stays on the device whole."""

    master: Tensor
    """True weights, float32: the parameter itself, or a copy."""
    has_master: bool
    """Whether `master` is a copy: the parameter has another dtype, or gaps in memory, into which
    torch's fused AdamW would write."""
    exp_avg: Tensor
    """First moments, of the parameter's shape, float32."""
    exp_avg_sq: Tensor
    """Second moments, of the parameter's shape, float32."""
    step: Tensor
    """Number of Adam steps taken, shape (), float32, as torch's fused AdamW wants it."""

    @classmethod
    def of(cls, param: Tensor, name: str, group: int) -> Resident:
        """Make the state of a parameter that has taken no step."""
        data = local_of(param)
        has_gaps = torch.empty_like(data, device="meta").stride() != data.stride()
        has_master = data.dtype != torch.float32 or has_gaps
        master = data.to(torch.float32, copy=True) if has_master else data
        return cls(
            param=param,
            name=name,
            group=group,
            master=master,
            has_master=has_master,
            exp_avg=torch.zeros_like(master),
            exp_avg_sq=torch.zeros_like(master),
            step=torch.zeros((), dtype=torch.float32, device=data.device),
        )

    def state(self) -> dict[str, Tensor]:
        """Return the live tensors under torch's names."""
        state = {"step": self.step, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return state | {"master": self.master} if self.has_master else state


@torch.no_grad()
def update_residents(residents: list[Resident], grads: list[Tensor], hyper: Hyper) -> None:
    """Take an AdamW step on residents of one group, by torch's own fused AdamW."""
    for resident in residents:
        if not resident.has_master:
            resident.master = resident.data  # a user may have replaced `.data` since
    torch_adamw(
        [resident.master for resident in residents],
        grads,
        [resident.exp_avg for resident in residents],
        [resident.exp_avg_sq for resident in residents],
        [],
        [resident.step for resident in residents],
        fused=True,
        foreach=False,
        amsgrad=False,
        maximize=False,
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
    )
    low = [resident for resident in residents if resident.has_master]
    if low:
        torch._foreach_copy_([r.data for r in low], [r.master for r in low])
