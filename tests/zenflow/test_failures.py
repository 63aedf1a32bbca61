"""What goes wrong ends in an error that says what to do: never in a hang, never in silence."""

import copy
import math
import threading
import time

import pytest
import torch
from torch import nn

from tests.models import TinyStack, assert_equal, closing, weights_of
from tests.zenflow.host_work import host_work
from tests.zenflow.runs import CONFIG, MODES, make, take_steps, undisturbed_weights
from zenflow import (
    CheckpointError,
    DeadlineError,
    GradientError,
    PacedLink,
    WorkerError,
    ZenFlowAdamW,
    ZenFlowConfig,
)
from zenflow.lanes.copies import CopyLane
from zenflow.step.host import exact
from zenflow.step.uploads import UploadGate


def within(seconds, function, *args):
    """Run a function in a thread and re-raise its error; it hangs if the time runs out."""
    errors = []

    def run():
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"still waiting after {seconds} s"
    if errors:
        raise errors[0]


def fail(*args, **kwargs):
    raise ZeroDivisionError("a broken part")


def in_background(function, original):
    """Return `function` for the optimizer's own threads and `original` for the others."""

    def either(*args, **kwargs):
        is_ours = threading.current_thread().name.startswith("zenflow-")
        return (function if is_ours else original)(*args, **kwargs)

    return either


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("owner", "name"), [*host_work("catch_up"), (CopyLane, "_perform")])
def test_a_failing_worker_reaches_the_next_step_with_its_cause(monkeypatch, owner, name, mode):
    model, optimizer = make(mode)
    with closing(optimizer):
        take_steps(model, optimizer, range(3))
        monkeypatch.setattr(owner, name, in_background(fail, getattr(owner, name)))
        with pytest.raises(WorkerError, match="a broken part") as caught:
            within(20, take_steps, model, optimizer, range(3, 8))
        cause = caught.value
        while cause.__cause__ is not None:
            cause = cause.__cause__
        assert isinstance(cause, ZeroDivisionError)
        with pytest.raises(WorkerError, match="checkpoint"):  # and it stays failed
            within(20, take_steps, model, optimizer, range(8, 9))
        started = time.perf_counter()
    assert time.perf_counter() - started < 5, "close() waited for a dead worker"


def test_after_an_error_in_the_middle_of_a_step_no_other_step_is_taken(monkeypatch):
    """On the training thread too, where columns are handed over: nothing builds on half a step."""
    model, optimizer = make()
    with closing(optimizer):
        take_steps(model, optimizer, range(3))
        monkeypatch.setattr(exact, "stepped", in_background(exact.stepped, fail))
        with pytest.raises((WorkerError, ZeroDivisionError), match="a broken part"):
            within(20, take_steps, model, optimizer, range(3, 8))
        monkeypatch.undo()
        with pytest.raises(WorkerError, match="checkpoint"):
            within(20, take_steps, model, optimizer, range(8, 9))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(bad):
    expected = undisturbed_weights(9)
    model, optimizer = make()
    with closing(optimizer):
        take_steps(model, optimizer, range(5))
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(GradientError, match="finite") as caught:
            take_bad_step(model, optimizer, bad)
        assert "skip" in str(caught.value)
        optimizer.zero_grad()
        assert_same_state(optimizer.state_dict(), before)
        take_steps(model, optimizer, range(5, 9))
        assert_equal(weights_of(model), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_released_gradient_that_is_not_finite_is_refused_and_changes_no_master(bad):
    """Its fresh steps have moved weights: these are the true ones then."""
    model, optimizer = make("release")
    with closing(optimizer):
        for last in range(2, 8):
            take_steps(model, optimizer, [last])
            optimizer.eval()
            true = weights_of(model)
            optimizer.train()
            with pytest.raises(GradientError, match="true weights are as before"):
                take_bad_step(model, optimizer, bad)
            optimizer.zero_grad()
            assert_equal(weights_of(model), true)
            optimizer.eval()
            assert_equal(weights_of(model), true)
            optimizer.train()


def take_bad_step(model, optimizer, factor):
    (model.loss(99) * factor).backward()
    optimizer.step()


@pytest.mark.parametrize("bad", [(4, "weight"), (0, "weight"), (2, "bias")])
def test_one_bad_element_anywhere_is_found(bad):
    model, optimizer = make("keep", model=TinyStack(num_layers=5))
    with closing(optimizer):
        model.loss(0).backward()
        before = weights_of(model)
        getattr(model.layers[bad[0]], bad[1]).grad.view(-1)[-1] = math.nan
        with pytest.raises(GradientError, match="finite"):
            optimizer.step()
        assert_equal(weights_of(model), before)


def assert_same_state(actual, expected, path="state"):
    """Compare two states, whatever containers they are made of."""
    assert type(actual) is type(expected), path
    if isinstance(actual, torch.Tensor):
        assert torch.equal(actual, expected), path
    elif isinstance(actual, dict):
        assert actual.keys() == expected.keys(), path
        for key in actual:
            assert_same_state(actual[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected), path
        for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same_state(a, b, f"{path}[{index}]")
    else:
        assert actual == expected, path


@pytest.mark.parametrize("rule", ["exact", "published"])
def test_a_batch_dropped_by_zero_grad_leaves_no_trace(rule):
    config = ZenFlowConfig(**{**CONFIG.to_dict(), "update_rule": rule})
    expected_model, expected = make(config=config)
    model, optimizer = make(config=config)
    with closing(expected), closing(optimizer):
        for step in range(10):
            model.loss(50 + step).backward()
            optimizer.zero_grad()
            take_steps(model, optimizer, [step])
            take_steps(expected_model, expected, [step])
            assert_equal(weights_of(model), weights_of(expected_model), f"step {step}")


@pytest.mark.parametrize("rule", ["exact", "published"])
def test_a_batch_dropped_in_release_mode_changes_the_same_whatever_the_timing(monkeypatch, rule):
    """Uploads that its backward began must be over before the next forward reads the weights."""
    config = ZenFlowConfig(**{**CONFIG.to_dict(), "update_rule": rule})
    perform, results = CopyLane._perform, []
    for delay in (0.0, 3e-3):

        def late(lane, job, delay=delay):
            time.sleep(delay if lane.name == "h2d" else 0.0)
            return perform(lane, job)

        monkeypatch.setattr(CopyLane, "_perform", late)
        model, optimizer = make("release", config)
        with closing(optimizer):
            for step in range(8):
                model.loss(50 + step).backward()
                optimizer.zero_grad()
                take_steps(model, optimizer, [step])
        results.append(weights_of(model))
    assert_equal(*results)


def test_an_update_that_nobody_lets_up_is_an_error(monkeypatch):
    """Else its weights would never be seen, and every run would agree with every other."""
    model, optimizer = make("keep")
    with closing(optimizer):
        monkeypatch.setattr(UploadGate, "start_bucket", lambda *_: None)
        with pytest.raises(AssertionError, match="never"):
            take_steps(model, optimizer, range(8))


def test_a_gradient_of_another_shape_is_refused():
    model, optimizer = make("keep")
    with closing(optimizer):
        model.loss(0).backward()
        before = weights_of(model)
        model.layers[1].weight.grad.resize_(3, 2)
        with pytest.raises(GradientError, match=r"\(3, 2\)"):
            optimizer.step()
        assert_equal(weights_of(model), before)


@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients_are_refused(mode):
    model = nn.Embedding(20, 8, sparse=True)
    _, optimizer = make(mode, model=model)

    def step():
        model(torch.tensor([1, 2, 3])).sum().backward()
        optimizer.step()

    with closing(optimizer), pytest.raises(GradientError, match="sparse"):
        step()


OTHER = {
    "another shape": (lambda: TinyStack(num_layers=4, width=7), CONFIG),
    "more parameters": (lambda: TinyStack(num_layers=5), CONFIG),
    "fewer parameters": (lambda: TinyStack(num_layers=3), CONFIG),
    "another dtype": (lambda: TinyStack(num_layers=4, dtype=torch.bfloat16), CONFIG),
    **{
        f"another {key}": (
            lambda: TinyStack(num_layers=4),
            ZenFlowConfig(**{**CONFIG.to_dict(), key: value}),
        )
        for key, value in [("topk_ratio", 0.5), ("block_elements", 10), ("min_split_elements", 40)]
    },
}


@pytest.mark.parametrize("what", OTHER)
def test_a_checkpoint_of_another_model_or_config_is_refused_and_changes_nothing(what):
    other_model, other_config = OTHER[what]
    other, other_optimizer = make("keep", other_config, model=other_model())
    with closing(other_optimizer):
        take_steps(other, other_optimizer, range(3))
        foreign = copy.deepcopy(other_optimizer.state_dict())
    expected_model, expected = make()
    model, optimizer = make()
    with closing(expected), closing(optimizer):
        take_steps(expected_model, expected, range(6))
        take_steps(model, optimizer, range(3))
        good = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(CheckpointError):
            optimizer.load_state_dict(foreign)
        take_steps(model, optimizer, range(3, 6))
        assert_equal(weights_of(model), weights_of(expected_model))
        optimizer.load_state_dict(good)  # the earlier checkpoint still loads


@pytest.mark.parametrize("damage", ["a missing entry", "a shorter tensor"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(damage):
    model, optimizer = make()
    with closing(optimizer):
        take_steps(model, optimizer, range(3))
        state = copy.deepcopy(optimizer.state_dict())
        before = copy.deepcopy(state)
        name, entry = last_matrix(state["state"])
        state["state"][name] = {k: v for k, v in state["state"][name].items() if k != entry}
        if damage == "a shorter tensor":
            state["state"][name][entry] = before["state"][name][entry][:-1]
        with pytest.raises(CheckpointError):
            optimizer.load_state_dict(state)
        assert_same_state(optimizer.state_dict(), before)


def last_matrix(state):
    """Return the last parameter that has a state matrix, and that entry's name."""
    return [
        (name, entry)
        for name, entries in state.items()
        for entry, value in entries.items()
        if isinstance(value, torch.Tensor) and value.ndim == 2
    ][-1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("slow", "waited_for"), [("host", r"host|update|accumul"), ("link", r"d2h|cop(y|ies)|h2d")]
)
def test_a_wait_past_its_deadline_says_what_it_waited_for(monkeypatch, slow, waited_for, mode):
    resume = threading.Event()
    [(owner, name)] = host_work("catch_up")
    original = getattr(owner, name)

    def stuck(*args, **kwargs):
        resume.wait(20)
        return original(*args, **kwargs)

    if slow == "host":
        monkeypatch.setattr(owner, name, in_background(stuck, original))
    link = PacedLink(1e9, 1e9) if slow == "host" else PacedLink(300.0, 1e9)
    model, optimizer = make(mode, wait_timeout=0.3, link=link)
    try:
        with pytest.raises(DeadlineError, match=waited_for) as caught:
            within(20, take_steps, model, optimizer, range(8))
        assert "wait_timeout" in str(caught.value)
    finally:
        resume.set()
        within(20, optimizer.close)


def test_a_released_gradient_cannot_be_read():
    model, optimizer = make("release")
    with closing(optimizer):
        assert all(p.grad is None for p in model.parameters())
        model.loss(0).backward()
        for p in model.parameters():
            for read in (
                lambda g: g + 1,
                lambda g: g.norm(),
                lambda g: g.isnan().any(),
                torch.clone,
            ):
                with pytest.raises(GradientError, match="keep"):
                    read(p.grad)
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())


def test_torchs_clipping_fails_loudly_in_release_mode():
    model, optimizer = make("release")
    with closing(optimizer):
        model.loss(0).backward()
        with pytest.raises(GradientError, match="clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(GradientError):
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


def test_a_grad_scaler_fails_loudly_in_release_mode():
    model, optimizer = make("release")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with closing(optimizer):
        scaler.scale(model.loss(0)).backward()
        with pytest.raises(GradientError, match="GradScaler"):
            scaler.unscale_(optimizer)


def test_a_second_backward_fails_loudly_in_release_mode():
    model, optimizer = make("release")
    with closing(optimizer):
        model.loss(0).backward()
        with pytest.raises(GradientError, match="accumulation_steps"):
            model.loss(1).backward()


def test_training_under_eval_is_refused():
    model, optimizer = make()
    with closing(optimizer):
        take_steps(model, optimizer, range(3))
        optimizer.eval()
        model.loss(3).backward()
        with pytest.raises(RuntimeError, match="train"):
            optimizer.step()
        optimizer.train()
        optimizer.zero_grad()
        take_steps(model, optimizer, [3])


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": "release"},
        {"accumulation_steps": 2},
        {"accumulation_steps": 0, "offload_gradients": "release"},
        {"timeline_steps": -1},
        {"wait_timeout": 0.0},
        {"host_threads": -1},
    ],
    ids=str,
)
def test_wrong_arguments_are_named(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ZenFlowAdamW(TinyStack().parameters(), config=CONFIG, **arguments).close()


def test_a_closed_optimizer_says_so_and_can_be_closed_again():
    model, optimizer = make()
    take_steps(model, optimizer, range(3))
    optimizer.close()
    optimizer.close()
    with pytest.raises(RuntimeError, match="close"):
        within(20, take_steps, model, optimizer, range(3, 6))
