"""Whatever ends the process, the last checkpoint is whole, and the run ends with the same bits."""

import random
import signal

import pytest
import torch

from tests.forks import FORKS
from tests.zenflow.drive import killed

BEGIN = [("allocate", 1, "before"), ("allocate", 1, "after"), ("write", 3, "half")]
"""Points before there is any checkpoint."""
POINTS = [
    # Calls of the first checkpoint or write in a process come first, those of later ones behind.
    *(("write", number, moment) for number in (1, 7) for moment in killed.MOMENTS),
    *((name, number, moment)
      for name, numbers in (("sync_data", (1,)), ("rename", (1, 2)), ("sync_folder", (1, 2)))
      for number in numbers for moment in ("before", "after")),
    *(("write_synced", number, moment) for number in (1, 2) for moment in killed.MOMENTS),
    *(("save", 1, moment) for moment in ("before", "after")),
]  # fmt: skip


def run(folder, config, **ending):
    """Run a training in a process of its own, and return the exit code."""
    process = FORKS.Process(target=killed.train, args=(folder, config), kwargs=ending)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "the training hangs"
    return process.exitcode


def end_of(folder, config, endings):
    """Return the weights of a run that is ended again and again, and how often it was."""
    (folder / "states").mkdir(parents=True)
    codes = [run(folder, config, **ending) for ending in endings]
    assert run(folder, config) == 0
    return torch.load(folder / "end.pt"), codes


def missed_deaths(state_dir, config, endings):
    """Check a run that is ended again and again; return the endings that have not come."""
    calm, _ = end_of(state_dir / "calm", config, [])
    wild, codes = end_of(state_dir / "wild", config, endings)
    assert all(torch.equal(value, wild[name]) for name, value in calm.items())
    assert set(codes) <= {0, -signal.SIGKILL, -signal.SIGALRM}
    return [ending for ending, code in zip(endings, codes, strict=True) if code == 0]


@pytest.mark.parametrize("host_state", ["float32", "compact"])
def test_a_death_at_each_call(host_state, state_dir):
    """One run dies at all points in turn, half of them before the file of the program is saved."""
    points = random.Random(host_state).sample(POINTS, len(POINTS))
    points = [*BEGIN, *(points if host_state == "float32" else points[:6])]
    endings = [{"crash": point} for point in points]
    assert missed_deaths(state_dir, {"host_state": host_state}, endings) == []


@pytest.mark.slow
def test_a_hundred_random_deaths(state_dir):
    draw = random.Random(1)
    endings = [
        {"crash": (draw.choice(killed.CALLS), draw.randint(1, 30), draw.choice(killed.MOMENTS))}
        if draw.random() < 0.6
        else {"seconds": draw.uniform(0.05, 0.6)}
        for _ in range(100)
    ]
    assert len(missed_deaths(state_dir, {}, endings)) < 60
