"""`step()`: no-ops, hooks, closures, the profiler, and what becomes of gradients."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.models import assert_equal, weights_of
from tests.zenflow.conformance.subjects import affine, assert_like_adamw, train


def a_loss():
    return torch.tensor([1.0])


def test_a_step_without_gradients_returns_the_loss_and_changes_nothing(make):
    problem = affine(weight_decay=0.5)
    before, optimizer = problem.weights(), problem.made_by(make)
    for _ in range(5):
        assert optimizer.step(a_loss) == a_loss()
        assert optimizer.step() is None
    assert_equal(problem.weights(), before)


def test_a_step_with_zero_gradients_only_decays_the_weights(make):
    for decay in (0.0, 0.5):
        problem = affine(weight_decay=decay, lr=0.1)
        before, optimizer = problem.weights(), problem.made_by(make)
        for step in range(1, 6):
            for p in problem.tensors:
                p.grad = torch.zeros_like(p)
            optimizer.step(a_loss)
            expected = [p * (1 - 0.1 * decay) ** step for p in before]
            with optimizer.true_weights():
                for p, shrunk in zip(problem.weights(), expected, strict=True):
                    torch.testing.assert_close(p, shrunk, rtol=1e-5, atol=0.0)


def test_gradients_that_were_zeroed_in_place_are_zero_gradients(make):
    problem = affine(weight_decay=0.0)
    before, optimizer = problem.weights(), problem.made_by(make)
    for _ in range(3):
        problem.loss().backward()
        optimizer.zero_grad(set_to_none=False)
        kept = [p.grad for p in problem.tensors]
        assert all(grad is None or not grad.any() for grad in kept)
        assert (kept[0] is None) == optimizer.releases_gradients
        optimizer.step()
        assert all(p.grad is None for p in problem.tensors)
    assert_equal(problem.weights(), before)


def test_one_gradient_may_serve_two_parameters(make):
    tensors = [nn.Parameter(torch.ones(6, 6)) for _ in range(2)]
    optimizer = make(tensors)
    shared = torch.ones(6, 6)
    for p in tensors:
        p.grad = shared
    optimizer.step()
    assert all((p < 1).all() for p in tensors)
    assert shared.eq(1).all()


# ---- closures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_a_closure_has_gradients_whatever_the_mode_around_it(make, enabled):
    by_closure, by_hand = affine(), affine()
    optimizer, other = by_closure.made_by(make), by_hand.made_by(make)
    for _ in range(4):
        expected = by_hand.closure(other)()
        other.step()
        with torch.set_grad_enabled(enabled):
            loss = optimizer.step(by_closure.closure(optimizer))
            assert torch.is_grad_enabled() == enabled
        assert torch.equal(loss, expected)
    assert_equal(by_closure.weights(), by_hand.weights())


def test_an_error_in_a_closure_reaches_the_caller_and_costs_no_step(make):
    disturbed, plain = affine(), affine()
    optimizer, other = disturbed.made_by(make), plain.made_by(make)
    for _ in range(3):
        with pytest.raises(KeyError, match="the user's own"):
            optimizer.step(_fail)
        train(disturbed, optimizer, 1)
        train(plain, other, 1)
    assert_equal(disturbed.weights(), plain.weights())


def _fail():
    raise KeyError("the user's own")


# ---- hooks and names ----------------------------------------------------------------------------


def test_hooks_of_one_and_of_all_optimizers_run_in_torch_s_order_until_they_are_removed(make):
    calls, problem = [], affine()
    optimizer, other = problem.made_by(make), torch.optim.SGD([torch.ones(2)])

    def note(what):
        return lambda *_: calls.append(what)

    handles = [
        register_optimizer_step_pre_hook(note("all before")),
        register_optimizer_step_post_hook(note("all after")),
    ]
    for each in (optimizer, other):
        handles += [
            each.register_step_pre_hook(note("before")),
            each.register_step_post_hook(note("after")),
        ]
    expected = []
    for each in (optimizer, other, optimizer):
        each.step()
        expected += ["all before", "before", "after", "all after"]
        assert calls == expected
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert calls == expected


def test_a_hook_before_the_step_may_change_its_arguments(make):
    optimizer = affine().made_by(make)
    optimizer.register_step_pre_hook(lambda opt, *_: ((opt, a_loss), {}))
    assert optimizer.step() == a_loss()


def test_the_profiler_names_steps_and_zeroing_as_for_any_optimizer(make):
    problem = affine()
    optimizer = problem.made_by(make)
    with torch.autograd.profiler.profile() as profile:
        train(problem, optimizer, 1)
    names = {event.name for event in profile.function_events}
    assert {f"Optimizer.{call}#ZenFlowAdamW.{call}" for call in ("step", "zero_grad")} <= names


def test_it_prints_its_groups(make):
    problem = affine(lr=0.25, params=lambda w, b: [{"params": [w]}, {"params": [b], "eps": 0.5}])
    text = repr(problem.made_by(make))
    assert text.startswith("ZenFlowAdamW (\nParameter Group 0\n")
    assert "eps: 0.5" in text
    assert "lr: 0.25" in text


# ---- the step in backward -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_limit_that_steps_in_backward_has_the_weights_of_adamw(make_limit):
    """One optimizer for each parameter, which steps when its gradient is there."""
    results = []
    for make in (make_limit, torch.optim.AdamW):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        optimizers = {p: make([p]) for p in model.parameters()}

        def step(p, optimizers=optimizers):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in optimizers:
            p.register_post_accumulate_grad_hook(step)
        for _ in range(6):
            model(torch.ones(2, 6)).square().sum().backward()
        results.append(weights_of(model))
    assert_like_adamw(*results)
