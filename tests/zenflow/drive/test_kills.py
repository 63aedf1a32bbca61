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
    # Before a call is behind the one before. The first calls of a process are those of its first
    # checkpoint and its first write, and name the checkpoint that it began with.
    *(("write", 1, "half"), ("write", 1, "after"), ("write", 7, "before"), ("write", 7, "half")),
    *(("sync_data", 1, "before"), ("sync_data", 1, "after")),
    *(("write_synced", number, moment) for number in (1, 2) for moment in ("half", "after")),
    *((name, number, "after") for name in ("rename", "sync_folder") for number in (1, 2)),
    *(("save", 1, "before"), ("save", 1, "after")),
]


def run(folder, config, steps, **ending):
    """Run a training in a process of its own, and return the exit code."""
    process = FORKS.Process(target=killed.train, args=(folder, config, steps), kwargs=ending)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "the training hangs"
    return process.exitcode


def end_of(folder, config, steps, endings):
    """Return the weights of a run that is ended again and again, and how often it was."""
    (folder / "states").mkdir(parents=True)
    codes = [run(folder, config, steps, **ending) for ending in endings]
    assert run(folder, config, steps) == 0
    return torch.load(folder / "end.pt"), codes


def missed_deaths(state_dir, config, steps, endings):
    """Check a run that is ended again and again; return the endings that have not come."""
    calm, _ = end_of(state_dir / "calm", config, steps, [])
    wild, codes = end_of(state_dir / "wild", config, steps, endings)
    assert all(torch.equal(value, wild[name]) for name, value in calm.items())
    assert set(codes) <= {0, -signal.SIGKILL, -signal.SIGALRM}
    return [ending for ending, code in zip(endings, codes, strict=True) if code == 0]


@pytest.mark.parametrize("host_state", ["float32", "compact"])
def test_a_death_at_each_call(host_state, state_dir):
    """One run dies at all points in turn, half of them before the file of the program is saved."""
    points = random.Random(host_state).sample(POINTS, len(POINTS))
    points = [*BEGIN, *(points if host_state == "float32" else points[:5])]
    endings = [{"crash": point} for point in points]
    assert missed_deaths(state_dir, {"host_state": host_state}, 60, endings) == []


@pytest.mark.slow
def test_a_hundred_random_deaths(state_dir):
    draw = random.Random(1)
    names = [name for name in killed.CALLS if name != "allocate"]
    endings = [
        {"crash": (draw.choice(names), draw.randint(1, 6), draw.choice(killed.MOMENTS))}
        if draw.random() < 0.6
        else {"seconds": draw.uniform(0.02, 0.4)}
        for _ in range(100)
    ]
    assert len(missed_deaths(state_dir, {}, 600, endings)) < 40
