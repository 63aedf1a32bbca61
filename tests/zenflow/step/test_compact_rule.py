"""Compact host state in the engine: AdamW on rounded numbers, whatever happens around it."""

import contextlib
import dataclasses

import pytest
from hypothesis import given, settings

from tests.compact_reference import CompactReference
from tests.models import closing, weights_of
from tests.zenflow.host.test_kernel import select
from tests.zenflow.test_reference import MODES, feed, scenarios
from zenflow.host import compact, library
from zenflow.step.host import rules


def to_nearest(*arguments):
    return compact.Rounding.nearest()


@contextlib.contextmanager
def own_patches():
    """Yield patches that end with the block, and with them a choice of the host's kernel."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            yield patch
    finally:
        library._load.cache_clear()


def check(scenario, mode, *, is_random, kind=CompactReference, most=1):
    """Compare weights after every step, and under `eval()` at the end; `most` may be others."""
    model = scenario.model()
    with own_patches() as patch:
        patch.setattr(rules, "pool_bytes", lambda size, depth: 64 * size * depth)  # room for all
        if not is_random:
            select(patch, "torch")
            patch.setattr(compact.Rounding, "drawn", to_nearest)
        optimizer = scenario.optimizer(model, mode)
        reference = kind(
            *(scenario.groups(model), scenario.config, scenario.max_norm, scenario.log),
            depth=optimizer.memory.queue_depth,
            is_random=is_random,
        )
        with closing(optimizer):
            for step in range(1, scenario.num_steps + 1):
                grads = model.draw_gradients(step, scenario.seed, scenario.absent)
                for groups in (optimizer.param_groups, reference.groups):
                    scenario.schedule(groups, step)
                feed(model, optimizer, grads, mode, scenario.max_norm)
                reference.step(grads)
                assert_near(weights_of(model), reference.weights, f"step {step}", most)
            optimizer.eval()
            assert_near(weights_of(model), reference.eval(), "eval", most)


def assert_near(actual, expected, what, most):
    """Compare weights; where a number lies between two codes, it may be rounded either way."""
    far = sum(
        int(((a - b).abs() > 2e-6 * max(1.0, float(b.abs().max()))).sum())
        for a, b in zip(actual, expected, strict=True)
    )
    assert far <= most, f"{what}: {far}"


def compacted(scenario):
    config = dataclasses.replace(scenario.config, update_rule="exact", host_state="compact")
    return dataclasses.replace(scenario, config=config)


@settings(max_examples=10, deadline=None)
@given(mode=MODES, scenario=scenarios())
def test_weights_follow_the_reference_with_rounding_to_nearest(mode, scenario):
    check(compacted(scenario), mode, is_random=False)


@settings(max_examples=5, deadline=None)
@given(mode=MODES, scenario=scenarios())
def test_random_bits_follow_from_parameter_element_and_step(mode, scenario):
    """Where the host has all columns, and its rows so their order."""
    config = dataclasses.replace(scenario.config, topk_ratio=0.0)
    log = [(step, dataclasses.replace(knobs, topk_ratio=0.0)) for step, knobs in scenario.log]
    shapes = [*scenario.shapes, (70, 9)]  # whose columns have two groups
    check(
        compacted(dataclasses.replace(scenario, config=config, log=log, shapes=shapes)),
        mode,
        is_random=True,
    )
