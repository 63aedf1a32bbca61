"""What torch's AdamW would take up and this optimizer can't is refused, never passed over."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from zenflow import (
    CheckpointError,
    FixedInterval,
    Knobs,
    LoggedDecisions,
    ZenFlowAdamW,
    ZenFlowConfig,
)
from zenflow.rule.blocks import BlockShape
from zenflow.rule.calendar import WindowCalendar

SMALL = ZenFlowConfig(min_split_elements=1)


def make(model, mode="keep", **arguments):
    return ZenFlowAdamW(
        model.parameters(),
        config=arguments.pop("config", SMALL),
        offload_gradients=mode,
        **arguments,
    )


@pytest.mark.parametrize("config", [{"update_interval": 1}, "zenflow", 3])
def test_a_config_of_another_type_is_refused_with_how_to_make_one(config):
    with pytest.raises(TypeError, match=r"config must be a ZenFlowConfig .* ZenFlowConfig\("):
        make(nn.Linear(4, 4), config=config)


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.99, 0.5)])
def test_betas_are_two_numbers_when_the_optimizer_is_made(betas):
    with pytest.raises(ValueError, match="betas must be two numbers"):
        make(nn.Linear(4, 4), betas=betas)


def take_step(model, optimizer):
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("mode", ["keep", "release"])
def test_a_parameter_unfrozen_later_is_refused(mode):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].weight.requires_grad_(False)
    optimizer = make(model, mode)
    take_step(model, optimizer)
    model[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="frozen when the optimizer was made"):
        take_step(model, optimizer)
    optimizer.close()


def test_weights_loaded_after_the_first_step_are_refused():
    model = nn.Linear(8, 8)
    optimizer = make(model)
    take_step(model, optimizer)
    model.load_state_dict(copy.deepcopy(nn.Linear(8, 8).state_dict()))
    with pytest.raises(RuntimeError, match=r"load weights before .*adopt_weights"):
        take_step(model, optimizer)
    optimizer.close()


@pytest.mark.parametrize("change", ["step", "eval", "train"])
@pytest.mark.parametrize("mode", ["keep", "release"])
def test_a_graph_of_other_weights_is_refused(mode, change):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = make(model, mode)
    take_step(model, optimizer)
    if change == "train":
        optimizer.eval()
    loss = model(torch.ones(2, 8)).square().sum()
    if change == "step":
        loss.backward(retain_graph=True)
    getattr(optimizer, change)()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    if change == "eval":
        optimizer.train()
    take_step(model, optimizer)  # a graph of these weights is as good as ever
    optimizer.close()


def test_training_itself_never_looks_like_a_change_in_place():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = make(model, "release")
    for _ in range(9):
        take_step(model, optimizer)
        optimizer.eval()
        optimizer.train()
    assert optimizer.report.step == 9
    optimizer.close()


def a_calendar(*, update_interval, num_blocks):
    """Return a calendar of equal blocks, and the knobs it starts with."""
    config = ZenFlowConfig(update_interval=update_interval)
    return WindowCalendar(config, blocks_of([1] * num_blocks)), Knobs.of(config)


def blocks_of(loads):
    """Return blocks that defer so many elements, each in a bucket and a cohort of its own."""
    return [
        BlockShape(
            matrix=i, first=0, num_columns=load, num_rows=1, bucket=i, cohort=i, num_important=0
        )
        for i, load in enumerate(loads)
    ]


def test_a_controller_that_changes_its_mind_at_every_step_starves_no_block():
    calendar, knobs = a_calendar(update_interval=4, num_blocks=16)
    last_closed = [0] * 16
    for step in range(1, 200):
        for block in range(16):
            if calendar.is_due(block, step):
                calendar.close(block, step)
                last_closed[block] = step
            assert step - last_closed[block] <= 4 + 6
        calendar.set_knobs(replace(knobs, update_interval=3 + step % 4), step)


def test_one_change_of_the_interval_lays_all_phases_out_anew():
    calendar, knobs = a_calendar(update_interval=2, num_blocks=8)
    for step in (1, 2, 3):
        for block in range(8):
            if calendar.is_due(block, step):
                calendar.close(block, step)
    calendar.set_knobs(replace(knobs, update_interval=4), 3)
    assert calendar.next_due == [4, 5, 6, 7] * 2


def test_blocks_of_other_loads_are_laid_out_anew():
    calendar, knobs = a_calendar(update_interval=2, num_blocks=4)
    assert calendar.next_due == [1, 2, 1, 2]
    calendar.set_knobs(replace(knobs, topk_ratio=0.5), 5)
    assert calendar.next_due == [6] * 4
    calendar.open_all(blocks_of([3, 1, 1, 1]), 6)
    assert calendar.next_due == [7, 8, 8, 8]
    assert calendar.opened == [6] * 4


def test_resuming_without_the_controller_says_so():
    config = ZenFlowConfig(min_split_elements=1, update_interval=1, update_rule="published")
    model = nn.Linear(8, 8)
    with_one = make(model, config=config, controller=LoggedDecisions([]))
    take_step(model, with_one)
    without = make(nn.Linear(8, 8), config=config)
    with pytest.raises(CheckpointError, match="controller"):
        without.load_state_dict(with_one.state_dict())
    with_one.close()
    without.close()


def test_an_optimizer_is_not_copied_but_its_state_is():
    optimizer = make(nn.Linear(8, 8))
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
    text = copy.deepcopy(optimizer.state_dict())["param_groups"][0]["zenflow"]
    assert json.loads(text)["step"] == 0
    optimizer.close()


def test_nothing_to_train_is_an_error():
    model = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        make(model)


def test_a_controller_that_follows_the_clock_is_refused_on_several_ranks(monkeypatch):
    class ByTheClock(FixedInterval):
        follows_clock = True

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = torch.nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"2 ranks would decide differently: .* SharedController"):
        ZenFlowAdamW(model.parameters(), controller=ByTheClock(4))
    ZenFlowAdamW(model.parameters(), controller=FixedInterval(4)).close()
