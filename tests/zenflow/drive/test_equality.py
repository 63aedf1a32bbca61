"""Memory and drive train the same bits, whatever the buffers, the threads and the timing."""

import copy
import io
import random
import time

import pytest
import torch

from tests.models import TINY, TinyStack, weights_of
from tests.zenflow.drive.watching import Watched
from tests.zenflow.runs import make, take_steps
from tests.zenflow.streaming.training import Case, train, weights
from zenflow import ZenFlowConfig
from zenflow.drive import disk, lane
from zenflow.host import kernel


def drawn(seed):
    """Return a case of random settings that a drive takes."""
    draw = random.Random(seed)
    interval = draw.choice([1, 2, 4, 5])
    steps = 9
    overlaps = interval == 1 or draw.random() < 0.7
    link = draw.choice(["model", "model", "e4m3"]) if overlaps else "model"
    config = {
        "topk_ratio": 0.0,
        "update_interval": interval,
        "queue_depth": draw.choice([None, 1, 2, 3]),
        "full_warm_up_rounds": draw.choice([0, 0, 2]) if link == "model" else 0,
        "overlap_step": overlaps,
        "host_state": draw.choice(["float32", "compact"]),
        "gradient_link": link,
        "second_moment": draw.choice(["element", "element", "factored"]),
        "block_elements": draw.choice([None, 30, 100]),
    }
    accumulation = draw.choice([1, 2])
    return Case(
        config=config,
        dtype=draw.choice([torch.float32, torch.bfloat16]),
        accumulation=accumulation,
        steps=steps,
        evaluations=tuple(draw.sample(range(steps), draw.choice([0, 2]))),
        drops=dict([(draw.randrange(steps), 1)] if draw.random() < 0.4 else []),
        knobs=((4, {"update_interval": draw.choice([2, 3])}),) if draw.random() < 0.3 else (),
        resumes_at=draw.choice([None, None, 3, 6]),
    )


def shake(monkeypatch, draw):
    """Let the buffers, the threads and the drive's speed be random."""
    monkeypatch.setattr(lane, "NUM_BUFFERS", draw.choice([1, 2, 3, 8]))
    monkeypatch.setattr(lane, "READERS", draw.choice([1, 2, 3]))
    monkeypatch.setattr(lane, "WRITERS", draw.choice([1, 2]))
    for name in ("read", "write"):
        old, slowness = getattr(disk, name), draw.choice([0.0, 0.0, 2e-3])

        def slow(*args, old=old, slowness=slowness):
            time.sleep(slowness * random.random())
            old(*args)

        monkeypatch.setattr(disk, name, slow)


def check(seed, state_dir, monkeypatch, streamed=None, **settings):
    case = drawn(seed)
    reference = train(case)
    shake(monkeypatch, random.Random(seed))
    watched = Watched(monkeypatch)
    found = train(case, streamed, state_dir=state_dir, host_threads=1 + seed % 2, **settings)
    assert found.differs_from(reference) == []
    assert watched.most_in_memory <= lane.NUM_BUFFERS


@pytest.mark.parametrize("seed", range(7))
def test_a_random_training(seed, state_dir, monkeypatch):
    check(seed, state_dir, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(7, 107))
def test_more_random_trainings(seed, state_dir, monkeypatch):
    check(seed, state_dir, monkeypatch)


@pytest.mark.parametrize("seed", [200, 201])
def test_streamed_weights_with_states_on_a_drive(seed, state_dir, monkeypatch):
    check(seed, state_dir, monkeypatch, {"slots": 2, "resident_layers": seed % 2})


def test_sums_of_micro_batches_that_wait_on_the_host(state_dir, monkeypatch):
    assert drawn(6).accumulation == 2
    check(6, state_dir, monkeypatch, offload_sums=True)


def test_the_fallback_in_torch(state_dir, monkeypatch):
    monkeypatch.setattr(kernel, "c_library", lambda: None)
    monkeypatch.setattr("zenflow.host.pool.c_library", lambda: None)
    check(1, state_dir, monkeypatch)


def wandering(case, places):
    """Return the weights of a run that goes on in another place every two steps."""
    model, state = case.model(), None
    for index, place in enumerate(places):
        if place is not None:
            place.mkdir()
        optimizer = case.optimizer(model, state_dir=place)
        if state is not None:
            optimizer.load_state_dict(torch.load(state))
        for step in (2 * index, 2 * index + 1):
            model.loss(step).backward()
            optimizer.step()
        state = io.BytesIO()
        with optimizer.portable_states(), optimizer.compact_states():
            torch.save(optimizer.state_dict(), state)
        state.seek(0)
        with optimizer.true_weights():
            found = weights(model)
        optimizer.close()
    return found


@pytest.mark.parametrize("host_state", ["float32", "compact"])
def test_a_portable_state_goes_to_memory_and_back(host_state, state_dir):
    """A run may leave its drive in mid-window, and another may begin on one."""
    case = Case(config={"topk_ratio": 0.0, "host_state": host_state, "queue_depth": 2})
    reference = wandering(case, [None] * 4)
    found = wandering(case, [state_dir / "one", state_dir / "two", None, state_dir / "three"])
    assert all(torch.equal(value, found[name]) for name, value in reference.items())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device(device, state_dir):
    """On a GPU states pass between drive, host and device in the same way."""
    ends = []
    for folder in (None, state_dir):
        config = ZenFlowConfig(topk_ratio=0, update_interval=3, queue_depth=2, **TINY)
        model = TinyStack(num_layers=4, width=24, dtype=torch.bfloat16).to(device)
        _, optimizer = make("release", config, model, state_dir=folder)
        take_steps(model, optimizer, range(6))
        with optimizer.true_weights():
            ends.append(weights_of(model))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        take_steps(model, optimizer, range(6, 10))
        with optimizer.true_weights():
            ends.append(weights_of(model))
        optimizer.close()
    assert all(map(torch.equal, ends[0], ends[2]))
    assert all(map(torch.equal, ends[1], ends[3]))


def test_weights_that_come_before_the_first_step(state_dir):
    """Masters are filled when the optimizer is made, and filled anew from loaded weights."""
    case = Case(config={"topk_ratio": 0.0})
    trained = []
    for folder in (None, state_dir):
        model = case.model()
        optimizer = case.optimizer(model, state_dir=folder)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2.0)
        for step in range(5):
            model.loss(step).backward()
            optimizer.step()
        optimizer.adopt_weights()
        model.loss(9).backward()
        optimizer.step()
        with optimizer.true_weights():
            trained.append([p.detach().clone() for p in model.parameters()])
        optimizer.close()
    assert all(map(torch.equal, *trained))
