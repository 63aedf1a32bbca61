"""The engine's parts by themselves: host passes by threads, packing, gathering, the link."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sim.fitting.fit import Fit, Sample, fit_constants
from zenflow.device.base import AbstractDevice, Arrival
from zenflow.host import kernel
from zenflow.host.jobs import AdamStep, ReplayJob
from zenflow.host.memory import zeroed
from zenflow.host.pool import HostPool
from zenflow.surface.assembly import bind

_REPEATS = 7
_WAIT_TIMEOUT = 600.0
"""Seconds after which a wait for the device is an error."""
_HOST_PARAMS = 1 << 24
"""Number of parameters of a host pass. Their state exceeds the caches of all cores together."""
_FLUSHED = 1 << 24
"""Elements of float32 that are walked over to empty a CPU's caches."""
_COLUMNS = 1024
_CACHED_PARAMS = 1 << 15
"""The same of a pass over state in a core's own cache, which arithmetic bounds."""
_PASS_BYTES = 28
"""Bytes of DRAM traffic for each parameter in a pass for one float32 gradient."""
_CACHED_GRADIENTS, _CACHED_PASSES = 8, 20
"""Number of gradients of a pass in cache, and of such passes in what is timed."""
_MATRICES = ((256, 256), (512, 512), (512, 1024), (1024, 1024), (1024, 2048))
_DEFERRED_SHARE = 0.9


def timed(run: Callable[[], Any], device: torch.device, repeats: int = _REPEATS) -> float:
    """Return the median seconds of a call, behind a synchronisation on a GPU.

    On a CPU its data are not in the caches, as in a step, where something else ran before.
    """
    run()
    found = []
    elsewhere = torch.zeros(_FLUSHED if device.type == "cpu" else 0)
    for _ in range(repeats):
        elsewhere.add_(1.0)
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - started)
    return median(found)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class HostRates:
    """Speeds of the host's pass over masters and moments."""

    by_threads: dict[int, float]
    """Bytes/s of a pass for one gradient, by threads."""
    steps: float
    """AdamW steps of an element that one thread takes in a second, on data in its cache."""
    beside_copies: float | None = None
    """Rate with all threads while a GPU copies both ways; None without one."""


def measure_host(max_threads: int, device: torch.device) -> HostRates:
    """Return the host kernel's speeds, the bytes/s for 1, 2, 4, ... threads."""
    counts = sorted({*(2**power for power in range(max_threads.bit_length())), max_threads})
    whole, rates = _replay_of_zeros(_HOST_PARAMS, num_gradients=1), {}
    for count in counts:
        with _host_pass(whole, count) as run:
            rates[count] = _HOST_PARAMS * _PASS_BYTES / timed(run, torch.device("cpu"))
    steps = _cached_steps()
    if device.type != "cuda":
        return HostRates(rates, steps)
    with _host_pass(whole, max_threads) as run:
        return HostRates(rates, steps, _HOST_PARAMS * _PASS_BYTES / _beside_copies(run, device))


def _cached_steps() -> float:
    """Return the AdamW steps of an element that one thread takes in a second, without DRAM."""
    replay = _replay_of_zeros(_CACHED_PARAMS, _CACHED_GRADIENTS)
    with _host_pass(replay, threads=1) as run:

        def often() -> None:
            for _ in range(_CACHED_PASSES):
                run()

        seconds = timed(often, torch.device("cpu")) / _CACHED_PASSES
    return _CACHED_PARAMS * _CACHED_GRADIENTS / seconds


def _replay_of_zeros(num_params: int, num_gradients: int) -> ReplayJob:
    """Return the engine's pass over state of zeros, in memory as the engine's."""
    shape = (num_params // _COLUMNS, _COLUMNS)
    master, exp_avg, exp_avg_sq, *grads = (
        zeroed(num_params, torch.float32).view(shape) for _ in range(3 + num_gradients)
    )
    return ReplayJob(
        master=master,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        step=torch.zeros(shape[0], dtype=torch.int64),
        active=torch.ones(shape[0], dtype=torch.uint8),
        steps=[AdamStep(1e-3, 0.9, 0.999, 1e-8, 1.0, grad=grad) for grad in grads],
    )


@contextmanager
def _host_pass(replay: ReplayJob, threads: int) -> Iterator[Callable[[], Any]]:
    """Yield a call of the pass over all rows, on the engine's pool of so many threads.

    Without the C kernel there is no pool, and Python threads share the rows.
    """
    pool = HostPool.open(threads - 1)
    if pool is not None:
        try:
            yield lambda: pool.run([replay.encode()])
        finally:
            pool.close()
        return
    rows = replay.master.shape[0]
    cuts = [rows * index // threads for index in range(threads + 1)]
    pieces = [replay.rows(*ends) for ends in pairwise(cuts)]
    with ThreadPoolExecutor(threads) as executor:
        yield lambda: list(executor.map(kernel.run, pieces))


def _beside_copies(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a host pass while copies go both ways."""
    host = [torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(1 << 28, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        for _ in range(4):  # outlasts the pass
            _copy(streams[0], there[0], host[0])
            _copy(streams[1], host[1], there[1])

    found = []
    for _ in range(_REPEATS):
        synchronize(device)
        both()
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    synchronize(device)
    return median(found)


def _copy(stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> None:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


PARTS = ("pack", "unpack", "intake", "update")
"""What the device's side of the engine does beside compute."""


def measure_parts(device: torch.device, dtype: torch.dtype) -> dict[str, Fit]:
    """Return seconds by bytes (or parameters) and by call of each of ``PARTS``.

    The fits are over matrices of several sizes.
    """
    engine = bind(device, _WAIT_TIMEOUT)
    try:
        samples = [_matrix_samples(engine, rows, columns, dtype) for rows, columns in _MATRICES]
    finally:
        engine.close()
    by_part = zip(PARTS, zip(*samples, strict=True), strict=True)
    return {name: fit_constants(own) for name, own in by_part}


def _matrix_samples(
    engine: AbstractDevice, rows: int, columns: int, dtype: torch.dtype
) -> tuple[Sample, ...]:
    """Return a measurement of each of ``PARTS`` on one matrix."""
    device = engine.torch_device
    grad = torch.randn(rows, columns, device=device).to(dtype)
    weight = grad.clone()
    count = int(_DEFERRED_SHARE * columns)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(0)).to(device)
    deferred, important = order[:count].sort().values, order[count:].sort().values
    host = engine.pinned_slab(count * rows, dtype).view(count, rows)
    energies, no_rows = torch.zeros(columns, device=device), torch.zeros(0, device=device)

    def intake() -> None:
        engine.energies([(grad, energies, no_rows)])
        grad.index_select(1, important)

    state = [torch.zeros(columns - count, rows, device=device) for _ in range(3)]

    def update() -> None:
        fresh = grad.index_select(1, important).t().float()
        state[0].lerp_(fresh, 0.1)
        state[1].mul_(0.999).addcmul_(fresh, fresh, value=0.001)
        state[2].addcdiv_(state[0], state[1].sqrt().add_(1e-8), value=-1e-4)
        weight.index_copy_(1, important, state[2].t().to(dtype))

    moved = count * rows * dtype.itemsize
    down = timed(lambda: engine.pack([(grad, deferred, host)], engine.mark()), device)
    up = timed(lambda: engine.unpack([Arrival(host, deferred, weight)], engine.mark()), device)
    return (
        Sample({"call": 1, "byte": moved}, down),
        Sample({"call": 1, "byte": moved}, up),
        Sample({"call": 1, "byte": rows * columns * dtype.itemsize}, timed(intake, device)),
        Sample({"call": 1, "parameter": (columns - count) * rows}, timed(update, device)),
    )


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
    """Return what the link of a CUDA device carries."""
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
        _copy(streams[0], there, pinned[0])
        _copy(streams[1], pinned[1], back)

    alone = d2h.constants["byte"], h2d.constants["byte"]
    together = 2 * max(_COPY_BYTES) / timed(both, device)
    return LinkRates(
        d2h=d2h,
        h2d=h2d,
        pageable=min(1.0, sum(alone) / sum(plain)),
        duplex=min(1.0, together / (1 / alone[0] + 1 / alone[1])),
    )


def measure_launch(device: torch.device) -> float:
    """Return the seconds from one small kernel's start to the next one's."""
    small = torch.zeros(16, device=device)
    count = 200

    def run() -> None:
        for _ in range(count):
            small.add_(1.0)

    return timed(run, device) / count
