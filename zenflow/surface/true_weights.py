"""True weights: shows the masters on the device for a while, then training's weights again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zenflow.columns.device_rows import NamedParam
from zenflow.columns.layout import SplitParam
from zenflow.device.base import Arrival

if TYPE_CHECKING:
    from zenflow.step.engine import Engine


class TrueWeights:
    """Swaps deferred columns on the device between the weights of training and the masters.

    Important columns and residents are always true. The weights of training wait in the staging
    buffers, which are free between steps and have just the right size.
    """

    def __init__(self, engine: Engine) -> None:
        """Start with the weights of training on the device."""
        self._engine = engine
        self.are_shown = False

    def stash(self) -> None:
        """Copy the weights of training to the staging buffers, if they are not there already."""
        if self.are_shown:
            return
        engine = self._engine
        engine.drain()
        device = engine.device
        device.pack(
            [
                (s.part.of(s.weight()), s.deferred_columns, s.host.staging)
                for s in engine.layout.splits
            ],
            device.mark(),
        )
        device.synchronize()

    @torch.no_grad()
    def show(self) -> None:
        """Bring the masters to the device, all host updates so far included."""
        if self.are_shown:
            return
        self.stash()
        for split in self._engine.layout.splits:
            self._engine.show_true(split)
        self.are_shown = True

    @torch.no_grad()
    def restore(self) -> None:
        """Write the weights of training from staging into the device's deferred columns."""
        device = self._engine.device
        arrivals = [
            Arrival(split.host.staging, split.deferred_columns, split.weight())
            for split in self._engine.layout.splits
        ]
        device.unpack(arrivals, device.mark(), self._engine.layout.gather)
        device.synchronize()
        self.are_shown = False

    @torch.no_grad()
    def first_foreign(self) -> NamedParam | None:
        """Return a parameter that somebody else has written to; None if there is none.

        Compares where the device has masters in any case: important columns, and residents with a
        copy. So a write to a whole parameter is found.
        """
        for split in self._engine.layout.splits:
            masters = split.bank.master[split.bank_first : split.bank_last]
            if not _are_shown(masters, split.weight().t()[split.important_columns]):
                return split
        for resident in self._engine.layout.residents:
            if resident.has_master and not _are_shown(resident.master, resident.data):
                return resident
        return None

    @torch.no_grad()
    def are_there(self) -> bool:
        """Whether all weights are the masters, bit for bit; a resident may be its own master."""
        return self.first_foreign() is None and all(
            _are_shown(split.host.master, _deferred_rows(split))
            for split in self._engine.layout.splits
        )

    @torch.no_grad()
    def are_of_training(self) -> bool:
        """Whether deferred weights equal those that a loaded state has put into staging."""
        return all(
            _are_shown(split.host.staging, _deferred_rows(split))
            for split in self._engine.layout.splits
        )

    def forget(self) -> None:
        """Take the weights on the device for those of training, and forget the stashed ones."""
        self.are_shown = False


def _deferred_rows(split: SplitParam) -> Tensor:
    """Return the device's weights of the host's rows, (D, O)."""
    return split.part.of(split.weight()).t()[split.deferred_columns]


def _are_shown(masters: Tensor, weights: Tensor) -> bool:
    """Whether weights equal the masters in their dtype; NaN equals NaN."""
    rounded = masters.to(weights.dtype).to(weights.device)
    return torch.allclose(weights, rounded, rtol=0.0, atol=0.0, equal_nan=True)
