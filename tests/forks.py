"""Processes for tests of several ranks: forks of one that has loaded torch."""

import multiprocessing
import os
import time

FORKS = multiprocessing.get_context("forkserver")
"""Makes processes. The first starts their parent, which loads what all ranks need."""
FORKS.set_forkserver_preload(
    [
        "torch._dynamo",
        "fsspec.core",  # torch loads it with the first checkpoint
        "experiments.calibration.ranks",
        "tests.zenflow.data_parallel.ranks",
        "tests.experiments.training.parts.rank",
        "tests.frozen",
    ]
)


def send_output(*, output=os.devnull, errors):
    """Let this process write its output and its errors to files."""
    for path, number in ((output, 1), (errors, 2)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), number)


def exit_codes(processes, seconds):
    """Wait for processes and return their exit codes; none outlives this."""
    end = time.monotonic() + seconds
    try:
        for process in processes:
            process.join(timeout=max(0.1, end - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
