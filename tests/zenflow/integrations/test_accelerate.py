"""A loop with Accelerate: the plain loop's bits, clipping in the optimizer, state on the host."""

import itertools

import pytest
import torch

pytest.importorskip("accelerate", reason='needs the extra: pip install "zenflow-offload[hf]"')

import accelerate.optimizer
from accelerate import Accelerator
from accelerate.state import GradientState
from torch.utils.data import DataLoader

from tests.models import weights_of
from tests.zenflow.integrations.hf import saved
from tests.zenflow.integrations.tiny import (
    MAX_NORM,
    Run,
    are_equal,
    both_modes,
    decoder,
    make_optimizer,
    plain_run,
    texts,
    told,
)
from zenflow import GradientError
from zenflow.integrations.accelerate import prepare

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours


@pytest.fixture(autouse=True)
def _gradients_of_no_other_test():
    """Whether gradients are synchronised is state that all accelerators of a process share."""
    GradientState._reset_state()


ACCUMULATION = 3
"""Micro-batches in a step; an epoch has seven, so that its last step has one."""


def batches():
    rows = [torch.tensor(row["input_ids"]) for row in texts()]
    return DataLoader(rows, batch_size=2)


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


class Loop:
    """A training loop as Accelerate's guide has it."""

    def __init__(self, release, accumulation_steps=ACCUMULATION):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation_steps)
        model = decoder()
        optimizer = make_optimizer(model, release, accumulation_steps if release else 1)
        self.model, self.optimizer, self.batches = prepare(
            self.accelerator, model, optimizer, batches()
        )
        self.run = Run()

    def epoch(self):
        for tokens in self.batches:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, tokens)
                self.run.losses.append(loss.item())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.norm = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                self.optimizer.step()
                self.optimizer.zero_grad()
        with self.optimizer.true_weights():
            self.run.true.append(weights_of(self.model))


@pytest.fixture(scope="module")
def plain():
    epoch = list(batches())
    model = decoder().train()
    return plain_run(
        model,
        2 * [epoch[:3], epoch[3:6], epoch[6:]],
        lambda tokens: loss_of(model, tokens),
        accumulation_steps=ACCUMULATION,
        divisor=ACCUMULATION,
    )


@pytest.mark.parametrize(**both_modes)
def test_losses_and_weights_are_the_plain_loops(plain, release, record_property):
    told(record_property, "Accelerate", release, "losses, weights", "accelerate")
    loop = Loop(release)
    loop.epoch()
    loop.epoch()
    assert loop.run.losses == plain.losses
    assert are_equal(loop.run.true[0], plain.true[2])
    assert are_equal(loop.run.true[1], plain.true[5])
    assert loop.norm.item() == loop.optimizer.report.grad_norm


@pytest.mark.parametrize(**both_modes)
def test_a_resumed_run_goes_on_bit_for_bit(plain, release, tmp_path, record_property):
    told(record_property, "Accelerate", release, "resume", "accelerate")
    loop = Loop(release)
    loop.epoch()
    loop.accelerator.save_state(str(tmp_path))
    again = Loop(release)
    again.accelerator.load_state(str(tmp_path))
    again.epoch()
    assert are_equal(again.run.true[0], plain.true[5])


@pytest.mark.parametrize(**both_modes)
def test_what_is_saved_within_true_weights_are_they(plain, release, tmp_path, record_property):
    told(record_property, "Accelerate", release, "saved weights", "accelerate")
    loop = Loop(release)
    loop.epoch()
    with loop.optimizer.true_weights():
        loop.accelerator.save_model(loop.model, str(tmp_path))
    assert are_equal(saved(tmp_path, loop.model), plain.true[2])
    assert not are_equal(weights_of(loop.model), plain.true[2])


def test_preparation_moves_no_byte_not_even_of_a_used_optimizer(monkeypatch):
    moved = []
    monkeypatch.setattr(
        accelerate.optimizer, "move_to_device", lambda state, _: moved.append(state) or state
    )
    loop = Loop(release=True)
    loop.epoch()
    prepare(Accelerator(cpu=True), loop.optimizer.optimizer)
    assert moved == []
    Accelerator(cpu=True).prepare(loop.optimizer.optimizer)
    assert len(moved) == 1  # it would be seen


def test_the_wrapper_lets_everything_through():
    loop = Loop(release=True)
    loop.epoch()
    optimizer = loop.optimizer
    assert optimizer.report.step == 3
    assert optimizer.memory.split_params > 0
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    with pytest.raises(AttributeError, match="no attribute 'naem'"):
        _ = optimizer.naem
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.true_weights().__enter__()


def test_parameters_of_another_optimizer_are_clipped_as_ever():
    loop = Loop(release=True)
    other = torch.nn.Parameter(torch.ones(4))
    other.grad = torch.full((4,), 3.0)
    assert loop.accelerator.clip_grad_norm_(other, 1.0).item() == 6.0
    assert other.grad.norm().item() == pytest.approx(1.0)


def test_a_part_of_the_parameters_another_norm_and_mid_step_are_refused():
    loop = Loop(release=True)
    params, clip = list(loop.model.parameters()), loop.accelerator.clip_grad_norm_
    with pytest.raises(ValueError, match=r"give it model\.parameters"):
        clip(params[:2], 1.0)
    with pytest.raises(ValueError, match="L2 norm"):
        clip(params, 1.0, norm_type=1)
    with loop.accelerator.accumulate(loop.model), pytest.raises(RuntimeError, match="once a step"):
        clip(params, 1.0)


def test_layers_that_were_unfrozen_after_the_optimizer_was_made_are_named_as_the_cause():
    model = decoder()
    last = list(model.parameters())[-2:]
    model.requires_grad_(False)
    for param in last:
        param.requires_grad_(True)
    optimizer = make_optimizer(torch.nn.ParameterList(last))
    accelerator = Accelerator(cpu=True)
    model, wrapped = prepare(accelerator, model, optimizer)
    model.requires_grad_(True)
    params = list(model.parameters())
    with pytest.raises(
        ValueError,
        match=f"got {len(params)} .* has 2: {len(params) - 2} of the former were unfrozen or "
        r"added after it was made.*optimizer\.add_param_group\(",
    ):
        accelerator.clip_grad_norm_(params, 1.0)
    wrapped.add_param_group({"params": params[:-2]})
    wrapped.zero_grad()
    accelerator.backward(loss_of(model, next(iter(batches()))))
    assert accelerator.clip_grad_norm_(params, 1.0) > 0
    optimizer.close()


def test_accumulation_that_differs_is_refused():
    optimizer = make_optimizer(decoder(), accumulation_steps=2)
    with pytest.raises(ValueError, match="give it accumulation_steps=3"):
        prepare(Accelerator(cpu=True, gradient_accumulation_steps=3), optimizer)


def test_micro_batches_may_change_in_number_while_a_run_goes_on():
    ends = []
    for release in (True, False):
        loop = Loop(release)
        for count in (2, 4, 1, 3):
            loop.accelerator.gradient_accumulation_steps = count
            loop.epoch()
        ends.append([loop.run.losses, *itertools.chain(*loop.run.true)])
        loop.optimizer.close()
    assert ends[0][0] == ends[1][0]
    assert are_equal(ends[0][1:], ends[1][1:])


def test_without_prepare_of_ours_clipping_fails_loudly():
    """As the guide says: it is why `prepare` is there."""
    accelerator = Accelerator(cpu=True)
    model = decoder()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    accelerator.backward(loss_of(model, next(iter(batches()))))
    with pytest.raises(GradientError, match="was released"):
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.optimizer.close()
