"""Where the update rule has a known limit, training gives torch.optim.AdamW's weights."""

import copy
import functools

import pytest
import torch

from tests.models import (
    TINY,
    OddShapes,
    TinyStack,
    assert_equal,
    closing,
    relative_difference,
    two_groups,
    weights_of,
)
from zenflow import PacedLink, ZenFlowAdamW, ZenFlowConfig

NUM_STEPS = 30
MAX_NORM = 0.5
MICRO_BATCHES = 2

LIMITS = {
    "on_device": ZenFlowConfig.preset("on_device", **TINY),
    "zero_offload": ZenFlowConfig.preset("zero_offload", **TINY),
    "zero_offload, tiny blocks": ZenFlowConfig.preset("zero_offload", block_elements=9, **TINY),
    "no column deferred": ZenFlowConfig(topk_ratio=1.0, full_warm_up_rounds=3, **TINY),
    "warm-up only": ZenFlowConfig(topk_ratio=0.3, full_warm_up_rounds=NUM_STEPS + 1, **TINY),
    "no matrix split": ZenFlowConfig(min_split_elements=10**9),
}
"""Configurations under which every column is updated in every step."""


def scheduler_of(optimizer):
    """Return a schedule with one law per group: a ramp, and a decay."""
    laws = [lambda t: min(1.0, (t + 1) / 10), lambda t: 0.97**t]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, laws)


def train_with(optimizer, model, clip, num_steps=NUM_STEPS):
    """Train with gradient accumulation; `clip` is called between backward and step."""
    scheduler = scheduler_of(optimizer)
    for step in range(num_steps):
        for micro in range(MICRO_BATCHES):
            (model.loss(MICRO_BATCHES * step + micro) / MICRO_BATCHES).backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return weights_of(model)


def train_adamw(model, max_norm=MAX_NORM, fused=None):
    """Train a copy of the model with torch's AdamW and its clipping."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(two_groups(model), fused=fused)
    params = list(model.parameters())

    def clip():
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)

    return train_with(optimizer, model, clip)


def train_zenflow(model, config, mode, max_norm=MAX_NORM, **settings):
    """Train a copy of the model with our optimizer.

    Modes: "release"; "keep" with the optimizer's own clipping; "torch" keeps gradients too, and
    clips them with torch's function.
    """
    model = copy.deepcopy(model)
    if mode == "release":
        settings |= {"offload_gradients": mode, "max_grad_norm": max_norm}
        settings["accumulation_steps"] = MICRO_BATCHES
    with closing(ZenFlowAdamW(two_groups(model), config=config, **settings)) as optimizer:
        params = list(model.parameters())

        def clip():
            if mode == "keep" and max_norm is not None:
                optimizer.clip_grad_norm_(max_norm)
            if mode == "torch" and max_norm is not None:
                torch.nn.utils.clip_grad_norm_(params, max_norm)

        return train_with(optimizer, model, clip)


def hand_written_delayed_adamw(model, num_steps, max_norm):
    """Train with the one-step delayed update: a forward sees matrices that miss one update."""
    model = copy.deepcopy(model)
    shadow = copy.deepcopy(model)  # AdamW's weights; `model` has what the device sees
    optimizer = torch.optim.AdamW(shadow.parameters(), lr=3e-3, weight_decay=0.1)
    for step in range(num_steps):
        model.zero_grad()
        model.loss(step).backward()
        before = weights_of(shadow)
        for p, q in zip(model.parameters(), shadow.parameters(), strict=True):
            q.grad = p.grad.clone()
        torch.nn.utils.clip_grad_norm_(shadow.parameters(), max_norm)
        optimizer.step()
        with torch.no_grad():
            for p, q, old in zip(model.parameters(), shadow.parameters(), before, strict=True):
                p.copy_(old if p.ndim > 1 else q)
    return weights_of(model)


def check_limit(name, mode, device="cpu", tolerance=1e-6):
    """Compare a limit with AdamW on a model with every kind of parameter."""
    actual = train_zenflow(OddShapes().to(device), LIMITS[name], mode)
    assert relative_difference(actual, adamws_weights(device)) <= tolerance


@functools.cache
def adamws_weights(device):
    """Return what torch's AdamW makes of the model that every limit is compared on."""
    return train_adamw(OddShapes().to(device))


CASES = [
    *((name, mode) for name in LIMITS for mode in ("keep", "release")),
    ("on_device", "torch"),
    ("zero_offload", "torch"),
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_limit_is_adamw_with_clipping_schedule_groups_and_accumulation(name, mode):
    check_limit(name, mode)


@pytest.mark.parametrize("mode", ["keep", "release"])
@pytest.mark.parametrize("name", ["on_device", "zero_offload"])
def test_a_limit_without_clipping_is_adamw(name, mode):
    model = TinyStack(num_layers=4)
    actual = train_zenflow(model, LIMITS[name], mode, max_norm=None)
    assert relative_difference(actual, train_adamw(model, max_norm=None)) <= 1e-6


KEEP_EQUALS_RELEASE = {
    **{name: LIMITS[name] for name in ("on_device", "zero_offload")},
    "delayed": ZenFlowConfig.preset("delayed", **TINY),
    "zenflow_paper": ZenFlowConfig.preset("zenflow_paper", select_interval=6, **TINY),
    "zenflow": ZenFlowConfig.preset("zenflow", select_interval=6, **TINY),
    "small blocks": ZenFlowConfig(select_interval=3, topk_ratio=0.4, block_elements=9, **TINY),
}


@pytest.mark.parametrize("name", KEEP_EQUALS_RELEASE)
def test_keep_and_release_give_the_same_weights_bit_for_bit(name):
    model, config = OddShapes(), KEEP_EQUALS_RELEASE[name]
    keep = train_zenflow(model, config, "keep")
    assert_equal(train_zenflow(model, config, "release"), keep)


def test_a_paced_link_changes_no_bit_of_the_limit():
    model, link = TinyStack(num_layers=4), PacedLink(50e6, 50e6)
    plain = train_zenflow(model, LIMITS["zero_offload"], "release")
    assert_equal(train_zenflow(model, LIMITS["zero_offload"], "release", link=link), plain)


@pytest.mark.parametrize("mode", ["keep", "release"])
def test_delayed_is_adamw_whose_matrices_land_one_step_late(mode):
    model, num_steps = TinyStack(num_layers=4), 30
    expected = hand_written_delayed_adamw(model, num_steps, MAX_NORM)
    config = ZenFlowConfig.preset("delayed", **TINY)
    settings = {"max_grad_norm": MAX_NORM, "offload_gradients": mode} if mode == "release" else {}
    optimizer = ZenFlowAdamW(
        model.parameters(), lr=3e-3, weight_decay=0.1, config=config, **settings
    )
    with closing(optimizer):
        for step in range(num_steps):
            model.loss(step).backward()
            if mode == "keep":
                optimizer.clip_grad_norm_(MAX_NORM)
            optimizer.step()
    assert relative_difference(weights_of(model), expected) <= 1e-6
