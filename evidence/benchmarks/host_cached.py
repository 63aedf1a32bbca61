"""Speed of the host's passes on data in a core's own cache: that of the arithmetic."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from evidence.benchmarks.host_jobs import CACHED_PARAMS, DEPTHS, State
from zenflow.host.jobs import CatchUpJob, CompactJob
from zenflow.host.pool import HostPool

PLAIN, COMPACT, SHORT, FACTORED = "float32", "compact", "short", "factored"
WHOLE, MARKED = "whole", "marked"
"""Passes from cache: by the state's format, with gradients of eight bits, without second moments,
with an upload."""


def cached_rate(threads: int, depth: int) -> float:
    """Return our steps/s on data in each core's own cache: the speed of the arithmetic.

    The median of short bursts, each thread with a pool of its own, less the time of calls without
    rows: Python's part of a call is much beside so small a piece.
    """

    def middling(state: State) -> float:
        bursts = []
        replay, pool = state.replay(state.grads(depth)), HostPool.open(0)
        job = replay.encode()  # it holds addresses alone
        assert pool is not None
        for _ in range(60):
            started = time.perf_counter()
            for _ in range(20):
                pool.run([job])
            bursts.append((time.perf_counter() - started) / 20)
        pool.close()
        return statistics.median(bursts)

    with ThreadPoolExecutor(threads) as callers:
        states = [State(CACHED_PARAMS) for _ in range(threads)]
        busy = list(callers.map(middling, states))
    overhead = middling(State(0))
    return sum(depth * CACHED_PARAMS / (seconds - overhead) for seconds in busy)


def coding_steps() -> dict[str, Any]:
    """Return the time in which a core codes compact state once, in steps and in seconds.

    Of data in its cache, an element: a pass over compact state takes as many steps as one over
    float32 state, decodes before them and encodes behind. With gradients of eight bits a pass
    decodes each of these besides. An upload of changed weights finds the one before and marks.
    """
    found = {depth: cached_seconds(depth) for depth in DEPTHS}
    first, last = DEPTHS[0], DEPTHS[-1]
    step, factored = (
        (found[last][name] - found[first][name]) / (last - first) for name in (PLAIN, FACTORED)
    )
    coding = statistics.median(own[COMPACT] - own[PLAIN] for own in found.values())
    decoding = statistics.median((own[SHORT] - own[PLAIN]) / depth for depth, own in found.items())
    marking = {
        state: statistics.median(own[state, MARKED] - own[state, WHOLE] for own in found.values())
        for state in (PLAIN, COMPACT)
    }
    return {
        "coding_seconds": coding,
        "step_seconds": step,
        "coding_steps": coding / step,
        "factored_steps": factored / step,
        "decoding_seconds": decoding,
        "decoding_steps": decoding / step,
        "marking_steps": {state: seconds / step for state, seconds in marking.items()},
        "of_float32": {str(depth): own[PLAIN] / own[COMPACT] for depth, own in found.items()},
    }


def cached_seconds(depth: int) -> dict[Any, float]:
    """Return the seconds per element of passes that take so many gradients, from a core's cache.

    All take turns, in seconds of the thread alone, whoever else is at work.
    """
    pool = HostPool.open(0)
    assert pool is not None
    state = State(CACHED_PARAMS)
    grads, short = state.grads(depth), state.short_grads(depth)
    passes: dict[Any, CatchUpJob | CompactJob] = {
        PLAIN: replace(state.replay(grads), upload=None),
        COMPACT: replace(state.compact(grads), upload=None),
        SHORT: replace(state.replay(short), upload=None),
        FACTORED: replace(state.replay(grads), upload=None, exp_avg_sq=torch.empty(state.rows, 0)),
    }
    for name in (PLAIN, COMPACT):
        passes[name, WHOLE] = replace(passes[name], upload=state.repeatable(marks=False))
        passes[name, MARKED] = replace(passes[name], upload=state.repeatable(marks=True))
    jobs = {name: job.encode() for name, job in passes.items()}  # they hold addresses alone
    bursts: dict[Any, list[float]] = {name: [] for name in jobs}
    for _ in range(41):
        for name, job in jobs.items():
            started = time.thread_time()
            for _ in range(20):
                pool.run([job])
            bursts[name].append((time.thread_time() - started) / 20 / CACHED_PARAMS)
    pool.close()
    return {name: statistics.median(own) for name, own in bursts.items()}
