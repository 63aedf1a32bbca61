"""One process of `load` beside it: takes turns with one version of the engine.

It reads a line of JSON for each turn and answers with a line. Only the public interface is used,
and what `decoder_1b` beside it looks up, so that earlier versions can take turns too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from torch import nn

from evidence.benchmarks.interpreter import decoder_1b
from evidence.benchmarks.interpreter.lock_holders import BARE, COUNTED, OTHER, OUTSIDE, LockFacts
from evidence.benchmarks.interpreter.played_gpu import played_gpu
from evidence.benchmarks.ready_gradients import native_loss_of

RELEASE, KEEP = "release", "keep"
CPU, GPU = "cpu", "gpu"
TRAINING = "training"
WARM_STEPS = 3 * decoder_1b.INTERVAL  # the first selection, and a queue as full as it gets
SETTLE_SECONDS = 30.0


def _nothing(*_: Any) -> None:
    return None


@contextmanager
def idle_kernel() -> Iterator[None]:
    """Let C functions do nothing; what Python does to call them stays.

    Raises:
        RuntimeError: There is no C kernel: the fallback is Python itself.
    """
    with ExitStack() as stack:
        try:
            library = importlib.import_module("zenflow.host.library").c_library()
            names = ["zenflow_run", "zenflow_pool_run"]
        except ModuleNotFoundError:  # an earlier version
            kernel = importlib.import_module("zenflow.kernel")
            library = kernel._resolve() if kernel.active_kernel() == "c" else None
            names = ["accumulate", "moments", "adamw"]
        if library is None:
            raise RuntimeError("the host's C kernel is not built: python setup.py build_ext -i")
        for name in names:
            stack.enter_context(mock.patch.object(library, name, _nothing))
        yield


def thread_seconds() -> dict[str, float]:
    """Return the CPU seconds that the engine's threads have had, by what they do."""
    seconds: dict[str, float] = {}
    for thread in threading.enumerate():
        role = role_of(thread.name)
        if role is not None and thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            seconds[role] = seconds.get(role, 0.0) + time.clock_gettime(clock)
    return seconds


def role_of(name: str) -> str | None:
    """Return the role of a thread by its name; None for one that is not the engine's.

    >>> [role_of(name) for name in ("zenflow-host-1", "zenflow-h2d-end", "MainThread", "other")]
    ['host', 'h2d-end', 'training', None]
    """
    if name == "MainThread":
        return TRAINING
    if not name.startswith("zenflow-"):
        return None
    return name.removeprefix("zenflow-").rstrip("-0123456789")


class Sections(Protocol):
    """Something that measures sections of the training thread."""

    def section(self, kind: int) -> AbstractContextManager[None]:
        """Return a context of a section that counts, or of one without us."""


class Meter:
    """Seconds of the training thread in sections that count, less those of sections without us."""

    def __init__(self, facts: LockFacts) -> None:
        self._facts = facts
        self.wall = self.cpu = 0.0

    @contextmanager
    def section(self, kind: int) -> Iterator[None]:
        sign = 1.0 if kind == COUNTED else -1.0
        wall, cpu = time.perf_counter(), time.thread_time()
        self._facts.section = kind
        try:
            yield
        finally:
            self._facts.section = OTHER
            self.wall += sign * (time.perf_counter() - wall)
            self.cpu += sign * (time.thread_time() - cpu)


class Contender:
    """One optimizer over the decoder's parameters."""

    def __init__(self, mode: str, host_threads: int, **others: Any) -> None:
        from zenflow import ZenFlowAdamW, ZenFlowConfig  # of the version that takes turns

        generator = torch.Generator().manual_seed(0)
        shapes = [*decoder_1b.shrunk(), *[(decoder_1b.NORM_SIZE,)] * decoder_1b.NORMS]
        self.grads = [
            torch.randn(shape, generator=generator).mul_(1e-3).bfloat16() for shape in shapes
        ]
        self.params, self.bare = (
            [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
            for _ in range(2)
        )
        self.mode = mode
        self.optimizer = ZenFlowAdamW(
            self.params,
            config=ZenFlowConfig(**decoder_1b.settings()),
            host_threads=host_threads,
            offload_gradients="release" if mode == RELEASE else "keep",
            max_grad_norm=1.0 if mode == RELEASE else None,
            **others,
        )
        self.layout = self.optimizer._running.layout

    def step(self, meter: Sections) -> None:
        """Take a step; in release mode the time of backward without hooks does not count."""
        if self.mode == KEEP:
            for param, grad in zip(self.params, self.grads, strict=True):
                param.grad = grad
            with meter.section(COUNTED):
                self.optimizer.step()
            return
        for param in self.bare:
            param.grad = None
        bare = native_loss_of(self.bare, self.grads)
        loss = native_loss_of(self.params, self.grads)
        with meter.section(BARE):
            bare.backward()
        with meter.section(COUNTED):
            loss.backward()
            self.optimizer.step()


def settle() -> dict[str, float]:
    """Wait until the engine's other threads have nothing to do; return their seconds so far.

    `synchronize` would do more than wait: it has all gradients that wait on the host applied.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    former: dict[str, float] = {}
    while time.monotonic() < deadline:
        time.sleep(0.01)
        now = thread_seconds()
        now.pop(TRAINING)  # it asks
        if now == former:
            return now
        former = now
    raise RuntimeError(f"the engine's threads are still at work after {SETTLE_SECONDS:g} s")


def turn(contender: Contender, num_steps: int, facts: LockFacts) -> dict[str, float]:
    """Return wall seconds, and CPU seconds of each kind of thread, for a step."""
    before = settle()
    meter = Meter(facts)
    facts.section = OTHER
    for _ in range(num_steps):
        contender.step(meter)
    after = settle()
    facts.section = OUTSIDE
    others = {role: seconds - before.get(role, 0.0) for role, seconds in after.items()}
    found = {"wall": meter.wall, TRAINING: meter.cpu, **others}
    return {name: seconds / num_steps for name, seconds in found.items()}


def say(told: object) -> None:
    """Answer the process that asks for turns."""
    print(json.dumps(told), flush=True)


def serve(modes: list[str], num_steps: int, host_threads: int) -> None:
    """Take the turns that are asked for, one a line, until there are no more."""
    real = decoder_1b.real_counts()
    facts = LockFacts()
    with decoder_1b.shrunk_limits(), idle_kernel():
        contenders = {mode: Contender(mode, host_threads) for mode in modes}
        for contender in contenders.values():
            decoder_1b.check_counts(decoder_1b.counts_of(contender.layout), real)
            turn(contender, WARM_STEPS, facts)
        say({"counts": asdict(real), "lock": facts.told(role_of)})
        for line in sys.stdin:
            asked = json.loads(line)
            contender = contenders[asked["mode"]]
            if asked["wants"] == "parts":
                say(parts(contender, num_steps))
            else:
                say(turn(contender, num_steps, facts))
        for contender in contenders.values():
            contender.optimizer.close()


def parts(contender: Contender, num_steps: int) -> dict[str, float]:
    """Return the training thread's seconds a step by part; for this version only."""
    from evidence.benchmarks.engine_parts import breakdown

    facts = LockFacts()
    return breakdown(contender.optimizer, lambda: contender.step(Meter(facts)), num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, required=True, help="checkout whose engine it is")
    parser.add_argument("--role", choices=[CPU, GPU], required=True)
    parser.add_argument("--modes", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--host-threads", type=int, required=True)
    options = parser.parse_args()
    # This package is the measuring checkout's; all of zenflow comes from the measured one.
    sys.path.insert(0, str(options.tree))
    torch.set_num_threads(1)
    with played_gpu() if options.role == GPU else nullcontext():
        serve(options.modes.split(","), options.steps, options.host_threads)


if __name__ == "__main__":
    main()
