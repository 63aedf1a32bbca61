"""Ranks: processes that train one model together, and what they tell each other.

All of it goes over a group of its own on the CPU. Nothing here waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from experiments.training.parts.ranks.launched import Launched
from zenflow.errors import CheckpointError, ConfigError

Value = TypeVar("Value")


class Gathered:
    """Numbers of all ranks, on their way."""

    def __init__(self, parts: list[Tensor], work: Any = None) -> None:
        """Keep the tensors that the numbers arrive in."""
        self._parts = parts
        self._work = work

    def get(self) -> list[list[float]]:
        """Return each rank's numbers; waits for what is not there yet."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return [part.tolist() for part in self._parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes of a run, seen from one of them."""

    place: Launched = field(default_factory=Launched)
    """This process's place among them."""
    parallel: str | None = None
    """How they share the run, ``ddp`` or ``fsdp``; None of a run of one process."""
    group: Any = None
    """Process group on the CPU; None of a run of one process."""

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self.place.count

    @property
    def rank(self) -> int:
        """Number of this one, from 0."""
        return self.place.rank

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and shows what is told once."""
        return self.place.rank == 0

    @property
    def are_several(self) -> bool:
        """Whether there is anybody to tell anything, if only this process itself."""
        return self.group is not None

    def share(self, num_items: int) -> slice:
        """Return this rank's share of some items: equal shares where their number allows it."""
        bounds = [num_items * index // self.count for index in (self.rank, self.rank + 1)]
        return slice(*bounds)

    def gather(self, numbers: Sequence[float]) -> Gathered:
        """Tell all ranks as many numbers as each tells; returns at once."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        if not self.are_several:
            return Gathered([mine])
        parts = [torch.empty_like(mine) for _ in range(self.count)]
        return Gathered(
            parts, distributed.all_gather(parts, mine, group=self.group, async_op=True)
        )

    def collect(self, value: Value) -> list[Value]:
        """Return every rank's value, in order of ranks; waits for all."""
        if not self.are_several:
            return [value]
        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, value, group=self.group)
        return found

    def of_first(self, value: Value) -> Value:
        """Return the first rank's value; waits for it."""
        if not self.are_several:
            return value
        found: list[Any] = [value]
        distributed.broadcast_object_list(found, src=0, group=self.group)
        there: Value = found[0]
        return there

    def together(self, work: Callable[[], Value]) -> Value:
        """Do this rank's own part of what all do now, and return what comes of it here.

        Raises:
            CheckpointError: Some rank can't write or read; all of them raise it.
        """
        error: Exception | None = None
        try:
            found = work()
        except (OSError, CheckpointError) as raised:
            error = raised
        for words in self.collect(None if error is None else str(error)):
            if words is not None:
                raise CheckpointError(words) from error
        return found


ALONE = Ranks()
"""A run of one process."""


@contextmanager
def joined(parallel: str | None, device: str) -> Iterator[Ranks]:
    """Join the ranks that a launcher has started, and leave them at the end.

    A process that has joined them before stays with them.

    Args:
        parallel: How they share the run.
        device: Name of the device in the run's settings.

    Raises:
        ConfigError: A rank has no GPU of its own.
    """
    place = Launched.here()
    if parallel is None or not place.by_launcher:
        yield ALONE
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        found = torch.cuda.device_count()
        if place.local_rank >= found:
            raise ConfigError(
                f"each rank needs a GPU, but this machine has {found} and {place.local_count} "
                f"ranks: start {found} of them (--nproc-per-node {found}), or use --device cpu"
            )
        torch.cuda.set_device(place.local_rank)
    joins = not distributed.is_initialized()
    if joins:
        distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield Ranks(place=place, parallel=parallel, group=distributed.new_group(backend="gloo"))
    finally:
        if joins:
            distributed.destroy_process_group()
