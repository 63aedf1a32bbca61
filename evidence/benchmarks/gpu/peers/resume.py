"""Whether an engine goes on bit for bit from its own checkpoint, tried on a tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from evidence.benchmarks.gpu.peers.engine import Peer
from evidence.benchmarks.gpu.peers.measure import Steps
from evidence.benchmarks.gpu.setup import Bench

EXACT, INEXACT = "exact", "not exact"
UNTOLD = "can't tell: its steps don't repeat"
NOT_FINITE = "can't tell: its weights are not finite"
_BEFORE, _AFTER = 6, 2
"""Steps to the checkpoint, in the middle of a window of four, and behind it, to that window's end.

A checkpoint between windows would not show what an engine forgets of gradients that wait.
"""


def verdict(peer: Peer, bench: Bench) -> str:
    """Return whether two steps behind a checkpoint are those of the run that wrote it.

    A run that resumes differently is resumed once more: only if that one repeats is it the
    checkpoint's fault.
    """
    with tempfile.TemporaryDirectory() as place, _repeatable():
        folder = Path(place)
        whole = _weights(peer, bench, folder, writes=True)
        if not all(bool(each.isfinite().all()) for each in whole):
            return NOT_FINITE  # such weights would agree whatever was forgotten
        resumed = _weights(peer, bench, folder, writes=False)
        if _are_equal(whole, resumed):
            return EXACT
        again = _weights(peer, bench, folder, writes=False)
        return INEXACT if _are_equal(resumed, again) else UNTOLD


@contextmanager
def _repeatable() -> Iterator[None]:
    """Have torch choose kernels that repeat, where it has them."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _weights(peer: Peer, bench: Bench, folder: Path, *, writes: bool) -> list[Tensor]:
    """Return the weights after all steps of a run that writes a checkpoint or begins at it."""
    bench.free()
    engine = peer.make(bench.model(), bench)
    try:
        if writes:
            Steps(engine, bench).take(_BEFORE)
            engine.save(folder)
        else:
            engine.load(folder)
        Steps(engine, bench, first=_BEFORE).take(_AFTER)
        return engine.weights()
    finally:
        engine.close()


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether all bits agree."""
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)
