"""Check that ranks which share the hosts' work have the same gradients.

`DistributedDataParallel` averages gradients, but not in a pass inside of `no_sync()` or through
`model.module`: then every rank has its own. Such ranks would choose different columns, and their
devices would wait for each other in vain. So they compare the norm, one number, before it is used.
On a GPU the result is read when it has come: before a selection, or a step later.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from zenflow.errors import GradientError

if TYPE_CHECKING:
    from torch import Tensor

    from zenflow.columns.host_shares import HostShares
    from zenflow.device.base import AbstractDevice, HostValues

TOLERANCE = 1e-5
"""Largest relative difference of two ranks' norms that different kinds of GPUs may explain."""

REMEDY = (
    "let the last backward before step() go through the DistributedDataParallel module, not its "
    ".module, and outside of no_sync()"
)
"""Remedy for gradients that ranks have not averaged, as messages end."""


class SameGradients:
    """Compares the ranks' norms in keep mode, where no hook shows that gradients were averaged."""

    def __init__(self, shares: HostShares, device: AbstractDevice) -> None:
        """Start with nothing compared."""
        self._shares = shares
        self._device = device
        self._found: tuple[int, HostValues] | None = None

    def compare(self, norm: Tensor, step: int) -> None:
        """Compare a step's norm, shape (), over the ranks, in order with the device's work.

        Raises:
            GradientError: The ranks differ; on a GPU `check` says so.
        """
        norm = norm.nan_to_num(nan=math.inf)  # no order has NaN, and neither is of use
        extremes = self._shares.largest(torch.stack([norm, -norm]))
        self._found = step, self._device.to_host(extremes)
        if self._device.is_synchronous:
            self.check()

    def check(self) -> None:
        """Wait for the newest comparison.

        Raises:
            GradientError: The ranks differed.
        """
        if self._found is None:
            return
        (step, values), self._found = self._found, None
        most, least = values.get()[0], -values.get()[1]
        if most == least or (math.isfinite(most) and most - least <= TOLERANCE * most):
            return
        error = GradientError(
            f"ranks have different gradients in step {step}, whose norms go from {least:g} to "
            f"{most:g}: they were not averaged; {REMEDY}"
        )
        error.is_late = not self._device.is_synchronous
        raise error
