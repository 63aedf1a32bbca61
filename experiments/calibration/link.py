"""A GPU's link by itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from experiments.calibration.parts import copy_on, timed
from sim.fitting.fit import Fit, Sample, fit_constants


@dataclass(frozen=True, slots=True)
class LinkRates:
    """A GPU's link: bytes/s and seconds of a copy, each way, pinned or not, alone or together."""

    d2h: Fit
    h2d: Fit
    pageable: float
    """Bytes/s of pageable copies over pinned ones, both ways."""
    duplex: float
    """Both ways together over the sum of each alone."""


_COPY_BYTES = (1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)


def measure_link(device: torch.device) -> LinkRates:
    """Return the bandwidths of a CUDA device's link."""
    there = torch.empty(max(_COPY_BYTES), dtype=torch.uint8, device=device)
    back = torch.empty_like(there)
    pinned = [torch.empty(max(_COPY_BYTES), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pageable = torch.zeros(max(_COPY_BYTES), dtype=torch.uint8)

    def samples(down: bool, host: Tensor) -> list[Sample]:
        found = []
        for size in _COPY_BYTES:
            source, target = (there, host) if down else (host, there)
            copy = partial(target[:size].copy_, source[:size], non_blocking=True)
            seconds = timed(copy, device)
            found.append(Sample({"call": 1, "byte": size}, seconds))
        return found

    d2h, h2d = (fit_constants(samples(down, pinned[0])) for down in (True, False))
    plain = [fit_constants(samples(down, pageable)).constants["byte"] for down in (True, False)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        copy_on(streams[0], there, pinned[0])
        copy_on(streams[1], pinned[1], back)

    alone = d2h.constants["byte"], h2d.constants["byte"]
    together = 2 * max(_COPY_BYTES) / timed(both, device)
    return LinkRates(
        d2h=d2h,
        h2d=h2d,
        pageable=min(1.0, sum(alone) / sum(plain)),
        duplex=min(1.0, together / (1 / alone[0] + 1 / alone[1])),
    )
