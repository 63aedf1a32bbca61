"""An emulated link sized for this machine: slow enough to matter, by a rule that is printed.

On a CPU there is no PCIe. A paced link stands in for it; so that a comparison says something on
any machine, its speed follows from the model's compute time, measured first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from experiments.training.parts.setup import RunSetup
from experiments.training.run.evaluation import loss_of

COPY_SHARE = 1.2
"""Time of one copy of the model over the link, as a share of forward and backward."""
_WARM_STEPS = 2
_TIMED_STEPS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChoice:
    """A link and the measurement it follows from."""

    compute_seconds: float
    """Median of forward and backward, all micro-batches of a step."""
    model_bytes: int
    """Bytes of the model that go over this link: of several ranks' links one rank's part."""
    copy_share: float
    """Time of one copy of these over the link, as a share of that."""
    num_ranks: int = 1
    """Number of ranks, each with a link of its own."""

    @property
    def bytes_per_second(self) -> float:
        """Of the link, the same both ways."""
        return self.model_bytes / (self.copy_share * self.compute_seconds)

    def __str__(self) -> str:
        """Return the figures in a sentence."""
        size = f"{self.model_bytes / 1e6:.1f} MB"
        what = f"the model's {size}" if self.num_ranks == 1 else f"a rank's {size} of the model"
        return (
            f"emulated link: {self.bytes_per_second / 1e6:.1f} MB/s each way, so that {what} take "
            f"{self.copy_share:.0%} of the measured "
            f"{self.compute_seconds * 1e3:.0f} ms of forward and backward"
        )


def choose_link(setup: RunSetup, copy_share: float = COPY_SHARE) -> LinkChoice:
    """Measure forward and backward without an optimizer and return the link that fits them.

    Of several ranks all measure, and take the link that fits the first one.
    """
    seconds = [_compute_seconds(setup) for _ in range(_WARM_STEPS + _TIMED_STEPS)]
    compute = setup.ranks.of_first(median(seconds[_WARM_STEPS:]))
    return LinkChoice(
        compute_seconds=compute,
        model_bytes=setup.model_bytes // setup.ranks.count,
        copy_share=copy_share,
        num_ranks=setup.ranks.count,
    )


def _compute_seconds(setup: RunSetup) -> float:
    started = time.perf_counter()
    for micro in range(setup.settings.grad_accum):
        batch = setup.data.train.batch(micro).to(setup.device)
        loss_of(setup, batch).backward()
    seconds = time.perf_counter() - started
    setup.model.zero_grad()
    return seconds
