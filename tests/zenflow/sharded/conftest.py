"""Ranks as processes, started once for all tests that look at what they found."""

import importlib
import multiprocessing

import pytest
import torch

from tests.forks import FORKS, exit_codes, send_output


def be_rank(module, *where):
    """Carry out tasks in a process of a rank, whose errors go to a file."""
    *_, folder, rank = where
    send_output(errors=folder / f"error-{rank}")
    from tests.zenflow.sharded.ranks import carry_out

    carry_out(importlib.import_module(f"{module}.ranks").TASKS, *where)


class Ranks:
    """Processes that carry out tasks together."""

    def __init__(self, num_ranks, tasks, folder, device="cpu", module=__package__):
        self.folder = folder
        (folder / "meeting").unlink(missing_ok=True)
        # CUDA doesn't work in the fork of a process that has looked for it.
        context = FORKS if device == "cpu" else multiprocessing.get_context("spawn")
        self.processes = [
            context.Process(
                target=be_rank,
                args=(module, tasks, device, num_ranks, folder, rank),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds=280):
        """Return the processes' exit codes; none outlives this."""
        return exit_codes(self.processes, seconds)

    def error(self, rank):
        return (self.folder / f"error-{rank}").read_text()

    def found(self):
        """Return what each rank found, by task."""
        codes = self.wait()
        assert not any(codes), [self.error(rank) for rank in range(len(codes))]
        return [
            torch.load(self.folder / f"found-{rank}.pt", weights_only=False)
            for rank in range(len(codes))
        ]


@pytest.fixture(scope="session")
def folder_of_two(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="session")
def folder_of_four(tmp_path_factory):
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="session")
def two(folder_of_two):
    """What two ranks found."""
    tasks = (
        "train",
        "save",
        "load",
        "delay",
        "adamw",
        "export",
        "weigh",
        "misuse",
        "guide",
        "too many",
        "save behind",
        "overflow",
        "drop",
        "await",
    )
    return Ranks(2, tasks, folder_of_two).found()
