"""Ranks as processes, started once for all tests that look at what they found."""

import os
import subprocess
import sys
import time

import pytest
import torch


class Ranks:
    """Processes that carry out tasks together."""

    def __init__(self, num_ranks, tasks, folder, device="cpu", module=__package__):
        self.folder = folder
        (folder / "meeting").unlink(missing_ok=True)
        self.processes = []
        for rank in range(num_ranks):
            where = (",".join(tasks), str(rank), str(num_ranks), folder)
            with (folder / f"error-{rank}").open("w") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-m", f"{module}.ranks", *where],
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "RANKS_DEVICE": device},
                )
            self.processes.append(process)

    def wait(self, seconds=280):
        """Return the processes' exit codes; none outlives this."""
        end = time.monotonic() + seconds
        try:
            return [p.wait(timeout=max(0.1, end - time.monotonic())) for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()

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
