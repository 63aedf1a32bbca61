"""Every column's every gradient is applied exactly once, at once, whoever owns the column by then.

With betas of 0 and lr = eps = 2**40, Adam is a linear rule: sqrt(v) vanishes beside eps in
float32, so a weight moves by minus its gradient. Gradients are integers, so that sums are exact.
The masters have all gradients so far, and so have the weights that training sees: the host's that
have landed, and by fresh steps those that have not. A gradient that is lost, applied twice, or put
into another column shows in the next step.
"""

import dataclasses
import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import GivenGradients, closing, weights_of
from tests.reference import Reference
from tests.zenflow.decisions import schedules
from tests.zenflow.test_reference import configs, feed
from zenflow import LoggedDecisions, ZenFlowAdamW, ZenFlowConfig

LINEAR = {"lr": 2.0**40, "betas": (0.0, 0.0), "eps": 2.0**40, "weight_decay": 0.0}
SHAPES = [(5,), (4, 9), (1, 6), (3, 2, 4), (2, 30)]


def integer_gradients(shapes, step, seed):
    """Return integers, with other columns large in every step, so that owners change often."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    grads = []
    for shape in shapes:
        rows = torch.randint(-6, 7, shape, generator=generator)
        columns = torch.randint(1, 12, shape[1:], generator=generator)
        missing = torch.rand((), generator=generator) < 0.15
        grads.append(None if missing else (420 * rows * columns).float())
    return grads


@settings(max_examples=15, deadline=None)
@given(
    data=st.data(),
    config=configs(update_rule="exact", overlap_step=True, hysteresis=0.0, min_split_elements=1),
    mode=st.sampled_from(["keep", "release"]),
    dropped=st.sets(st.integers(1, 18), max_size=3),
    seed=st.integers(0, 10**6),
)
def test_every_gradient_of_every_column_is_applied_exactly_once(data, config, mode, dropped, seed):
    model = GivenGradients(SHAPES, scale=0.0)
    log = data.draw(schedules(config, last=12))
    if config.topk_ratio < 1 and data.draw(st.booleans()):
        config = dataclasses.replace(config, second_moment="factored")
    release = {"offload_gradients": mode}
    optimizer = ZenFlowAdamW(
        model.parameters(), config=config, controller=LoggedDecisions(log), **LINEAR, **release
    )
    sums = [torch.zeros(shape) for shape in SHAPES]
    with closing(optimizer):
        for step in range(1, 19):
            if step in dropped and mode == "release":
                model.backward(integer_gradients(SHAPES, 100 + step, seed))
                optimizer.zero_grad()
            grads = integer_gradients(SHAPES, step, seed)
            feed(model, optimizer, grads, mode)
            sums = [s if g is None else s + g for s, g in zip(sums, grads, strict=True)]
            seen = weights_of(model)
            for weight, total in zip(seen, sums, strict=True):
                assert torch.equal(weight, -total), f"the weights of training, step {step}"
            optimizer.eval()
            for p, total in zip(model.parameters(), sums, strict=True):
                assert torch.equal(p, -total), f"the true weights, step {step}"
            optimizer.train()
            for p, weight in zip(model.parameters(), seen, strict=True):
                assert torch.equal(p, weight), "eval() and train() changed a weight"


def test_these_gradients_do_make_columns_change_owners():
    """Guard the test above: without reselections it would show little."""
    config = ZenFlowConfig(
        topk_ratio=0.5,
        update_interval=2,
        select_interval=1,
        importance_decay=0.0,
        hysteresis=0.0,
        min_split_elements=1,
    )
    groups = [{"params": [torch.zeros(4, 9, requires_grad=True)], **LINEAR}]
    reference, owners = Reference(groups, config), []
    for step in range(1, 21):
        reference.step(integer_gradients([(4, 9)], step, seed=3))
        owners.append(torch.cat([b.important for b in reference.blocks]))
    changes = sum(bool((a != b).any()) for a, b in itertools.pairwise(owners))
    assert changes >= 5
