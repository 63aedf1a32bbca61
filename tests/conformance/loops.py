"""Training loops as people write them; each is run under AdamW and under this optimizer.

To add one, write a function that takes a `Run`, and say by `@loop(...)` what holds for it. Batches
are numbers: `run.model(index)` is a loss.
"""

import contextlib
import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from tests.conformance.runs import Run

LOOPS: dict[str, "Loop"] = {}
"""All loops, by name."""

ZERO_GRAD = r"optimizer\.zero_grad\(\)"
KEEP = r'offload_gradients="keep"'


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop, and what is to come of it."""

    train: Callable[[Run], None]
    """Function that trains."""
    accumulation_steps: int = 1
    """Backward passes of a step, which release mode is told."""
    release: str | None = None
    """Pattern of the error that release mode raises; None: it trains like keep mode."""
    keep: str | None = None
    """Pattern of the error that keep mode raises; None: it trains like AdamW."""
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Context in which this optimizer, and not the measure, is made and trains."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    """Dtypes of the weights in which all sums of the loop are exact."""
    is_long: bool = False
    """Whether it takes so many steps that one quick case has to do."""

    def refusal(self, mode):
        """Return the pattern of the mode's error, or None."""
        return self.release if mode == "release" else self.keep


def loop(**what):
    """Register a loop under its function's name."""

    def register(train):
        LOOPS[train.__name__.replace("_", " ")] = Loop(train=train, **what)
        return train

    return register


def step(run, index, *, zero=True):
    """Take a plain step."""
    run.model(index).backward()
    run.optimizer.step()
    if zero:
        run.optimizer.zero_grad()


# ---- plain --------------------------------------------------------------------------------------


@loop()
def plain(run):
    for index in range(9):
        step(run, index)


@loop()
def zeroed_before_backward(run):
    for index in range(9):
        run.optimizer.zero_grad()
        step(run, index, zero=False)


@loop()
def zeroed_by_the_model_behind_each_step(run):
    for index in range(9):
        step(run, index, zero=False)
        run.model.zero_grad()


@loop()
def a_closure(run):
    for index in range(9):

        def closure(index=index):
            run.optimizer.zero_grad()
            loss = run.model(index)
            loss.backward()
            return loss

        run.optimizer.step(closure)
        run.optimizer.zero_grad()


@loop()
def learning_rates_by_step(run):
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 1 / (1 + n % 3))
    for index in range(9):
        step(run, index)
        schedule.step()


@loop()
def steps_without_gradients(run):
    for index in range(9):
        step(run, index)
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop()
def backward_in_another_thread(run):
    for index in range(9):
        thread = threading.Thread(target=lambda index=index: run.model(index).backward())
        thread.start()
        thread.join()
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop()
def evaluations_in_between(run):
    for index in range(9):
        step(run, index)
        if index % 2:
            with run.true_weights(), torch.no_grad():
                run.model(index)


@loop()
def weights_swapped_for_an_average(run):
    for index in range(9):
        step(run, index)
        with run.true_weights(), torch.no_grad():
            own = [p.detach().clone() for p in run.params]
            for p in run.params:
                p.mul_(0.5)
            for p, value in zip(run.params, own, strict=True):
                p.copy_(value)


@loop()
def a_state_put_back_after_bad_steps(run):
    for index in range(9):
        if index % 4 == 3:
            weights = copy.deepcopy(run.model.state_dict())
            state = copy.deepcopy(run.optimizer.state_dict())
            step(run, 100 + index)
            run.model.load_state_dict(weights)
            run.optimizer.load_state_dict(state)
        step(run, index)


# ---- several backward passes --------------------------------------------------------------------


@loop(accumulation_steps=4)
def micro_batches(run):
    for first in range(0, 20, 4):
        for index in range(first, first + 4):
            (run.model(index) / 4).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop(accumulation_steps=4)
def a_last_step_of_fewer_micro_batches(run):
    for index in range(14):
        (run.model(index) / 4).backward()
        if index % 4 == 3 or index == 13:
            run.optimizer.step()
            run.optimizer.zero_grad()


@loop(accumulation_steps=2)
def two_losses_of_one_step(run):
    for index in range(9):
        run.model(index).backward(retain_graph=True)
        run.model(50 + index).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop(release="was released")
def more_passes_than_were_said(run):
    for index in range(9):
        run.model(index).backward()
        run.model(50 + index).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop(accumulation_steps=2)
def a_micro_batch_dropped_and_not_made_up(run):
    for index in range(12):
        run.model(index).backward()
        if index == 4:
            run.model.zero_grad()
        if index % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()


@loop(accumulation_steps=2)
def a_micro_batch_dropped_and_made_up(run):
    for index in range(0, 12, 2):
        run.model(index).backward()
        if index in (2, 8):
            for p in run.params:
                p.grad = None
            run.model(90 + index).backward()
        run.model(index + 1).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop(accumulation_steps=2)
def sums_made_anew_between_micro_batches(run):
    for index in range(0, 12, 2):
        run.model(index).backward()
        for p in run.params:
            p.grad = p.grad * 2
        run.model(index + 1).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


# ---- dropped gradients --------------------------------------------------------------------------


@loop()
def batches_dropped_by_the_optimizer(run):
    for index in range(12):
        run.model(index).backward()
        if index % 4 in (1, 2):
            run.optimizer.zero_grad()
            continue
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop(release=ZERO_GRAD)
def batches_dropped_by_the_model(run):
    for index in range(12):
        run.model(index).backward()
        if index % 4 == 1:
            run.model.zero_grad()
            continue
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop()
def batches_dropped_before_their_step(run):
    for index in range(12):
        run.model(index).backward()
        if index % 4 == 1:
            run.model.zero_grad()
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop()
def a_last_batch_dropped_before_an_evaluation(run):
    for index in range(9):
        step(run, index)
        if index % 3 == 2:
            run.model(50 + index).backward()
            run.model.zero_grad()
            run.saved()


@loop()
def some_parameters_dropped_before_their_step(run):
    """As self-supervised recipes freeze a last layer for an epoch."""
    for index in range(12):
        run.model(index).backward()
        if index < 6:
            run.params[2].grad = None
            run.params[1].grad = None
        if index == 8:
            run.params[5].grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop()
def dropped_after_the_norm_was_asked_for(run):
    for index in range(9):
        run.model(index).backward()
        run.clip(1e9)
        if index % 3 == 1:
            run.params[0].grad = None
            run.params[3].grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop()
def hooks_that_clear_gradients(run):
    """Registered behind the optimizer's own hooks."""
    clears = {"now": False}

    def clear(param):
        if clears["now"]:
            param.grad = None

    handles = [run.params[i].register_post_accumulate_grad_hook(clear) for i in (0, 3, 5)]
    for index in range(12):
        clears["now"] = index % 4 == 2
        step(run, index)
    for handle in handles:
        handle.remove()


@loop()
def hooks_that_change_gradients(run):
    handles = [p.register_hook(lambda grad: grad * 2) for p in run.params]
    for index in range(9):
        step(run, index)
    for handle in handles:
        handle.remove()


def broken_off(run, index):
    """Begin a backward that ends in an error when some gradients are there."""

    def fail(_):
        raise ArithmeticError("a bad batch")

    handle = run.params[2].register_hook(fail)
    with contextlib.suppress(ArithmeticError):
        run.model(index).backward()
    handle.remove()


@loop()
def backward_broken_off_and_dropped(run):
    for index in range(12):
        if index % 4 == 1:
            broken_off(run, 50 + index)
            run.optimizer.zero_grad()
        step(run, index)


@loop(release=ZERO_GRAD)
def backward_broken_off_and_dropped_by_the_model(run):
    for index in range(12):
        if index % 4 == 1:
            broken_off(run, 50 + index)
            run.model.zero_grad()
        step(run, index)


@loop(release="was released")
def gradients_set_to_zero_by_the_model(run):
    for index in range(12):
        run.model(index).backward()
        if index % 4 == 1:
            run.model.zero_grad(set_to_none=False)
            continue
        run.optimizer.step()
        run.optimizer.zero_grad()


# ---- gradients of other owners ------------------------------------------------------------------


@loop(release=KEEP)
def gradients_replaced_before_the_step(run):
    for index in range(9):
        run.model(index).backward()
        for p, g in zip(run.params, run.model.gradients(70 + index), strict=True):
            p.grad = g
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop()
def gradients_without_a_backward(run):
    for index in range(9):
        for p, g in zip(run.params, run.model.gradients(index), strict=True):
            p.grad = g
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop(release="was released")
def gradients_changed_in_place(run):
    for index in range(9):
        run.model(index).backward()
        for p in run.params:
            p.grad.mul_(0.5)
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop()
def buffers_written_again_behind_the_step(run):
    buffers = [torch.zeros_like(p) for p in run.params]
    for index in range(9):
        for p, buffer, g in zip(run.params, buffers, run.model.gradients(index), strict=True):
            buffer.copy_(g)
            p.grad = buffer
        run.optimizer.step()
        for buffer in buffers:
            buffer.fill_(float("nan"))
        run.optimizer.zero_grad()


@loop()
def parts_of_one_buffer_written_again(run):
    sizes = [p.numel() for p in run.params]
    flat = torch.zeros(sum(sizes), dtype=run.params[0].dtype)
    for index in range(9):
        parts = flat.split(sizes)
        for p, part, g in zip(run.params, parts, run.model.gradients(index), strict=True):
            p.grad = part.view_as(p).copy_(g)
        run.optimizer.step()
        flat.fill_(float("nan"))
        run.optimizer.zero_grad()


@loop()
def gradients_kept_by_name_and_written_again(run):
    """In release mode the names are those of the placeholders."""
    for index in range(9):
        run.model(index).backward()
        kept = [p.grad for p in run.params if type(p.grad) is torch.Tensor]
        views = [p.grad.view(-1) for p in run.params if type(p.grad) is torch.Tensor]
        run.optimizer.step()
        for grad in kept if index % 2 else views:
            grad.fill_(float("nan"))
        run.optimizer.zero_grad()


@loop()
def gradients_shared_with_numpy(run):
    if run.params[0].dtype == torch.bfloat16:
        return plain(run)
    for index in range(9):
        run.model(index).backward()
        arrays = [p.grad.numpy() for p in run.params if type(p.grad) is torch.Tensor]
        run.optimizer.step()
        for array in arrays:
            array.fill(float("nan"))
        run.optimizer.zero_grad()
    return None


# ---- clipping and loss scales -------------------------------------------------------------------


@loop()
def clipped_by_call(run):
    for index in range(9):
        run.model(index).backward()
        run.clip(0.5)
        run.optimizer.step()
        run.optimizer.zero_grad()


def scaled(run, *, unscales, clips):
    """Train under a loss scale with an overflow; a clip's norm is that of unscaled gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=3)
    for index in range(9):
        scaler.scale(run.model(index) * (float("inf") if index == 4 else 1.0)).backward()
        if unscales or not run.is_ours:
            scaler.unscale_(run.optimizer)
        if clips:
            run.clip(2.0)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()


SCALED = {"release": "was released", "dtypes": (torch.float32,)}
"""A GradScaler looks at all gradients; 16-bit ones it unscales in place, which rounds."""


@loop(**SCALED)
def scaled_and_unscaled(run):
    scaled(run, unscales=True, clips=False)


@loop(**SCALED)
def scaled_unscaled_and_clipped(run):
    scaled(run, unscales=True, clips=True)


@loop(release="was released")
def scaled_alone(run):
    scaled(run, unscales=False, clips=False)


@loop(release="was released")
def scaled_and_clipped(run):
    scaled(run, unscales=False, clips=True)


# ---- two optimizers, frozen parameters ----------------------------------------------------------


@loop()
def gradients_of_another_loss_dropped(run):
    """As the generator's loss of a GAN leaves gradients in the discriminator."""
    for index in range(9):
        run.model(40 + index).backward()
        run.optimizer.zero_grad()
        step(run, index)


@loop()
def parameters_frozen_for_a_while(run):
    for index in range(12):
        for i in (0, 3):
            run.params[i].requires_grad_(not 3 <= index < 7)
        step(run, index)


@loop()
def parameters_that_a_loss_leaves_out(run):
    for index in range(12):
        grads = run.model.gradients(index)
        used = [i for i in range(len(grads)) if (index + i) % 3]
        sum((run.params[i] * grads[i]).sum(dtype=torch.float32) for i in used).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


# ---- torch's defaults ---------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype(dtype):
    """Have another default dtype, as recipes set it for a whole program."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    """Have another default device; none of this loop's tensors is made there."""
    with torch.device(device):  # to set the former one would cost every later call of torch
        yield


def _long(run):
    """Take more steps than a 16-bit number counts to."""
    for index in range(270):
        step(run, index % 20)


@loop(around=lambda: default_dtype(torch.bfloat16), dtypes=(torch.float32,), is_long=True)
def bfloat16_by_default(run):
    _long(run)


@loop(around=lambda: default_dtype(torch.float16))
def float16_by_default(run):
    plain(run)


@loop(around=lambda: default_dtype(torch.float64))
def float64_by_default(run):
    a_state_put_back_after_bad_steps(run)


@loop(around=lambda: default_device("meta"))
def another_device_by_default(run):
    a_state_put_back_after_bad_steps(run)
    evaluations_in_between(run)
