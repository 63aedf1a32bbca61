"""A checkpoint of any step resumes the run bit for bit; eval() and train() are exact."""

import copy
import io
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from tests.models import TINY, GivenGradients, OddShapes, assert_equal, closing, weights_of
from tests.starts import environment
from tests.zenflow.decisions import decisions
from tests.zenflow.test_reference import feed, reference_of, true_weights
from zenflow import LoggedDecisions, ZenFlowAdamW, ZenFlowConfig

NUM_STEPS = 12
MAX_NORM = 0.3

# Windows of 3 or 4 steps; checkpoints are taken after every step of the first two.
RULES = {
    "exact": {},
    "exact, q = 1": {"queue_depth": 1},
    "published": {"update_rule": "published", "update_interval": 3},
    "published, no overlap": {"update_rule": "published", "overlap_step": False},
    "no overlap": {"overlap_step": False},
    "warm-up": {"full_warm_up_rounds": 3, "update_interval": 3},
    "selection at every boundary": {"select_interval": 1, "update_interval": 3},
    "S = 1": {"update_interval": 1},
    "only deferred": {"topk_ratio": 0.0},
    "eight bits": {"gradient_link": "e4m3", "queue_depth": 1},
    "factored": {"second_moment": "factored", "select_interval": 2},
    "only important": {"topk_ratio": 1.0},
}


SCHEDULES = {
    "S 2 then 4": [(3, {"update_interval": 2}), (6, {"update_interval": 4})],
    "S 1 then 3": [(2, {"update_interval": 1}), (7, {"update_interval": 3})],
    "windows and selection": [(2, {"select_interval": 2}), (5, {"update_interval": 3})],
    "k": [(2, {"topk_ratio": 0.6}), (5, {"topk_ratio": 0.1, "update_interval": 2})],
    "k at every step": [(t, {"topk_ratio": 0.2 + 0.1 * (t % 5)}) for t in range(1, 9)],
}
"""Decisions of a controller, as changes of knobs."""


def config_of(rule):
    common = {
        "topk_ratio": 0.3,
        "select_interval": 5,
        "block_elements": 30,
        "importance_decay": 0.5,
    }
    return ZenFlowConfig(**{**TINY, **common, **RULES[rule]})


class Run:
    """A model, its optimizer and a schedule, which can be saved and loaded."""

    def __init__(
        self, config, mode, *, log=(), seed=0, dtype=torch.float32, device="cpu", model=OddShapes
    ):
        self.model, self.mode = model(dtype=dtype, seed=seed).to(device), mode
        settings = (
            {"max_grad_norm": MAX_NORM, "offload_gradients": mode} if mode == "release" else {}
        )
        controller = LoggedDecisions(decisions(config, log)) if log else None
        self.optimizer = ZenFlowAdamW(
            self.model.parameters(), lr=1e-2, config=config, controller=controller, **settings
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)

    def step(self, step):
        self.model.loss(step, idle=True).backward()
        if self.mode == "keep":
            self.optimizer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()
        self.schedule.step()
        return weights_of(self.model)

    def save(self):
        """Return what a user would save, as it is now."""
        parts = (self.model, self.optimizer, self.schedule)
        return copy.deepcopy([part.state_dict() for part in parts])

    def load(self, saved):
        for part, state in zip((self.model, self.optimizer, self.schedule), saved, strict=True):
            part.load_state_dict(copy.deepcopy(state))

    def close(self):
        self.optimizer.close()


def uninterrupted(num_steps=NUM_STEPS, *, saves=None, **settings):
    """Train without a break; return the weights after every step, and checkpoints by step.

    They are taken before the steps in `saves`, or before all.
    """
    weights, saved = [], {}
    with closing(Run(**settings)) as run:
        for step in range(num_steps):
            if saves is None or step in saves:
                saved[step] = run.save()
            weights.append(run.step(step))
    return weights, saved


def check_resume(settings, steps=range(9)):
    """Resume from a checkpoint taken before each of these steps, in another model."""
    weights, saved = uninterrupted(saves=steps, **settings)
    for first in steps:
        with closing(Run(**settings, seed=7)) as run:
            run.load(saved[first])
            for step in range(first, NUM_STEPS):
                what = f"resumed before step {step} of 0.., at step {first}"
                assert_equal(run.step(step), weights[step], what)


def each_rule(rules, modes=("keep", "release")):
    """Return cases: the default in both modes, and the other rules in turn; the rest is slow."""
    return [
        pytest.param(
            rule, mode, marks=() if rule == "exact" or place % 2 == index else pytest.mark.slow
        )
        for place, rule in enumerate(rules)
        for index, mode in enumerate(modes)
    ]


@pytest.mark.parametrize(("rule", "mode"), each_rule(RULES))
def test_a_checkpoint_of_any_step_resumes_bit_for_bit(rule, mode):
    # Both modes have the same state: each step of the default is tried in one of them.
    steps = (0, 2, 3, 5, 6, 8) if mode == "release" else (1, 4, 7)
    if rule != "exact":
        steps = steps[1::3]
    check_resume({"config": config_of(rule), "mode": mode}, steps)


@pytest.mark.parametrize("rule", ["exact", "published"])
def test_a_bfloat16_run_resumes_bit_for_bit(rule):
    settings = {"config": config_of(rule), "mode": "release", "dtype": torch.bfloat16}
    check_resume(settings, range(rule == "exact", 9, 2))  # in the other rule the steps between


@pytest.mark.parametrize(
    "rule", ["exact", "published", pytest.param("warm-up", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("log", SCHEDULES.values(), ids=SCHEDULES)
def test_a_run_whose_knobs_changed_resumes_bit_for_bit(rule, log):
    steps = (1, 4, 5, 8) if rule == "exact" else (2, 6)
    check_resume({"config": config_of(rule), "mode": "release", "log": log}, steps)


@pytest.mark.parametrize("rule", ["exact", "published", "warm-up"])
def test_saving_changes_nothing(rule):
    settings = {"config": config_of(rule), "mode": "release"}
    with_saves, _ = uninterrupted(**settings)
    without, _ = uninterrupted(saves=(), **settings)
    assert_equal(with_saves[-1], without[-1])


@pytest.mark.parametrize("rule", ["exact", "published", "warm-up"])
def test_a_checkpoint_taken_under_eval_resumes_bit_for_bit(rule):
    """The model checkpoint then has the true weights: the optimizer's must have the others."""
    settings = {"config": config_of(rule), "mode": "keep"}
    weights, _ = uninterrupted(saves=(), **settings)
    for last in (2, 4, 5, 7):
        with closing(Run(**settings)) as run:
            for step in range(last):
                run.step(step)
            run.optimizer.eval()
            true, saved = weights_of(run.model), run.save()
        with closing(Run(**settings, seed=7)) as run:
            run.load(saved)
            run.optimizer.train()
            for step in range(last, NUM_STEPS):
                assert_equal(run.step(step), weights[step], f"saved at {last}, step {step}")
        with closing(Run(**settings, seed=7)) as run:
            run.load(saved)
            run.optimizer.eval()
            assert_equal(weights_of(run.model), true)


def test_a_running_optimizer_can_go_back_to_a_checkpoint():
    settings = {"config": config_of("exact"), "mode": "release"}
    weights, saved = uninterrupted(saves=(3, 6), **settings)
    with closing(Run(**settings)) as run:
        for first in (6, 3):
            for step in range(40, 45):  # goes astray, with an update in flight
                run.step(step)
            run.load(saved[first])
            for step in range(first, first + 5):
                assert_equal(run.step(step), weights[step], f"back to {first}, step {step}")


def test_loading_again_and_again_takes_no_more_memory_for_uploads():
    settings = {"config": config_of("exact"), "mode": "release"}
    _, saved = uninterrupted(7, saves=(6,), **settings)
    with closing(Run(**settings)) as run:
        taken = []
        for _ in range(4):
            run.load(saved[6])
            taken.append(sum(b.memory.num_bytes for b in run.optimizer._engine.uploads._buffers))
    assert taken[0] > 0, "nothing was in flight"
    assert set(taken) == {taken[0]}


def test_a_resumed_runs_reports_say_how_late_its_updates_are():
    """Of those that were in flight when it was saved, too."""
    settings = {"config": config_of("exact"), "mode": "release"}
    _, saved = uninterrupted(8, saves=(4, 5, 6, 7), **settings)
    for first in (4, 5, 6, 7):
        ages = []
        for start in (0, first):
            with closing(Run(**settings)) as run:
                if start:
                    run.load(saved[start])
                for step in range(start, first + 1):
                    run.step(step)
                run.optimizer.synchronize()
                ages.append(run.optimizer.report.staleness)
        assert ages[0] == ages[1] > 1, f"saved at {first}"


@pytest.mark.parametrize("rule", ["exact", "published"])
def test_the_order_of_loading_model_and_optimizer_does_not_matter(rule):
    settings = {"config": config_of(rule), "mode": "keep"}
    weights, saved = uninterrupted(saves=(5,), **settings)
    with closing(Run(**settings, seed=7)) as run:
        run.schedule.load_state_dict(saved[5][2])
        run.optimizer.load_state_dict(saved[5][1])
        run.model.load_state_dict(saved[5][0])
        for step in range(5, NUM_STEPS):
            assert_equal(run.step(step), weights[step], f"step {step}")


def test_a_step_that_was_taken_before_is_taken_anew_after_loading():
    """What was got ready for it belongs to the weights of before."""
    settings = {"config": config_of("exact"), "mode": "keep"}
    weights, saved = uninterrupted(saves=(2, 5, 6), **settings)
    with closing(Run(**settings, seed=7)) as run:
        for first in (2, 5, 6):
            while run.optimizer._engine.step <= first:  # other steps of the same numbers
                run.step(50 + run.optimizer._engine.step)
            run.load(saved[first])
            assert_equal(run.step(first), weights[first], f"step {first}")


def test_a_checkpoint_written_by_torch_save_resumes_bit_for_bit():
    settings = {"config": config_of("exact"), "mode": "release"}
    weights, _ = uninterrupted(saves=(), **settings)
    file = io.BytesIO()
    with closing(Run(**settings)) as run:
        for step in range(6):
            run.step(step)
        torch.save(run.save(), file)
    file.seek(0)
    with closing(Run(**settings, seed=7)) as run:
        run.load(torch.load(file, weights_only=True))
        for step in range(6, NUM_STEPS):
            assert_equal(run.step(step), weights[step], f"step {step}")


EVALUATED = [(torch.float32, "keep"), (torch.float32, "release"), (torch.bfloat16, "release")]


@pytest.mark.parametrize(
    ("rule", "dtype", "mode"),
    [
        pytest.param(rule, *how, marks=() if place % 3 in (0, index) else pytest.mark.slow)
        for place, rule in enumerate(RULES)
        for index, how in enumerate(EVALUATED)
    ],
)
def test_eval_shows_the_true_weights_and_train_goes_back_bit_for_bit(rule, mode, dtype):
    model = GivenGradients([(6, 9), (5,), (3, 4, 2)], dtype)
    groups = [{"params": list(model.parameters()), **STEADY}]
    settings = {"offload_gradients": mode}
    reference = reference_of(groups, config_of(rule))
    with closing(ZenFlowAdamW(groups, config=config_of(rule), **settings)) as optimizer:
        for step in range(1, 10):
            grads = model.draw_gradients(step)
            feed(model, optimizer, grads, mode)
            reference.step(grads)
            seen = weights_of(model)
            optimizer.eval()
            for ours, true in zip(weights_of(model), true_weights(reference), strict=True):
                rtol = 2e-6 if dtype == torch.float32 else 2**-7
                torch.testing.assert_close(ours, true, rtol=rtol, atol=2e-6)
            optimizer.eval()  # again: nothing happens
            optimizer.train()
            assert_equal(weights_of(model), seen, f"step {step}")
            optimizer.train()
            assert_equal(weights_of(model), seen, f"step {step}")


STEADY = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

SCRIPT = """
import sys, torch
from zenflow import ZenFlowAdamW, ZenFlowConfig
mode, ending = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
settings = {"max_grad_norm": 1.0, "offload_gradients": mode} if mode == "release" else {}
optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(), host_threads=2, **settings)
step = 0
while step < 6 or ending == "kill":
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    step += 1
    if step == 6:
        print("ready", flush=True)
if ending == "raise":
    raise KeyError("the user's own")
if ending == "global":
    model.optimizer = optimizer  # lives until the interpreter is torn down
"""


def start(mode, ending):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, mode, ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(),
    )


def members_of_session(session):
    """Return the processes that still belong to a session."""
    members = []
    for process in psutil.process_iter():
        try:
            members += [process.pid] if os.getsid(process.pid) == session else []
        except (ProcessLookupError, PermissionError):
            continue
    return members


@pytest.mark.skipif(not hasattr(os, "getsid"), reason="sessions are POSIX's")
def test_a_killed_process_leaves_no_process_and_no_shared_memory():
    with start("release", "kill") as process:
        try:
            assert process.stdout.readline() == "ready\n"
            family = psutil.Process(process.pid)
            assert family.children(recursive=True) == []
            shared = [m.path for m in family.memory_maps() if m.path.startswith("/dev/shm/")]
            assert shared == []
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert members_of_session(process.pid) == []


@pytest.mark.parametrize(
    ("mode", "ending"),
    [("release", "raise"), pytest.param("keep", "global", marks=pytest.mark.slow)],
)
def test_an_interpreter_exits_at_once_although_nobody_called_close(mode, ending):
    with start(mode, ending) as process:
        started = time.perf_counter()
        output, errors = process.communicate(timeout=60)
        seconds = time.perf_counter() - started
    assert output == "ready\n"
    if ending == "raise":
        assert errors.rstrip().endswith('KeyError: "the user\'s own"')
        assert process.returncode == 1
    else:
        assert process.returncode == 0
        assert "Traceback" not in errors
    assert seconds < 30
