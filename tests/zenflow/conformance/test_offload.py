"""What torchao asks of its CPUOffloadOptimizer, asked of this one at the sizes where it splits.

Wide layers have much to copy and little to compute, so a wait that is missing shows at once. For
the same reason the two models are trained one after the other.
"""

import copy
import io

import pytest
import torch
from torch import nn

from tests.models import assert_equal, closing, weights_of
from tests.zenflow.conformance.subjects import LIMITS, assert_like_adamw
from zenflow import PRESETS, ZenFlowAdamW, ZenFlowConfig

WIDTH = 16384
MODES = ("keep", "release")


def wide_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 128),
    )
    model[2].requires_grad_(False)
    return model


def batch(step):
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps=range(3), accumulation_steps=1):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for step in steps:
        for micro in range(accumulation_steps):
            model(batch(accumulation_steps * step + micro)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def offloaded(model, preset, mode, **settings):
    """Return an optimizer that splits the wide layer."""
    optimizer = ZenFlowAdamW(
        model.parameters(), config=ZenFlowConfig.preset(preset), offload_gradients=mode, **settings
    )
    assert (optimizer.memory.host_bytes > 0) == (preset != "on_device")
    return optimizer


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", LIMITS)
def test_a_limit_has_adamw_s_weights_with_gradients_offloaded_too(
    preset, mode, accumulation_steps
):
    """Torchao's own can't accumulate gradients that it offloads."""
    ours, theirs = wide_model(), wide_model()
    train(theirs, torch.optim.AdamW(theirs.parameters()), accumulation_steps=accumulation_steps)
    told = {"accumulation_steps": accumulation_steps} if mode == "release" else {}
    with closing(offloaded(ours, preset, mode, **told)) as optimizer:
        train(ours, optimizer, accumulation_steps=accumulation_steps)
    assert_like_adamw(weights_of(ours), weights_of(theirs))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_saved_run_goes_on_bit_for_bit(preset, mode):
    model = wide_model()
    with closing(offloaded(model, preset, mode)) as optimizer:
        train(model, optimizer)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        again = copy.deepcopy(model)
        with closing(offloaded(again, preset, mode)) as resumed:
            resumed.load_state_dict(torch.load(file, map_location="cpu"))
            train(again, resumed, range(3, 6))
        train(model, optimizer, range(3, 6))
    assert_equal(weights_of(again), weights_of(model))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_group_s_learning_rate_may_be_set_between_steps(preset):
    model = wide_model()
    groups = [{"params": model[0].parameters()}, {"params": model[4:].parameters(), "lr": 1e-2}]
    config = ZenFlowConfig.preset(preset)
    with closing(ZenFlowAdamW(groups, weight_decay=0.0, config=config)) as optimizer:
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-2]
        model(batch(0)).sum().backward()
        optimizer.step()
        first, *_, last = weights_of(model)
        optimizer.param_groups[1]["lr"] = 0.0
        for step in range(1, 6):
            model(batch(step)).sum().backward()
            optimizer.step()
        assert torch.equal(model[-1].bias, last)
        assert not torch.equal(model[0].weight, first)
