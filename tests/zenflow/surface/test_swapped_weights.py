"""Weights swapped for others and back, as moving averages have it, and swaps that never end."""

import copy

import pytest
import torch

from tests.models import TinyStack, assert_equal, closing, weights_of
from tests.zenflow.runs import MODES, make, take_steps

both_modes = pytest.mark.parametrize("mode", MODES)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

WRITES = {
    "copy_": lambda param, value: param.copy_(value),
    "by .data": lambda param, value: setattr(param, "data", value.clone()),
    "copy_ past autograd": lambda param, value: param.data.copy_(value),  # counted nowhere
}
every_write = pytest.mark.parametrize("write", WRITES)


class Average:
    """A moving average of weights, with the calls of diffusers' `EMAModel`."""

    def __init__(self, params, write):
        self.params, self.write = list(params), WRITES[write]
        self.shadow = [param.detach().float().clone() for param in self.params]

    @torch.no_grad()
    def step(self):
        for average, param in zip(self.shadow, self.params, strict=True):
            average.lerp_(param.float(), 0.2)

    def store(self):
        self.stored = [param.detach().clone() for param in self.params]

    def copy_to(self):
        self._put(self.shadow)

    def restore(self):
        self._put(self.stored)

    @torch.no_grad()
    def _put(self, values):
        for param, value in zip(self.params, values, strict=True):
            self.write(param, value.to(param.dtype))


def stack(mode, dtype):
    return make(mode, model=TinyStack(num_layers=4, dtype=dtype))


@both_modes
@both_dtypes
@every_write
def test_an_average_is_kept_and_evaluated_within_true_weights(mode, dtype, write):
    """Training stays the same bit for bit, and what an evaluation calls changes nothing."""
    model, optimizer = stack(mode, dtype)
    plain_model, plain = stack(mode, dtype)
    average = Average(model.parameters(), write)
    expected = [weight.float() for weight in weights_of(plain_model)]
    with closing(optimizer), closing(plain):
        for step in range(9):
            take_steps(model, optimizer, [step])
            take_steps(plain_model, plain, [step])
            with plain.true_weights():
                expected = [
                    average.lerp(weight.float(), 0.2)
                    for average, weight in zip(expected, weights_of(plain_model), strict=True)
                ]
            with optimizer.true_weights():
                average.step()
                average.store()
                average.copy_to()
                optimizer.eval()  # as trainers evaluate and save
                with optimizer.true_weights():
                    shown = weights_of(model)
                average.restore()
            assert_equal(shown, [weight.to(dtype) for weight in expected])
            assert_equal(weights_of(model), weights_of(plain_model))


@both_modes
@both_dtypes
def test_a_swap_and_back_by_a_state_dict_changes_nothing(mode, dtype):
    model, optimizer = stack(mode, dtype)
    plain_model, plain = stack(mode, dtype)
    with closing(optimizer), closing(plain):
        for step in range(9):
            take_steps(model, optimizer, [step])
            take_steps(plain_model, plain, [step])
            with optimizer.true_weights():
                own = copy.deepcopy(model.state_dict())
                model.load_state_dict(TinyStack(num_layers=4, seed=5).state_dict())
                model.load_state_dict(own)
        assert_equal(weights_of(model), weights_of(plain_model))


@both_modes
@both_dtypes
@every_write
@pytest.mark.parametrize("call", ["eval", "train"])
def test_other_weights_that_stay_are_noticed_and_not_undone(mode, dtype, write, call):
    model, optimizer = stack(mode, dtype)
    with closing(optimizer):
        take_steps(model, optimizer, range(5))
        if call == "train":
            optimizer.eval()
        average = Average(TinyStack(num_layers=4, seed=5).parameters(), write)
        average.params = list(model.parameters())
        average.copy_to()
        others = weights_of(model)
        with pytest.raises(RuntimeError, match=r"adopt_weights"):
            optimizer.train() if call == "train" else optimizer.eval()
        assert_equal(weights_of(model), others)
        optimizer.adopt_weights()
        with optimizer.true_weights():
            assert_equal(weights_of(model), others)


@both_modes
@pytest.mark.parametrize("write", ["copy_", "by .data"])
def test_a_swap_and_back_elsewhere_is_refused_with_the_remedy(mode, write):
    model, optimizer = make(mode)
    with closing(optimizer):
        take_steps(model, optimizer, range(5))
        average = Average(model.parameters(), write)
        average.store()
        average.copy_to()
        average.restore()
        with pytest.raises(RuntimeError, match=r"swap .*with optimizer\.true_weights\(\):"):
            take_steps(model, optimizer, [5])


@both_modes
@both_dtypes
@every_write
def test_weights_written_before_the_first_step_are_taken_up(mode, dtype, write):
    """As a model is initialised after its optimizer was made, say."""
    others = TinyStack(num_layers=4, seed=5, dtype=dtype)
    model, optimizer = stack(mode, dtype)
    plain_model, plain = make(mode, model=copy.deepcopy(others))
    with closing(optimizer), closing(plain):
        with torch.no_grad():
            for param, value in zip(model.parameters(), others.parameters(), strict=True):
                WRITES[write](param, value)
        take_steps(model, optimizer, range(6))
        take_steps(plain_model, plain, range(6))
        with optimizer.true_weights(), plain.true_weights():
            assert_equal(weights_of(model), weights_of(plain_model))
