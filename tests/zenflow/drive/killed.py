"""A training that ends at a given call to the file system, for processes that tests start."""

import itertools
import logging
import os
import signal
from pathlib import Path

import torch

from tests.models import TINY, TinyStack
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.drive import disk, extents
from zenflow.rule.sizes import SECTOR

CALLS = ("allocate", "write", "sync_data", "write_synced", "rename", "sync_folder")
"""Calls that change the drive."""
MOMENTS = ("before", "half", "after")
EVERY, MOST_STEPS = 2, 6
"""Steps between checkpoints, and those after which a process that should have died ends."""


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def half_done(name, args):
    """Do the first half of a write; other calls have none."""
    if name == "write":
        file, memory, offset = args
        half = len(memory) // 2 // SECTOR * SECTOR
        os.pwritev(file, [memory[:half]], offset)
    elif name == "write_synced":
        path, text = args
        Path(path).write_text(text[: len(text) // 2], encoding="utf-8")


def kill_at(name, number, moment):
    """Let the process die at the call of a name and number, from 1."""
    old, numbers = getattr(disk, name), itertools.count(1)

    def call(*args):
        is_last = next(numbers) == number
        if is_last and moment != "after":
            if moment == "half":
                half_done(name, args)
            die()
        old(*args)
        if is_last:
            die()

    setattr(disk, name, call)


def train(folder, config, steps, crash=None, seconds=None):
    """Go on from the last checkpoint to the end, unless the process dies before.

    `crash` names the call at which it does, and `seconds` the time after which it does.
    """
    torch.set_num_threads(1)
    logging.disable()
    extents.EXTENT_ELEMENTS = 400  # two sectors
    if seconds is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    if crash is not None and crash[0] != "save":
        kill_at(*crash)
    folder = Path(folder)
    saved = folder / "saved.pt"
    states = folder / "states"
    if not saved.exists():  # a checkpoint whose other half was never saved is of no use
        for path in states.iterdir():
            path.unlink()
    model = TinyStack(num_layers=3, width=40)
    settings = ZenFlowConfig(
        topk_ratio=0, update_interval=3, queue_depth=2, block_elements=800, **TINY, **config
    )
    optimizer = ZenFlowAdamW(
        model.parameters(), lr=1e-2, config=settings, offload_gradients="release",
        max_grad_norm=0.5, host_threads=1, state_dir=states,
    )  # fmt: skip
    first = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    is_last = crash is None and seconds is None
    last = steps if is_last else min(steps, first + MOST_STEPS)
    for step in range(first, last):
        model.loss(step).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step + 1}, folder / "saved.new")
            if crash == ("save", 1, "before"):
                die()
            os.replace(folder / "saved.new", saved)
            if crash == ("save", 1, "after"):
                die()
    if last == steps:
        with optimizer.true_weights():
            torch.save(model.state_dict(), folder / "end.pt")
    optimizer.close()
