"""Ranks as torchrun describes them to this process. Imports no torch."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zenflow.errors import ConfigError, ZenFlowError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SECONDS_FOR_THE_FIRST = 5.0
"""Seconds in which the first rank of a machine tells an error that all have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """This process's place among those that a launcher has started."""

    rank: int = 0
    """Number of this rank, from 0."""
    count: int = 1
    """Number of ranks in all."""
    local_rank: int = 0
    """Number of this rank among those of its machine."""
    local_count: int = 1
    """Number of ranks on this machine."""
    by_launcher: bool = False
    """Whether a launcher has started this process."""

    @classmethod
    def here(cls) -> Launched:
        """Return the ranks of the environment; one rank where no launcher has written there."""
        found = [os.environ.get(name, "") for name in _VARIABLES]
        if not all(text.isdigit() for text in found):
            return cls()
        rank, count, local_rank, local_count = map(int, found)
        return cls(
            rank=rank,
            count=count,
            local_rank=local_rank,
            local_count=local_count,
            by_launcher=True,
        )

    @contextmanager
    def telling_once(self) -> Iterator[None]:
        """Let the first rank of each machine tell an error that all of its ranks have.

        The launcher ends the others while they wait here. An error of this rank alone is told
        after the wait.
        """
        try:
            yield
        except ZenFlowError:
            if self.local_rank:
                time.sleep(_SECONDS_FOR_THE_FIRST)
            raise

    def check(self, parallel: str | None, *, is_asked: bool) -> None:
        """Check that a run of several ranks was started as one, and no other run.

        Args:
            parallel: How ranks share the run; None for a run of one process.
            is_asked: Whether this command asks for it: a run that goes on may do so in one
                process.

        Raises:
            ConfigError: It was not; the message has the command to give.
        """
        if self.by_launcher and self.count > 1 and parallel is None:
            raise ConfigError(
                f"{self.count} processes were started, and each would train a model of its own: "
                "add --parallel fsdp, which spreads weights and states over them, or --parallel "
                "ddp, which leaves each the whole model"
            )
        if is_asked and not self.by_launcher:
            raise ConfigError(
                f"--parallel {parallel} is for processes that torchrun starts: "
                + command(2, sys.argv[1:])
            )


def command(num_ranks: int, words: Sequence[str]) -> str:
    """Return the command that starts ``zenflow`` with these words on some ranks of a machine."""
    if num_ranks == 1:
        return shlex.join(["zenflow", *words])
    return shlex.join(["torchrun", "--nproc-per-node", str(num_ranks), "-m", "zenflow", *words])


def resume_line(folder: Path) -> str:
    """Return the command that goes on with a run, on as many ranks as now."""
    return command(Launched.here().local_count, ["train", "--resume", str(folder)])
