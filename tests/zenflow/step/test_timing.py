"""Timing decides how long a step takes and nothing else: the same bits whatever is slow.

The models are built to provoke races: layers so tiny that nearly nothing happens between two
copies, and an update in flight at nearly every step.
"""

import dataclasses
import itertools
import random
import time

import pytest
import torch

from tests.models import (
    TINY,
    GivenGradients,
    OddShapes,
    TinyStack,
    assert_equal,
    closing,
    weights_of,
)
from tests.zenflow.decisions import decisions
from tests.zenflow.host_work import cut_finely, host_work
from zenflow import LoggedDecisions, PacedLink, ZenFlowAdamW, ZenFlowConfig
from zenflow.lanes.copies import CopyLane

RULES = {
    "S 1": {"update_interval": 1},
    "S 2": {"update_interval": 2},
    "S 3": {"update_interval": 3, "select_interval": 2},
    "S 3, q 1": {"update_interval": 3, "queue_depth": 1},
    "S 5, q 2": {"update_interval": 5, "queue_depth": 2},
    "compact": {"update_interval": 3, "select_interval": 2, "host_state": "compact"},
    "eight bits": {"update_interval": 3, "select_interval": 2, "gradient_link": "e4m3"},
    "factored": {"update_interval": 3, "select_interval": 2, "second_moment": "factored"},
    "published": {"update_interval": 3, "update_rule": "published"},
    "published, S 1": {"update_interval": 1, "update_rule": "published"},
    "no overlap": {"update_interval": 2, "overlap_step": False},
    "all deferred": {"topk_ratio": 0.0, "update_interval": 2, "block_elements": 6},
}


def config_of(rule):
    common = {
        "topk_ratio": 0.3,
        "select_interval": 4,
        "block_elements": 20,
        "importance_decay": 0.5,
    }
    return ZenFlowConfig(**{**TINY, **common, **RULES[rule]})


def train(model, config, mode, num_steps, device="cpu", **settings):
    """Train a fresh model and return its weights after every step, the true ones last."""
    model = model().to(device)
    if mode == "release":
        settings |= {"offload_gradients": mode, "max_grad_norm": 0.3}
    trajectory = []
    with closing(
        ZenFlowAdamW(model.parameters(), lr=1e-2, config=config, **settings)
    ) as optimizer:
        for step in range(num_steps):
            model.loss(step).backward()
            if mode == "keep":
                optimizer.clip_grad_norm_(0.3)
            optimizer.step()
            trajectory.append(weights_of(model))
        optimizer.eval()
        return [*trajectory, weights_of(model)]


def delay(monkeypatch, owner, name, seconds, seed):
    """Let a function wait for a random time, often none, before it does its work."""
    original, chance, count = getattr(owner, name), random.Random(seed), itertools.count()
    waits = [chance.choice([0.0, 0.0, chance.uniform(0, seconds)]) for _ in range(997)]

    def late(*args, **kwargs):
        time.sleep(waits[next(count) % len(waits)])
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, late)


def one_buffer(params):
    """Return (parameter, gradient) pairs: gradients are parts of one buffer, as DDP has them."""
    params = list(params)
    parts = torch.zeros(sum(p.numel() for p in params)).split([p.numel() for p in params])
    return [(p, part.view_as(p)) for p, part in zip(params, parts, strict=True)]


@pytest.mark.parametrize("first", [0, 1])
def test_columns_are_handed_over_with_all_that_waits_of_their_gradients(first, monkeypatch):
    """Also in a step in which their parameter has none, while earlier ones are on their way."""

    def run():
        model = GivenGradients([(64, 256), (64, 256)])  # a bucket each
        config = ZenFlowConfig(
            topk_ratio=0.25, update_interval=4, select_interval=1, importance_decay=0.0,
            hysteresis=0.0, queue_depth=3, **TINY,
        )  # fmt: skip
        release = {"offload_gradients": "release", "host_threads": 1}
        seen = []
        optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=config, **release)
        with closing(optimizer):
            for step in range(12):
                grads = model.draw_gradients(step)
                grads[(step + first) % 2] = None
                model.backward(grads)
                optimizer.step()
                seen += weights_of(model)
        return seen

    expected, perform = run(), CopyLane._perform

    def slowly_to_the_host(self, copy):
        time.sleep(0.05 if self.name == "d2h" else 0)
        perform(self, copy)

    monkeypatch.setattr(CopyLane, "_perform", slowly_to_the_host)
    assert_equal(run(), expected)


@pytest.mark.parametrize("has_buffer", [False, True], ids=["own memory", "one buffer"])
def test_a_buffer_of_gradients_is_written_again_before_the_last_ones_have_left(
    has_buffer, monkeypatch
):
    perform = CopyLane._perform

    def slowly_to_the_host(self, copy):
        time.sleep(0.02 if self.name == "d2h" else 0)
        perform(self, copy)

    monkeypatch.setattr(CopyLane, "_perform", slowly_to_the_host)
    config = dataclasses.replace(config_of("S 3"), select_interval=0)  # which waits for copies
    model = TinyStack()
    shared = one_buffer(model.parameters()) if has_buffer else []
    with closing(ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)) as optimizer:
        for step in range(12):
            for param, grad in shared:
                param.grad = grad.zero_()
            model.loss(step).backward()
            optimizer.clip_grad_norm_(0.3)
            optimizer.step()
        optimizer.eval()
    assert_equal(weights_of(model), train(TinyStack, config, "keep", 12)[-1])


HOST = host_work("sum", "catch_up", "compact")
SLOWNESS = {
    "host": HOST,
    "copies": [(CopyLane, "_perform")],
    "everything": [*HOST, (CopyLane, "_perform")],
}


def check_delays(monkeypatch, rule, slow, mode, num_steps=16, device="cpu", threads=2):
    """Compare a run whose background work is late at random with one without delays."""
    model, config = TinyStack, config_of(rule)
    expected = train(model, config, mode, num_steps, device, host_threads=1)
    # Parts of a few elements, so that even a tiny block is shared out among the threads.
    cut_finely(monkeypatch, 8)
    for index, (owner, name) in enumerate(SLOWNESS[slow]):
        delay(monkeypatch, owner, name, 2e-3, seed=index)
    actual = train(model, config, mode, num_steps, device, host_threads=threads)
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True), start=1):
        assert_equal(ours, theirs, f"step {step}")


def delayed():
    """Return every rule with everything slow and the default with one lane; the rest is slow."""
    for place, rule in enumerate(RULES):
        quick = {("everything", "release")}
        quick |= {(slow, "release") for slow in SLOWNESS} if rule == "exact" else set()
        quick |= {("everything", "keep")} if place % 3 == 0 else set()
        for case in [*((slow, "release") for slow in SLOWNESS), ("everything", "keep")]:
            yield pytest.param(rule, *case, marks=[] if case in quick else pytest.mark.slow)


@pytest.mark.parametrize(("rule", "slow", "mode"), [*delayed()])
def test_random_delays_change_no_bit(monkeypatch, rule, slow, mode):
    check_delays(monkeypatch, rule, slow, mode)


@pytest.mark.parametrize(
    ("rule", "mode"),
    [("S 2", "keep"), *((rule, "release") for rule in ("S 3", "published"))],
)
def test_threads_and_links_change_no_bit(monkeypatch, rule, mode):
    model, config = OddShapes, config_of(rule)
    expected = train(model, config, mode, 16, host_threads=1)
    for threads, bandwidths in [(2, None), (3, None), (1, (5e6, 1e6)), (2, (1e6, 5e6))]:
        link = None if bandwidths is None else PacedLink(*bandwidths)
        cut_finely(monkeypatch, 16 * threads)
        actual = train(model, config, mode, 16, host_threads=threads, link=link)
        for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True), start=1):
            assert_equal(ours, theirs, f"{threads} threads, link {bandwidths}, step {step}")


def test_a_long_run_of_tiny_layers_repeats_bit_for_bit():
    config = config_of("S 2")
    runs = [
        train(lambda: TinyStack(num_layers=20, width=4), config, mode, 40, host_threads=threads)
        for mode, threads in [("keep", 1), ("release", 2), ("release", 3)]
    ]
    for other in runs[1:]:
        assert_equal(other[-1], runs[0][-1])


@pytest.mark.parametrize(
    "changes",
    [
        [(5, {"update_interval": 3}), (9, {"update_interval": 1}), (12, {"update_interval": 2})],
        [(5, {"topk_ratio": 0.7}), (9, {"topk_ratio": 0.2, "update_interval": 3})],
    ],
    ids=["S", "k"],
)
def test_changes_of_knobs_and_delays_change_no_bit(monkeypatch, changes):
    config = config_of("S 2")
    controller = LoggedDecisions(decisions(config, changes))
    expected = train(TinyStack, config, "release", 20, controller=controller)
    for owner, name in HOST:
        delay(monkeypatch, owner, name, 3e-3, seed=1)
    delay(monkeypatch, CopyLane, "_perform", 1e-3, seed=2)
    actual = train(TinyStack, config, "release", 20, controller=controller, host_threads=2)
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True), start=1):
        assert_equal(ours, theirs, f"step {step}")


def test_bfloat16_runs_repeat_bit_for_bit(monkeypatch):
    def model():
        return TinyStack(dtype=torch.bfloat16)

    config = config_of("S 3")
    expected = train(model, config, "release", 16, host_threads=1)
    delay(monkeypatch, CopyLane, "_perform", 2e-3, seed=3)
    actual = train(model, config, "release", 16, host_threads=2)
    assert_equal(actual[-1], expected[-1])
