"""Compact states of the host: resumed bit for bit, converted both ways, refused elsewhere."""

import copy
import dataclasses
import logging
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.models import GivenGradients, OddShapes, TinyStack, assert_equal, closing, weights_of
from tests.zenflow.runs import MODES
from tests.zenflow.test_resume import NUM_STEPS, Run, config_of, each_rule, uninterrupted
from zenflow import CheckpointError, ConfigError, ZenFlowAdamW, ZenFlowConfig
from zenflow.host.compact import CompactState


def compact(rule="exact", **changes):
    return dataclasses.replace(config_of(rule), host_state="compact", **changes)


def check_resume(settings, steps):
    """Go on from a checkpoint taken before each of these steps, with saves where the run had them.

    A save applies what waits, so it is a part of the run.
    """
    weights, saved = uninterrupted(saves=steps, **settings)
    for first in steps:
        with closing(Run(**settings, seed=7)) as run:
            run.load(saved[first])
            for step in range(first, NUM_STEPS):
                if step > first and step in steps:
                    run.save()
                what = f"resumed before step {step} of 0.., at step {first}"
                assert_equal(run.step(step), weights[step], what)


RULES = (
    *("exact", "no overlap", "warm-up", "selection at every boundary", "S = 1", "only deferred"),
    "eight bits",
    "factored",
)


@pytest.mark.parametrize(("rule", "mode"), each_rule(RULES))
def test_a_checkpoint_of_any_step_resumes_bit_for_bit(rule, mode):
    steps = (0, 2, 3, 6) if mode == "release" else (1, 4, 7)
    if rule != "exact":
        steps = steps[1::3]
    check_resume({"config": compact(rule), "mode": mode}, steps)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_bfloat16_run_resumes_bit_for_bit(depth):
    config = compact(queue_depth=depth)
    check_resume({"config": config, "mode": "release", "dtype": torch.bfloat16}, range(1, 9, 2))


LOG = [(2, {"topk_ratio": 0.6}), (5, {"topk_ratio": 0.1, "update_interval": 2})]


def test_a_run_whose_k_changed_resumes_bit_for_bit():
    check_resume({"config": compact(), "mode": "release", "log": LOG}, range(1, 9))


def trained(config, steps=7, state=None, **settings):
    """Return the true weights and the state of AdamW after a run, on from a state."""
    with closing(Run(config, "release", **settings)) as run:
        if state is not None:
            run.load(state)
        for step in range(steps):
            run.step(step)
        saved, moments = run.save(), copy.deepcopy(run.optimizer.to_adamw_state_dict())
        run.optimizer.eval()
        return weights_of(run.model), moments, saved


@pytest.mark.parametrize("rule", ["exact", "only deferred"])
def test_a_compact_state_goes_on_as_float32_with_its_own_numbers(rule, caplog):
    weights, moments, saved = trained(compact(rule))
    with caplog.at_level(logging.WARNING, "zenflow"):
        found, found_moments, _ = trained(config_of(rule), 0, saved, seed=7)
    assert "host_state='compact', and goes on with 'float32'" in caplog.text
    assert_equal(found, weights)
    for key, entry in moments["state"].items():
        for name, values in entry.items():
            assert torch.equal(found_moments["state"][key][name], values)


def test_a_float32_state_goes_on_as_compact_rounded_to_nearest(caplog):
    weights, moments, saved = trained(config_of("only deferred"))
    with caplog.at_level(logging.WARNING, "zenflow"):
        found, found_moments, again = trained(compact("only deferred"), 0, saved, seed=7)
    assert "rounded to nearest once" in caplog.text
    for ours, theirs in zip(found, weights, strict=True):
        assert float(((ours - theirs).abs() / theirs.abs()).max()) <= 2.0**-16
    for key, entry in moments["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            ours, theirs = found_moments["state"][key][name], entry[name]
            largest = theirs.abs().max()
            assert float((ours - theirs).abs().max()) <= float(largest) / 16
    # What is rounded once stays.
    assert_equal(trained(compact("only deferred"), 0, again, seed=8)[0], found)


def test_an_adamw_state_is_taken_up():
    model, other = TinyStack(), TinyStack()
    adamw = torch.optim.AdamW(other.parameters())
    for step in range(3):
        other.loss(step).backward()
        adamw.step()
        adamw.zero_grad()
    model.load_state_dict(other.state_dict())
    config = ZenFlowConfig(topk_ratio=0.2, min_split_elements=1, host_state="compact")
    with closing(ZenFlowAdamW(model.parameters(), config=config)) as optimizer:
        optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
        ours = optimizer.to_adamw_state_dict()["state"]
        for key, entry in adamw.state_dict()["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                largest = float(entry[name].abs().max())
                assert float((ours[key][name] - entry[name]).abs().max()) <= largest / 16
        model.loss(3).backward()
        optimizer.step()
    for weight in weights_of(model):
        assert weight.isfinite().all()


def test_another_depth_of_the_queue_is_refused():
    settings = {"config": compact(queue_depth=2), "mode": "keep"}
    _, saved = uninterrupted(4, saves=(2,), **settings)
    with (
        closing(Run(compact(queue_depth=3), "keep")) as run,
        pytest.raises(CheckpointError, match="queue_depth is 2 there and 3 here"),
    ):
        run.load(saved[2])


def test_the_published_rule_has_no_compact_state():
    with pytest.raises(ConfigError, match="host_state must be 'float32' under the published rule"):
        ZenFlowConfig(update_rule="published", host_state="compact")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_is_loaded_in_place_and_in_no_other_format(tmp_path):
    config = compact()
    with closing(Run(config, "release")) as run:
        for step in range(5):
            run.step(step)
        parts = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        dcp.save(parts, checkpoint_id=tmp_path)
        expected = [run.step(step) for step in range(5, 9)]
    with closing(Run(config, "release", seed=7)) as run:
        for step in range(3):
            run.step(20 + step)
        parts = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        dcp.load(parts, checkpoint_id=tmp_path)
        run.model.load_state_dict(parts["model"])
        run.optimizer.load_state_dict(parts["optimizer"])
        for step in range(5, 9):
            assert_equal(run.step(step), expected[step - 5])
    groups = parts["optimizer"]["param_groups"]
    with (
        closing(Run(config_of("exact"), "release")) as run,
        pytest.raises(CheckpointError, match="host_state='compact' and is loaded in place"),
    ):
        run.optimizer.prepare_to_load(groups)


def test_the_host_has_five_bytes_and_a_thirty_second_of_a_parameter():
    model = torch.nn.Linear(640, 1000, bias=False).bfloat16()
    for state, size in (("float32", 12), ("compact", 5)):
        config = ZenFlowConfig(topk_ratio=0.0, host_state=state, queue_depth=1)
        with closing(ZenFlowAdamW(model.parameters(), config=config)) as optimizer:
            slabs = optimizer._engine.layout.slabs
            exponents = 0 if state == "float32" else 2 * math.ceil(1000 / 64) * 640
            assert slabs.num_bytes - slabs.pinned_bytes == size * 640_000 + exponents


def test_first_weights_are_the_models_own():
    for dtype, most in ((torch.bfloat16, 0.0), (torch.float16, 0.0), (torch.float32, 2.0**-16)):
        model = GivenGradients([(70, 9)], dtype)
        config = ZenFlowConfig(topk_ratio=0.0, host_state="compact", min_split_elements=1)
        with closing(ZenFlowAdamW(model.parameters(), config=config)) as optimizer:
            (split,) = optimizer._engine.layout.splits
            assert isinstance(split.host.state, CompactState)
            weights = next(model.parameters()).detach().float().t()
            error = (split.host.weights(torch.float32) - weights).abs() / weights.abs()
            assert float(error.max()) <= most


@pytest.mark.parametrize("mode", MODES)
def test_eval_shows_the_same_weights_again_and_train_goes_back(mode):
    model = OddShapes(dtype=torch.bfloat16)
    with closing(ZenFlowAdamW(model.parameters(), config=compact(), **MODES[mode])) as optimizer:
        for step in range(9):
            model.loss(step).backward()
            optimizer.step()
            seen = weights_of(model)
            optimizer.eval()
            true = weights_of(model)
            optimizer.train()
            assert_equal(weights_of(model), seen, f"step {step}")
            optimizer.eval()
            assert_equal(weights_of(model), true, f"step {step}")
            optimizer.train()
