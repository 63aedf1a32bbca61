"""A forked child has the optimizer's memory and none of its threads: it ends, and says so."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.forks import FORKS, exit_codes, send_output
from tests.models import assert_equal, closing, weights_of
from tests.starts import environment
from tests.zenflow.runs import CONFIG, MODES, make, take_steps
from zenflow import ZenFlowAdamW
from zenflow.host.pool import HostPool

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="only POSIX forks"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

SECONDS = 30
BELONGS = "belongs to process .* and this is process .* close\\(\\) and make a new one here"


def ended(child):
    """Return a child's exit code; one that hangs is killed, and fails the test."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


def in_child(function):
    """Fork, call a function in the child, and return its exit code: 0 if it has returned."""
    child = os.fork()
    if child:
        return ended(child)
    code = 1
    try:
        function()
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


def run_apart(function, mode, path):
    send_output(errors=path)
    function(mode)


def check_apart(function, mode, path):
    """Call a function in a process where no backward has run.

    Once autograd has threads, as an earlier test's backward may have started them, torch refuses
    backward in each child.
    """
    process = FORKS.Process(target=run_apart, args=(function, mode, path))
    process.start()
    codes = exit_codes([process], 2 * SECONDS)
    assert codes == [0], path.read_text()


@contextmanager
def forking(mode):
    """Yield a model and an optimizer with three host threads, in the middle of a window.

    What happens between must not change what comes after.
    """
    undisturbed, other = make(mode, host_threads=3)
    with closing(other):
        take_steps(undisturbed, other, range(7))
    model, optimizer = make(mode, host_threads=3)
    with closing(optimizer):
        take_steps(model, optimizer, range(3))
        yield model, optimizer
        take_steps(model, optimizer, range(3, 7))
    assert_equal(weights_of(model), weights_of(undisturbed))


@pytest.fixture(params=sorted(MODES))
def forked(request):
    with forking(request.param) as made:
        yield made


def test_the_end_of_an_optimizer_is_of_no_effect_in_a_child(forked):
    optimizer = forked[1]
    for end in (
        optimizer.close,
        optimizer._finalizer,  # what the collector and the interpreter's exit call
        optimizer._engine.close,
        optimizer._engine.pool.close,
    ):
        assert in_child(end) == 0


def calls(model, optimizer):
    """Return everything that can be asked of an optimizer."""
    group = {"params": [nn.Parameter(torch.zeros(4))]}
    saved = optimizer.state_dict()
    yield from (
        optimizer.step,
        optimizer.zero_grad,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(saved),
        lambda: optimizer.prepare_to_load(saved["param_groups"]),
        optimizer.to_adamw_state_dict,
        optimizer.eval,
        optimizer.train,
        optimizer.true_weights().__enter__,
        optimizer.adopt_weights,
        optimizer.synchronize,
        optimizer.restart_accumulation,
        optimizer.span("forward").__enter__,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.add_param_group(group),
        lambda: optimizer.release_from(model),
        lambda: optimizer.change_link(None),
        lambda: optimizer.report,
        lambda: optimizer.timeline,
        lambda: optimizer.decision_log,
    )
    if optimizer.releases_gradients:
        yield model.loss(3).backward


def ask_in_child(mode):
    with forking(mode) as (model, optimizer):
        asked = list(calls(model, optimizer))

        def ask():
            for call in asked:
                with pytest.raises(RuntimeError, match=BELONGS) as caught:
                    call()
                assert "." not in str(caught.value), "one sentence"

        assert in_child(ask) == 0


def train_in_child(mode):
    with forking(mode) as (model, optimizer):

        def train():
            optimizer.close()
            model.zero_grad()
            own = ZenFlowAdamW(
                model.parameters(), config=CONFIG, max_grad_norm=0.5, host_threads=3
            )
            take_steps(model, own, range(5))
            assert own.report.step == 5
            own.close()

        assert in_child(train) == 0


@pytest.mark.parametrize("mode", sorted(MODES))
def test_every_call_in_a_child_says_whose_the_optimizer_is(mode, tmp_path):
    check_apart(ask_in_child, mode, tmp_path / "errors")


@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_child_trains_with_an_optimizer_of_its_own(mode, tmp_path):
    check_apart(train_in_child, mode, tmp_path / "errors")


def test_a_child_that_ends_among_true_weights_leaves_them_alone(forked):
    model, optimizer = forked
    block = optimizer.true_weights()
    with block, optimizer.span("evaluation"):
        shown = weights_of(model)
        assert in_child(lambda: block.__exit__(None, None, None)) == 0
        assert_equal(weights_of(model), shown)


def test_processes_of_multiprocessing_end(forked):
    optimizer = forked[1]
    context = multiprocessing.get_context("fork")
    process = context.Process(target=lambda held: held.close(), args=(optimizer,))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0


class Holding(torch.utils.data.Dataset):
    """A dataset that knows the optimizer, as one does whose difficulty grows with the steps."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            self.optimizer.close()
        return torch.tensor(index)


def test_workers_of_a_data_loader_end_whose_dataset_has_the_optimizer(forked):
    loader = torch.utils.data.DataLoader(
        Holding(forked[1]), num_workers=2, multiprocessing_context="fork", timeout=SECONDS
    )
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]


def test_a_pool_of_another_process_is_left_alone():
    pool = HostPool.open(3)
    if pool is None:
        pytest.skip("there is no C kernel")
    assert in_child(pool.close) == 0
    pool.close()


SCRIPT = """
import gc, os, sys
from tests.zenflow.runs import MODES, make, take_steps
gc.freeze()  # torch itself, which each interpreter would look through as it ends
runs = [make(mode, host_threads=3) for mode in MODES]
for run in runs:
    take_steps(*run, range(3))
codes = []
for ending in ("exit", "drop", "true weights", "raise", "os._exit"):
    shown = [optimizer.true_weights() for _, optimizer in runs]
    if ending == "true weights":
        for block in shown:
            block.__enter__()
    child = os.fork()
    if child == 0:
        if ending == "drop":
            runs = run = shown = block = None
            gc.collect()
        if ending == "raise":
            raise KeyError("the child's own")
        if ending == "os._exit":
            os._exit(0)
        sys.exit(0)  # leaves the block of true weights
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if ending == "true weights":
        for block in shown:
            block.__exit__(None, None, None)
for run in runs:
    take_steps(*run, range(3, 5))
print(codes, [optimizer.report.step for _, optimizer in runs])
"""


def test_an_interpreter_that_was_forked_ends():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment(),
    )
    assert done.stdout == "[0, 0, 0, 1, 0] [5, 5]\n", done.stderr
