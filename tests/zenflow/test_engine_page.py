"""docs/engine.md: the way of a gradient through the modules, and the calls that a state allows."""

import copy
import functools
import importlib
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.models import TINY, TinyStack, closing
from tests.zenflow.runs import make, take_steps
from tests.zenflow.step.test_gradient_ring import CpuWithRing
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.errors import WorkerError
from zenflow.surface import assembly
from zenflow.surface.life import ALLOWED, Life

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text("utf-8")
ROOMS = ("columns", "lanes", "step")
"""Folders of zenflow every module of which the page names if a gradient meets it."""

HELPERS = {"columns.local", "columns.training_weights", "lanes.threads"}
"""Modules that ask whether tensors are sharded, show weights in `state`, and start threads."""


def section(heading):
    return PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]


def modules_of_some_steps(monkeypatch):
    """Return the modules whose functions are called while steps are taken, in any thread."""
    called = set()

    def note(frame, event, _):
        if event == "call":
            called.add(frame.f_globals.get("__name__", ""))

    monkeypatch.setattr(assembly, "bind", lambda device, _: CpuWithRing(device))
    model = TinyStack(num_layers=3)
    config = ZenFlowConfig(
        topk_ratio=0.3, update_interval=2, select_interval=2, block_elements=20, **TINY
    )
    threading.setprofile(note)  # of the lanes and the host's threads
    try:
        optimizer = ZenFlowAdamW(model.parameters(), config=config, offload_gradients="release")
        with closing(optimizer):
            called.clear()
            sys.setprofile(note)
            for step in range(4):
                model.loss(step).backward()
                optimizer.step()
            optimizer.synchronize()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {name.removeprefix("zenflow.") for name in called if name.startswith("zenflow.")}


def test_the_page_names_the_modules_that_a_gradient_meets(monkeypatch):
    names = r"`((?:surface|columns|lanes|step)\.[a-z_.]+)`"
    named = set(re.findall(names, section("Life of a gradient")))
    met = modules_of_some_steps(monkeypatch)
    assert named <= met
    assert {name for name in met if name.split(".")[0] in ROOMS} <= named | HELPERS
    for name in named:
        importlib.import_module(f"zenflow.{name}")


def test_the_page_has_the_table_of_calls():
    lines = section("States of an optimizer").splitlines()
    head, _, *rows = [line for line in lines if line.startswith("|")]
    states = [Life(cell.strip()) for cell in head.split("|")[2:-1]]
    table = {}
    for row in rows:
        call, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        table[call.strip("`")] = {
            s for s, cell in zip(states, cells, strict=True) if cell == "yes"
        }
    assert states == list(Life)
    assert table == ALLOWED


def brought_to(life, monkeypatch):
    """Return a model and its optimizer in a state of life."""
    model, optimizer = make("release")
    if life in (Life.TRAINING, Life.SHOWN, Life.LOADED, Life.BROKEN):
        take_steps(model, optimizer, range(3))
    if life is Life.LOADED:
        optimizer.load_state_dict(optimizer.state_dict())
    elif life is Life.SHOWN:
        optimizer.eval()
    elif life is Life.BROKEN:
        with monkeypatch.context() as patch:
            patch.setattr("zenflow.step.engine.update_device", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                take_steps(model, optimizer, [3])
    elif life is Life.CLOSED:
        optimizer.close()
    assert optimizer._life.now is life
    return model, optimizer


@functools.cache
def some_state():
    model, optimizer = make("release")
    with closing(optimizer):
        take_steps(model, optimizer, range(2))
        return copy.deepcopy(optimizer.state_dict())


def calls(model, optimizer):
    state = copy.deepcopy(some_state())
    added = {"params": [nn.Parameter(torch.zeros(3))]}
    return {
        "backward": lambda: model.loss(9).backward(),
        "step()": optimizer.step,
        "eval()": optimizer.eval,
        "adopt_weights()": optimizer.adopt_weights,
        "state_dict()": optimizer.state_dict,
        "to_adamw_state_dict()": optimizer.to_adamw_state_dict,
        "prepare_to_load()": lambda: optimizer.prepare_to_load(state["param_groups"]),
        "synchronize()": optimizer.synchronize,
        "load_state_dict()": lambda: optimizer.load_state_dict(state),
        "add_param_group()": lambda: optimizer.add_param_group(added),
        "restart_accumulation()": optimizer.restart_accumulation,
        "release_from()": lambda: optimizer.release_from(model),
    }


REFUSALS = {
    Life.SHOWN: (RuntimeError, "true weights are on the device"),
    Life.BROKEN: (WorkerError, "failed before"),
    Life.CLOSED: (RuntimeError, "was closed"),
}


@pytest.mark.parametrize("life", Life)
@pytest.mark.parametrize("call", ALLOWED)
def test_a_state_refuses_the_calls_that_the_table_leaves_out(call, life, monkeypatch):
    model, optimizer = brought_to(life, monkeypatch)
    with closing(optimizer):
        run = calls(model, optimizer)[call]
        if life not in ALLOWED[call]:
            error, message = REFUSALS[life]
            with pytest.raises(error, match=message):
                run()
        elif call == "release_from()":
            with pytest.raises(ValueError, match="process_group"):
                run()
        else:
            run()
