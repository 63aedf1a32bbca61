"""DeepSpeed's learning rates, as its own classes gave them (deepspeed_rates.json)."""

import json
from pathlib import Path

import pytest
import torch

from zenflow import (
    ConfigError,
    DeepSpeedSchedule,
    ZenFlowAdamW,
    deepspeed_lr_scheduler,
    read_deepspeed,
)

TABLE = json.loads((Path(__file__).parent / "deepspeed_rates.json").read_text("utf-8"))
DECAY = DeepSpeedSchedule(
    kind="WarmupDecayLR", max_lr=3e-3, min_lr=1e-4, warmup_steps=3, total_steps=9
)


def optimizer_of(*rates):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(4, 4))], "lr": rate} for rate in rates]
    return ZenFlowAdamW(groups)


def rates_of(optimizer, scheduler, count):
    """Return the rate of each of the next steps, in each group."""
    rates = []
    for _ in range(count):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("case", TABLE["cases"], ids=lambda case: case["type"])
def test_each_step_has_the_rate_that_deepspeed_gives_it(case):
    section = {"type": case["type"], "params": case["params"]}
    optimizer = optimizer_of(*case["lr"])
    scheduler = deepspeed_lr_scheduler(optimizer, read_deepspeed({"scheduler": section}).schedule)
    found = rates_of(optimizer, scheduler, len(case["rates"]))
    for rates, expected in zip(found, case["rates"], strict=True):
        assert rates == pytest.approx(expected, rel=1e-14, abs=0)


@pytest.mark.filterwarnings("ignore")
def test_the_table_is_what_an_installed_deepspeed_gives():
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    for case in TABLE["cases"]:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in case["lr"]]
        optimizer = torch.optim.SGD(groups)
        scheduler = getattr(schedules, case["type"])(optimizer, **case["params"])
        assert rates_of(optimizer, scheduler, len(case["rates"])) == case["rates"]


def test_a_file_without_a_schedule_has_a_constant_rate():
    optimizer = optimizer_of(2e-5, 1e-4)
    scheduler = deepspeed_lr_scheduler(optimizer, read_deepspeed({}).schedule)
    assert rates_of(optimizer, scheduler, 5) == [[2e-5, 1e-4]] * 5


def test_a_resumed_schedule_goes_on():
    whole = optimizer_of(1e-3)
    expected = rates_of(whole, deepspeed_lr_scheduler(whole, DECAY), 12)
    first = optimizer_of(1e-3)
    scheduler = deepspeed_lr_scheduler(first, DECAY)
    head = rates_of(first, scheduler, 5)
    second = optimizer_of(1e-3)
    resumed = deepspeed_lr_scheduler(second, DECAY)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert head + rates_of(second, resumed, 7) == expected


def test_a_rate_that_is_a_tensor_stays_one():
    optimizer = optimizer_of(torch.tensor(1e-3, dtype=torch.float64))
    plain = optimizer_of(1e-3)
    expected = rates_of(plain, deepspeed_lr_scheduler(plain, DECAY), 9)
    found = rates_of(optimizer, deepspeed_lr_scheduler(optimizer, DECAY), 9)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    for rates, wanted in zip(found, expected, strict=True):
        assert rates == pytest.approx(wanted)


def test_numbers_of_steps_that_are_auto_are_asked_for():
    schedule = DeepSpeedSchedule(kind="WarmupCosineLR", warmup_steps=None)
    for given in ({}, {"warmup_steps": 4}, {"total_steps": 9}, {"warmup_steps": 0}):
        with pytest.raises(ConfigError, match=r"needs (warmup|total)_steps of at least 1"):
            deepspeed_lr_scheduler(optimizer_of(1e-3), schedule, **given)
    one, other = optimizer_of(1e-3), optimizer_of(1e-3)
    said = DeepSpeedSchedule(kind="WarmupCosineLR", warmup_steps=4, total_steps=9)
    filled = deepspeed_lr_scheduler(one, schedule, warmup_steps=4, total_steps=9)
    assert rates_of(one, filled, 9) == rates_of(other, deepspeed_lr_scheduler(other, said), 9)


def test_a_group_that_stands_still_can_not_rise_from_a_rate():
    schedule = DeepSpeedSchedule(kind="WarmupLR", min_lr=1e-6)
    with pytest.raises(ConfigError, match="needs a learning rate above 0"):
        deepspeed_lr_scheduler(optimizer_of(1e-3, 0.0), schedule)


@pytest.mark.parametrize("wrong", [{"kind": "WarmUpLR"}, {"warmup_type": "cubic"}])
def test_a_schedule_that_deepspeed_has_not_is_refused(wrong):
    schedule = DeepSpeedSchedule(**{"kind": "WarmupLR", **wrong})
    with pytest.raises(ConfigError, match="is unknown; "):
        deepspeed_lr_scheduler(optimizer_of(1e-3), schedule)
