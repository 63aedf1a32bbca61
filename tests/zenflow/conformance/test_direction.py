"""The loss falls on every kind of parameter and setting; in the limits it falls as AdamW's."""

import inspect

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from tests.zenflow.conformance.subjects import affine, assert_like_adamw, convolution, train

PROBLEMS = {
    "contiguous": affine,
    "with gaps": lambda: affine(
        lambda: torch.randn(10, 5, 2)[..., 0], lambda: torch.randn(10, 2)[..., 0]
    ),
    "transposed": lambda: affine(lambda: torch.randn(5, 10).t()),
    "channels last": convolution,
    "named": lambda: affine(params=lambda w, b: [("weight", w), ("bias", b)]),
    "groups": lambda: affine(
        params=lambda w, b: [{"params": [w], "weight_decay": 0.1}, {"params": b, "lr": 1e-2}]
    ),
    "named groups": lambda: affine(
        params=lambda w, b: [{"params": [("w", w)], "eps": 1e-6}, {"params": [("b", b)]}]
    ),
    "a group without parameters": lambda: affine(
        params=lambda w, b: [{"params": [w, b]}, {"params": []}]
    ),
    "a generator": lambda: affine(params=lambda w, b: (p for p in (w, b))),
    "another lr": lambda: affine(lr=0.01),
    "weight decay": lambda: affine(weight_decay=0.1),
    "tensor lr": lambda: affine(lr=torch.tensor(0.01)),
    "tensor lr of one element": lambda: affine(lr=torch.tensor([0.01])),
    "tensor betas": lambda: affine(betas=(torch.tensor(0.9), torch.tensor(0.99))),
    "empty and 0-dim": lambda: affine(
        others=[torch.empty(0), torch.empty(0, 5), torch.empty(5, 0), torch.ones(())]
    ),
}
"""Problems that torch.optim.AdamW solves with the same arithmetic."""

LOW_PRECISION = {
    "bfloat16": lambda: affine(
        lambda: torch.randn(10, 5).bfloat16(), lambda: torch.randn(10).bfloat16(), lr=1e-2
    ),
    "three dtypes": lambda: affine(
        lambda: torch.randn(10, 5).bfloat16(), others=[torch.randn(6, 6).half()], lr=1e-2
    ),
}
"""Problems that torch.optim.AdamW solves with moments in the parameters' own dtype."""


@pytest.mark.parametrize("name", PROBLEMS | LOW_PRECISION)
def test_the_loss_falls(make, name):
    problem = (PROBLEMS | LOW_PRECISION)[name]()
    before, after = train(problem, problem.made_by(make), 6)
    assert after < before


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_limit_has_the_weights_of_adamw(make_limit, name):
    ours, theirs = PROBLEMS[name](), PROBLEMS[name]()
    train(ours, ours.made_by(make_limit), 6)
    train(theirs, theirs.made_by(torch.optim.AdamW), 6)
    assert_like_adamw(ours.weights(), theirs.weights())


@pytest.mark.parametrize("order", ["gaps", "transposed"])
def test_memory_between_a_parameter_s_elements_is_left_alone(make, order):
    base = torch.zeros(10, 12)
    views = {"gaps": (base[:, ::2], base[:, 1::2]), "transposed": (base[:5].t(), base[5:])}
    view, neighbour = views[order]
    weight = nn.Parameter(view)
    optimizer = make([weight])
    for _ in range(4):
        (weight - 3).square().sum().backward()
        optimizer.step()
    assert weight.detach().ne(0).all()
    assert neighbour.eq(0).all()


def test_a_group_with_next_to_no_learning_rate_stays_while_another_learns(make):
    problem = affine(others=[torch.randn(6, 6)])
    *learning, still = problem.tensors
    groups = [{"params": learning, "lr": 1e-3}, {"params": [still]}]
    kept = still.detach().clone()
    before, after = train(problem, make(groups, lr=1e-28))
    assert after < before
    assert torch.equal(still, kept)


@pytest.mark.parametrize("flags", [{"foreach": True}, {"fused": False}])
def test_flags_of_torch_s_implementations_change_nothing(make, flags):
    plain, flagged = affine(), affine()
    train(plain, plain.made_by(make), 3)
    train(flagged, make(flagged.tensors, **flags), 3)
    assert all(torch.equal(a, b) for a, b in zip(plain.weights(), flagged.weights(), strict=True))


# ---- schedules ----------------------------------------------------------------------------------


SCHEDULES = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda _: 0.9),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 4, 0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [3, 7], 0.5),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, 0.4, 5),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.1, total_iters=5),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 12, 0.9),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 12),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 4),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, threshold=1),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 1e-3, 1e-2, 3),  # moves beta1, too
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 1e-2, 20),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.StepLR(opt, 4)], [3]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.4, 5), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "SWALR": lambda opt: swa_utils.SWALR(opt, 1e-3, anneal_epochs=5),
}


def test_every_schedule_of_torch_is_tried():
    known = {
        name
        for name, member in vars(lr_scheduler).items()
        if inspect.isclass(member) and issubclass(member, lr_scheduler.LRScheduler)
    }
    assert known - {"LRScheduler", "_LRScheduler"} == SCHEDULES.keys() - {"SWALR"}


@pytest.mark.filterwarnings("error:.*before.*optimizer.step")
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_loss_falls_under_a_schedule(make_late, name):
    problem = affine(lr=1e-2)
    optimizer = problem.made_by(make_late)
    before, after = train(problem, optimizer, schedules=[SCHEDULES[name](optimizer)])
    assert after < before


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_limit_under_a_schedule_has_the_weights_of_adamw(make_limit, name, lr):
    results = []
    for make in (make_limit, torch.optim.AdamW):
        problem = affine(lr=lr.clone() if isinstance(lr, torch.Tensor) else lr)
        optimizer = problem.made_by(make)
        train(problem, optimizer, schedules=[SCHEDULES[name](optimizer)])
        results.append((problem.weights(), float(optimizer.param_groups[0]["lr"])))
    (ours, our_lr), (theirs, their_lr) = results
    assert our_lr == their_lr
    assert_like_adamw(ours, theirs)
