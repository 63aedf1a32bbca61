"""A norm that is not finite and is noticed a step late, as on a GPU, is never forgotten.

A CPU whose reports resolve a step later stands for the GPU.
"""

import copy
import math
import threading

import pytest

from tests.models import assert_equal, closing, weights_of
from tests.zenflow.runs import MODES, make, take_steps, undisturbed_weights
from zenflow import GradientError, WorkerError
from zenflow.device.cpu import CpuDevice


@pytest.fixture(autouse=True)
def late(monkeypatch):
    monkeypatch.setattr(CpuDevice, "is_synchronous", False)


def take_bad_step(model, optimizer):
    (model.loss(99) * math.nan).backward()
    optimizer.step()


CALLS = {
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "eval": lambda model, optimizer: optimizer.eval(),
    "step": lambda model, optimizer: take_steps(model, optimizer, [9]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", CALLS)
def test_every_call_after_the_bad_step_is_refused_not_only_the_first(first, mode):
    model, optimizer = make(mode)
    with closing(optimizer):
        take_steps(model, optimizer, range(5))
        take_bad_step(model, optimizer)  # not noticed yet
        for name in (first, *CALLS, *CALLS):
            with pytest.raises(GradientError, match=r"norm of step 6 is nan.*last checkpoint"):
                CALLS[name](model, optimizer)
            optimizer.zero_grad()  # which a handler of errors may well call


def test_a_loaded_checkpoint_is_gone_on_from_exactly():
    expected = undisturbed_weights(9)
    model, optimizer = make()
    with closing(optimizer):
        take_steps(model, optimizer, range(5))
        good = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        for told in (False, True):
            take_bad_step(model, optimizer)
            if told:
                with pytest.raises(GradientError, match="finite"):
                    optimizer.synchronize()
            model.load_state_dict(good[0])
            optimizer.load_state_dict(good[1])
            take_steps(model, optimizer, range(5, 9))
            optimizer.synchronize()
            assert_equal(weights_of(model), expected)


def test_a_gradient_of_another_shape_costs_a_batch_and_no_more():
    """It is noticed before anything is changed, on every device."""
    expected = undisturbed_weights(8)
    model, optimizer = make()
    with closing(optimizer):
        take_steps(model, optimizer, range(5))
        model.loss(99).backward()
        model.layers[1].weight.grad.resize_(3, 2)
        with pytest.raises(GradientError, match=r"\(3, 2\)"):
            optimizer.step()
        optimizer.zero_grad()
        take_steps(model, optimizer, range(5, 8))
        optimizer.synchronize()
        assert_equal(weights_of(model), expected)


def test_close_tells_of_a_norm_that_nobody_was_told_of_and_still_ends_every_thread():
    before = set(threading.enumerate())
    model, optimizer = make()
    take_bad_step(model, optimizer)
    with pytest.raises(GradientError, match="finite"):
        optimizer.close()
    assert set(threading.enumerate()) <= before
    optimizer.close()


def test_close_says_nothing_twice():
    model, optimizer = make()
    take_bad_step(model, optimizer)
    with pytest.raises(GradientError, match="finite"):
        optimizer.synchronize()
    optimizer.close()


def test_a_step_broken_off_half_done_gives_no_state_away(monkeypatch):
    model, optimizer = make()
    with closing(optimizer):
        take_steps(model, optimizer, range(3))
        with monkeypatch.context() as patch:
            patch.setattr("zenflow.step.engine.update_device", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                take_steps(model, optimizer, [3])
        for call in ("state_dict", "eval", "synchronize"):
            with pytest.raises(WorkerError, match="broken off"):
                CALLS[call](model, optimizer)
