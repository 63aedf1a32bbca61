"""Gradients of eight bits in the engine: AdamW on these, whatever happens around it."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from tests.models import GivenGradients, closing, weights_of
from tests.rounded_reference import RoundedCompactReference, RoundedReference, rounded
from tests.zenflow.step.test_compact_rule import check as check_compact
from tests.zenflow.test_reference import MODES, feed, run_engine, scenarios
from zenflow import ConfigError, ZenFlowAdamW, ZenFlowConfig

TALL = (70, 9)
"""Shape of a parameter whose columns have two groups."""


def short(scenario, **changes):
    """Return the scenario with gradients of eight bits."""
    changes |= {"update_rule": "exact", "overlap_step": True, "full_warm_up_rounds": 0}
    config = dataclasses.replace(scenario.config, gradient_link="e4m3", **changes)
    return dataclasses.replace(scenario, config=config)


def check(scenario, mode, device="cpu"):
    """Compare weights after every step."""
    model = scenario.model()
    reference = RoundedReference(
        scenario.groups(model), scenario.config, scenario.max_norm, scenario.log
    )
    found = run_engine(scenario, mode, device=device)
    for step in range(1, scenario.num_steps + 1):
        scenario.schedule(reference.groups, step)
        reference.step(model.draw_gradients(step, scenario.seed, scenario.absent))
        for actual, expected in zip(next(found), reference.weights, strict=True):
            torch.testing.assert_close(actual.cpu(), expected, rtol=2e-5, atol=2e-6)
    found.close()


@settings(max_examples=6, deadline=None)
@given(mode=MODES, scenario=scenarios())
def test_weights_follow_the_reference(mode, scenario):
    scenario.shapes.append(TALL)
    check(short(scenario), mode)


@settings(max_examples=5, deadline=None)
@given(mode=MODES, scenario=scenarios())
def test_weights_over_compact_state_follow_the_reference(mode, scenario):
    kind = RoundedCompactReference
    check_compact(short(scenario, host_state="compact"), mode, is_random=False, kind=kind)


def run(depth, *, evaluates=(), dtype=torch.bfloat16, **settings):
    """Return the weights after each of 12 steps of a run whose columns move."""
    model = GivenGradients([(130, 40), (64, 70), (5, 16)], dtype, 0)
    config = ZenFlowConfig(
        gradient_link="e4m3", topk_ratio=0.25, select_interval=3, min_split_elements=1,
        block_elements=1500, queue_depth=depth, **settings,
    )  # fmt: skip
    found = []
    with closing(ZenFlowAdamW(model.parameters(), lr=1e-2, config=config)) as optimizer:
        for step in range(1, 13):
            feed(model, optimizer, model.draw_gradients(step, 0, 0.2), "keep")
            found.append(weights_of(model))
            if step in evaluates:
                optimizer.eval()
                optimizer.train()
                for before, now in zip(found[-1], weights_of(model), strict=True):
                    assert torch.equal(before, now)
    return found


def assert_equal(runs):
    first, *others = runs
    for other in others:
        for step, (a, b) in enumerate(zip(first, other, strict=True)):
            assert all(map(torch.equal, a, b)), step


def test_the_depth_of_the_queue_changes_no_bit():
    assert_equal([run(depth) for depth in (1, 2, 4)])


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_goes_on_bit_for_bit_after_an_evaluation(depth, dtype):
    """Weights of training wait in gradients' memory, and where it is too small in their own."""
    assert_equal([run(depth, dtype=dtype), run(depth, dtype=dtype, evaluates=(1, 5, 6, 11))])


def test_gradients_take_half_the_memory_and_the_link():
    plans, sent = [], []
    for link in ("model", "e4m3"):
        model = GivenGradients([(640, 100)], torch.bfloat16, 0)
        config = ZenFlowConfig(topk_ratio=0.0, min_split_elements=1, gradient_link=link)
        with closing(ZenFlowAdamW(model.parameters(), config=config)) as optimizer:
            feed(model, optimizer, model.draw_gradients(1, 0, 0.0), "keep")
            plans.append(optimizer.memory)
            sent.append(optimizer.report.d2h_bytes)
    assert sent == [640 * 100 * 2, (640 + 10) * 100]
    waiting = 640 * 100 * 2 - 650 * 100
    assert plans[0].pinned_bytes - plans[1].pinned_bytes == pytest.approx(
        waiting * (1 + 0.525 * 3), rel=0.01
    )


def test_norms_and_important_columns_are_of_the_gradient_as_it_is():
    norms, weights = [], []
    for link in ("e4m3", "model"):
        model = GivenGradients([(64, 8)], torch.float32, 0)
        config = ZenFlowConfig(topk_ratio=0.5, min_split_elements=1, gradient_link=link)
        with closing(ZenFlowAdamW(model.parameters(), config=config)) as optimizer:
            for step in (1, 2):
                model.weights[0].grad = model.draw_gradients(step, 0, 0.0)[0]
                norms.append(float(optimizer.clip_grad_norm_(1e9)))
                optimizer.step()
            optimizer.eval()
            weights.append(weights_of(model)[0])
    assert norms[:2] == norms[2:]
    equal = (weights[0] == weights[1]).all(0)
    assert 0 < int(equal.sum()) < 8  # some were the device's in both steps


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"update_rule": "published"}, "update_rule must be 'exact'"),
        ({"overlap_step": False}, "overlap_step must be True"),
        ({"full_warm_up_rounds": 2}, "full_warm_up_rounds must be 0"),
        ({"gradient_link": "fp8"}, "gradient_link must be one of model, e4m3"),
    ],
)
def test_what_does_not_go_with_eight_bits_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        ZenFlowConfig(**{"gradient_link": "e4m3", **changes})


def test_the_reference_rounds_to_four_bits_and_keeps_small_numbers():
    values = torch.tensor([[1.0], [0.9], [1 / 3], [2.0**-9], [2.0**-15], [2.0**-18]])
    expected = torch.tensor([[1.0], [0.875], [0.34375], [2.0**-9], [1.125 * 2.0**-15], [0.0]])
    assert torch.equal(rounded(values), expected)
