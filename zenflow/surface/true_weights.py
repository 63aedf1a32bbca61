"""True weights: the masters on the device for a while, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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
            [(s.weight(), s.deferred_columns, s.host.staging) for s in engine.layout.splits],
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
        """Write what the staging buffers hold into the device's deferred columns."""
        device = self._engine.device
        arrivals = [
            Arrival(split.host.staging, split.deferred_columns, split.weight())
            for split in self._engine.layout.splits
        ]
        device.unpack(arrivals, device.mark())
        device.synchronize()
        self.are_shown = False

    @torch.no_grad()
    def are_there(self) -> bool:
        """Whether split parameters' weights are the masters, bit for bit; others are their own."""
        for split in self._engine.layout.splits:
            rows_IO = split.weight().t()
            masters = split.bank.master[split.bank_first : split.bank_last]
            for columns, master in (
                (split.important_columns, masters),
                (split.deferred_columns, split.host.master),
            ):
                shown = rows_IO[columns]
                if not torch.equal(shown, master.to(shown.dtype).to(shown.device)):
                    return False
        return True

    def forget(self) -> None:
        """Let the weights on the device be those of training."""
        self.are_shown = False
