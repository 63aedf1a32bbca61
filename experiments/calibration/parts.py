"""The engine's parts by themselves: host passes by threads, packing, gathering, AdamW."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sim.fitting.fit import Fit, Sample, fit_constants
from zenflow.columns.device_rows import Bank, Resident, update_residents
from zenflow.device.base import AbstractDevice, Arrival
from zenflow.device.kernels.base import ColumnStep, HostColumns, Member
from zenflow.device.kernels.choice import kernels_for
from zenflow.host import kernel
from zenflow.host.compact import CompactState
from zenflow.host.jobs import AdamStep, CatchUpJob, CompactJob
from zenflow.host.memory import zeroed
from zenflow.host.pool import HostPool
from zenflow.rule.adamw import Hyper
from zenflow.surface.assembly import bind

_REPEATS = 7
_WAIT_TIMEOUT = 600.0
"""Seconds after which a wait for the device is an error."""
_HOST_PARAMS = 1 << 24
"""Number of parameters of a host pass. Their state exceeds the caches of all cores together."""
_FLUSHED = 1 << 21
"""Elements of float32 that are walked over to empty a CPU core's own caches. The one that cores
share keeps most of a small model's step."""
_COLUMNS = 1024
_CACHED_PARAMS = 1 << 15
"""Number of parameters of a pass over state in a core's own cache, which arithmetic bounds."""
_PASS_BYTES = 28
"""Bytes of DRAM traffic for each parameter in a pass for one float32 gradient."""
_CACHED_GRADIENTS, _CACHED_PASSES = 8, 20
"""Number of gradients of a pass in cache, and of such passes in what is timed."""
_LEAST_CODING = 0.01
"""Least time in which compact state is coded, in AdamW steps: a difference may come out as 0."""
_MATRICES = ((512, 1024), (2048, 2048), (8192, 2048), (4096, 14336), (32000, 4096))
_CPU_MATRICES = ((128, 128), (352, 128), (256, 256), (704, 256), (1024, 512))
"""Shapes of the matrices that are timed on a GPU, where small ones show launches alone, and on a
CPU, whose models are smaller."""
_DEFERRED_SHARE = 0.9


def timed(
    run: Callable[[], Any],
    device: torch.device,
    repeats: int = _REPEATS,
    *,
    before: Callable[[], Any] = lambda: None,
) -> float:
    """Return the median seconds of a call, behind a synchronisation on a GPU.

    On a CPU its data are not in a core's own caches, as in a step, where something else ran
    before, but for what `before` brings there.
    """
    run()
    found = []
    elsewhere = torch.zeros(_FLUSHED if device.type == "cpu" else 0)
    for _ in range(repeats):
        elsewhere.add_(1.0)
        before()
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
    coding: float
    """Time in which one thread decodes and encodes compact state once, in AdamW steps of an
    element."""
    beside_copies: float | None = None
    """Rate with all threads while a GPU copies both ways; None without one."""


def measure_host(max_threads: int, device: torch.device) -> HostRates:
    """Return the host kernel's speeds, the bytes/s for 1, 2, 4, ... threads."""
    counts = sorted({*(2**power for power in range(max_threads.bit_length())), max_threads})
    whole, rates = _replay_of_zeros(_HOST_PARAMS, num_gradients=1), {}
    for count in counts:
        with _host_pass(whole, count) as run:
            rates[count] = _HOST_PARAMS * _PASS_BYTES / timed(run, torch.device("cpu"))
    replay = _replay_of_zeros(_CACHED_PARAMS, _CACHED_GRADIENTS)
    seconds = _cached_seconds(replay)
    step = seconds / _CACHED_GRADIENTS
    coding = max(_LEAST_CODING, (_cached_seconds(_compact(replay)) - seconds) / step)
    found = HostRates(rates, _CACHED_PARAMS / step, coding)
    if device.type != "cuda":
        return found
    with _host_pass(whole, max_threads) as run:
        beside = _HOST_PARAMS * _PASS_BYTES / _beside_copies(run, device)
        return replace(found, beside_copies=beside)


def _cached_seconds(job: CatchUpJob | CompactJob) -> float:
    """Return the seconds of a pass on one thread, over data in its cache."""
    with _host_pass(job, threads=1) as run:

        def often() -> None:
            for _ in range(_CACHED_PASSES):
                run()

        return timed(often, torch.device("cpu")) / _CACHED_PASSES


def _compact(replay: CatchUpJob) -> CompactJob:
    """Return a pass over compact state of zeros, with a replay's gradients."""
    num_rows, width = replay.master.shape
    return CompactJob(
        state=CompactState.zeros(num_rows, width),
        step=replay.step.clone(),
        active=replay.active,
        steps=replay.steps,
        upload=None,
        first=0,
        stride=width,
        seed=0,
    )


def _replay_of_zeros(num_params: int, num_gradients: int) -> CatchUpJob:
    """Return the engine's pass over state of zeros, in memory as the engine's."""
    shape = (num_params // _COLUMNS, _COLUMNS)
    master, exp_avg, exp_avg_sq, *grads = (
        zeroed(num_params, torch.float32).view(shape) for _ in range(3 + num_gradients)
    )
    return CatchUpJob(
        master=master,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        step=torch.zeros(shape[0], dtype=torch.int64),
        active=torch.ones(shape[0], dtype=torch.uint8),
        steps=[AdamStep(1e-3, 0.9, 0.999, 1e-8, 1.0, grad=grad) for grad in grads],
    )


@contextmanager
def _host_pass(job: CatchUpJob | CompactJob, threads: int) -> Iterator[Callable[[], Any]]:
    """Yield a call of the pass over all rows, on the engine's pool of so many threads.

    Without the C kernel there is no pool, and Python threads share the rows.
    """
    pool = HostPool.open(threads - 1)
    if pool is not None:
        try:
            yield lambda: pool.run([job.encode()])
        finally:
            pool.close()
        return
    rows = len(job.step)
    cuts = [rows * index // threads for index in range(threads + 1)]
    pieces = [job.rows(*ends) for ends in pairwise(cuts)]
    with ThreadPoolExecutor(threads) as executor:
        yield lambda: list(executor.map(kernel.run, pieces))


def _beside_copies(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a host pass while copies go both ways."""
    host = [torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(1 << 28, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        for _ in range(4):  # outlasts the pass
            copy_on(streams[0], there[0], host[0])
            copy_on(streams[1], host[1], there[1])

    found = []
    for _ in range(_REPEATS):
        synchronize(device)
        both()
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    synchronize(device)
    return median(found)


def copy_on(stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> None:
    """Queue a copy."""
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


PARTS = ("pack", "unpack", "intake", "columns", "whole")
"""Work of the device's side of the engine beside compute, by part."""


def measure_parts(device: torch.device, dtype: torch.dtype) -> dict[str, Fit]:
    """Return seconds by bytes (or parameters) and by call of each of ``PARTS``.

    The fits are over matrices of several sizes.
    """
    engine = bind(device, _WAIT_TIMEOUT)
    engine.kernels = kernels_for("auto", device, engine.kernels)
    try:
        samples = [
            (*_copy_samples(engine, *shape, dtype), *_step_samples(engine, *shape, dtype))
            for shape in (_CPU_MATRICES if device.type == "cpu" else _MATRICES)
        ]
    finally:
        engine.close()
    by_part = zip(PARTS, zip(*samples, strict=True), strict=True)
    return {name: fit_constants(own) for name, own in by_part}


def _owners(columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a matrix's deferred columns and its important ones, ascending."""
    count = int(_DEFERRED_SHARE * columns)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(0)).to(device)
    return order[:count].sort().values, order[count:].sort().values


def _copy_samples(
    engine: AbstractDevice, rows: int, columns: int, dtype: torch.dtype
) -> tuple[Sample, ...]:
    """Return measurements of what lanes do to one matrix: packing, and writing back.

    A GPU's kernels are timed without the copies between: the link is measured by itself.
    """
    device, kernels = engine.torch_device, engine.kernels
    grad = torch.randn(rows, columns, device=device).to(dtype)
    weight = grad.clone()
    deferred = HostColumns.of(_owners(columns, device)[0], columns)
    moved = len(deferred) * rows
    if device.type == "cpu":
        host = engine.pinned_slab(moved, dtype).view(-1, rows)
        down = timed(lambda: engine.pack([(grad, deferred, host)], engine.mark()), device)
        up = timed(lambda: engine.unpack([Arrival(host, deferred, weight)], engine.mark()), device)
    else:
        packed = grad.new_empty(len(deferred), rows)
        down = timed(lambda: kernels.pack(grad, deferred, packed), device)
        up = timed(lambda: kernels.land(packed, deferred, weight, None), device)
    size = moved * dtype.itemsize
    return Sample({"call": 1, "byte": size}, down), Sample({"call": 1, "byte": size}, up)


def _step_samples(
    engine: AbstractDevice, rows: int, columns: int, dtype: torch.dtype
) -> tuple[Sample, ...]:
    """Return measurements of what compute does to one matrix.

    Its gradient is measured and gathered when backward has just written it; then important
    columns, or the whole matrix, are updated.
    """
    device, kernels = engine.torch_device, engine.kernels
    computed = torch.randn(rows, columns, device=device).to(dtype)
    grad, weight = computed.clone(), computed.clone()
    _, important = _owners(columns, device)
    energies, no_rows = (torch.ones(count, device=device) for count in (columns, 0))

    def intake() -> None:
        kernels.energies([(grad, energies, no_rows)])  # rows are counted with fresh steps
        kernels.important([(grad, important)])

    bank = Bank(group=0, num_rows=rows, num_columns=len(important))
    bank.allocate(device)
    hyper = Hyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)

    members = [Member(weight, important, *kernels.important([(grad, important)]))]
    step = ColumnStep(bank.part(0, len(important)), members, hyper)

    def update() -> None:
        kernels.update([step], None)

    whole = Resident.of(torch.zeros(rows, columns, device=device), "whole", group=0)
    whole_grad = torch.ones(rows, columns, device=device)

    def update_whole() -> None:  # its norm is known first, and clips it
        whole_grad.mul_(whole_grad.norm().clamp(min=1.0, max=1.0))
        update_residents([whole], [whole_grad], hyper)

    def behind_backward() -> None:
        grad.copy_(computed)
        weight.mul_(1.0)

    def seconds(run: Callable[[], Any]) -> float:
        return timed(run, device, before=behind_backward)

    size = rows * columns
    return (
        Sample({"call": 1, "byte": size * dtype.itemsize}, seconds(intake)),
        Sample({"call": 1, "parameter": len(important) * rows}, seconds(update)),
        Sample({"call": 1, "parameter": size}, timed(update_whole, device)),
    )
