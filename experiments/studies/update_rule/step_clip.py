"""Host-side step clipping, tried by the ablation of the update rule: no setting of the engine.

Within the context every element of a host update moves by at most ``bound`` times the window's
learning rate (lr times 1, sqrt(n) or n, as ``deferred_lr_scale`` has it); what is uploaded runs
ahead of the clipped step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from zenflow.columns.host_rows import HostRows
from zenflow.columns.host_update import WindowUpdate
from zenflow.errors import ConfigError
from zenflow.host.pool import HostPool


@contextmanager
def clipped_steps(bound: float | None) -> Iterator[None]:
    """Clip the host's steps of all optimizers made inside the context; None changes nothing.

    They run on Python threads: the C pool knows no such bound.

    Args:
        bound: Most that an element may move, over the learning rate of its window. AdamW's own
            steps seldom exceed 1 after the first ones.

    Raises:
        ConfigError: The bound is not positive.
    """
    if bound is None:
        yield
        return
    if not bound > 0:
        raise ConfigError(f"a step's bound must be positive, got {bound}: None clips nothing")
    plain, opened = WindowUpdate.apply, HostPool.__dict__["open"]

    def apply(
        self: WindowUpdate, host: HostRows, factor: float, active: Tensor, out: Tensor
    ) -> None:
        before = host.master.clone()
        plain(self, host, factor, active, out)
        most = bound * self.hyper.lr * self.lr_scale
        moved = (host.master - before).clamp_(-most, most)
        host.master.copy_(before.add_(moved))
        out.copy_(before.add_(moved, alpha=self.prediction))

    WindowUpdate.apply = apply  # type: ignore[method-assign]  # an experiment, not a setting
    HostPool.open = classmethod(lambda cls, _: None)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        WindowUpdate.apply = plain  # type: ignore[method-assign]
        HostPool.open = opened  # type: ignore[method-assign]
