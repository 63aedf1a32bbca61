"""Several processes of this machine: the collectives between them, and short runs that they share.

They are started as torchrun starts ranks, on this machine alone. Predictions of them rest on one
process's profile, with a few constants that other runs of as many processes give.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from experiments.calibration.parts import timed
from experiments.calibration.profile import measured
from experiments.calibration.runs import ObservedRun, observe
from experiments.training.parts.ranks.cores import share_cores
from experiments.training.parts.ranks.ranks import Ranks, joined
from experiments.training.parts.setup import choose_device, use_threads
from experiments.training.settings.training import TrainSettings
from sim.fitting.fit import Sample, fit_constants
from sim.fitting.refine import Observation, refine
from sim.hardware.components import Fabric
from sim.hardware.profile import HardwareProfile
from zenflow.columns.host_shares import all_gather
from zenflow.host.limits import usable_cores

CONSTANTS = (
    "fabric.bandwidth",
    "fabric.latency",
    "host.core_sharing",
    "overheads.bucket",
    "overheads.copy",
)
"""Constants that runs of several ranks refine: collectives, shared cores, and hand-overs among
threads that have fewer cores than one process. All others are as one process has found them."""
_ELEMENTS = (1 << 14, 1 << 17, 1 << 20, 1 << 22)
"""Elements of float32 in a collective."""
_PATIENCE = 0.2
"""Seconds between two looks at whether all processes have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """Costs of several ranks compared with one."""

    count: int
    """Number of ranks that ran together."""
    backend: str
    """Name of the library of collectives."""
    values: Mapping[str, float]
    """Values of ``CONSTANTS``, as far as the machine has them."""

    def of(self, profile: HardwareProfile) -> HardwareProfile:
        """Return one process's profile as that of the ranks."""
        what = f"{self.backend}, {self.count} ranks"
        fabric = Fabric(
            name=self.backend,
            bandwidth=measured(self.values["fabric.bandwidth"], what),
            latency=measured(self.values["fabric.latency"], what),
        )
        return replace(profile, num_devices=self.count, fabric=fabric).with_values(self.values)


def num_ranks(device: torch.device) -> int:
    """Return the number of ranks that are measured here: two, or one without room."""
    found = usable_cores() if device.type == "cpu" else torch.cuda.device_count()
    return min(2, found)


def refined(
    probed: RankFigures, profile: HardwareProfile, runs: Sequence[Observation]
) -> RankFigures:
    """Return the figures with which the simulator tells these runs best.

    Args:
        probed: As collectives by themselves give them.
        profile: Of one process.
        runs: Runs of as many ranks.
    """
    names = CONSTANTS if profile.device.is_cpu else CONSTANTS[:2]  # a GPU is each rank's own
    found = refine(probed.of(profile), runs, names=names).profile.quantities()
    return replace(probed, values={name: found[name].value for name in names})


def observe_ranks(
    settings: Sequence[TrainSettings],
    *,
    count: int,
    turns: int,
    windows: int,
    on_turn: Callable[[], None],
) -> tuple[RankFigures, list[ObservedRun]]:
    """Return the costs of collectives, and the runs' steady states as their first rank sees them.

    Args:
        settings: Of the runs, each with its ``parallel``.
        count: Number of ranks.
        turns: Of each run.
        windows: Of each turn.
        on_turn: Called after each.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank had an error; the others are ended.
    """
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (count, port, list(settings), turns, windows, theirs)
    processes = spawn(_rank, arguments, count, join=False)
    found: Any = None
    ended = False
    while not ended:
        ended = processes.join(_PATIENCE)
        while ours.poll():
            found = ours.recv()
            if found is None:
                on_turn()
    figures, runs = found
    return figures, runs


def _rank(
    rank: int,
    count: int,
    port: int,
    settings: Sequence[TrainSettings],
    turns: int,
    windows: int,
    pipe: Connection,
) -> None:
    """Measure as one of the ranks; the first one sends a None for each turn, and what it found."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    first = settings[0]
    with joined(first.parallel, first.device) as ranks:

        def tell() -> None:
            if ranks.is_first:
                pipe.send(None)

        figures = _measure_collectives(first, ranks)
        runs = observe(settings, turns=turns, windows=windows, on_turn=tell, ranks=ranks)
        if ranks.is_first:
            pipe.send((figures, runs))


def _measure_collectives(settings: TrainSettings, ranks: Ranks) -> RankFigures:
    """Return the seconds of all-reduces and all-gathers of several sizes on this rank's cores."""
    device = choose_device(settings)
    cores = share_cores(ranks, device, binds=settings.bind_cores)
    use_threads(settings, device, cores.count)
    samples = []
    for elements in _ELEMENTS:
        whole = torch.zeros(elements, device=device)
        part = whole[: elements // ranks.count].clone()
        passed = 4.0 * elements * (ranks.count - 1) / ranks.count
        reduces = partial(distributed.all_reduce, whole)
        gathers = partial(all_gather, whole, part)
        for work, times in ((reduces, 2.0), (gathers, 1.0)):
            samples.append(Sample({"call": 1, "byte": times * passed}, timed(work, device)))
    fit = fit_constants(samples)
    values = {
        "fabric.bandwidth": fit.rate("byte", 1e12),
        "fabric.latency": max(1e-9, fit.constants["call"]),
    }
    return RankFigures(count=ranks.count, backend=distributed.get_backend(), values=values)
