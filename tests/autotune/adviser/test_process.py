"""Advice from another process: the same answers, never in the way, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from autotune.adviser.adviser import Adviser
from autotune.adviser.process import BackgroundAdviser, Ready
from tests.autotune.worlds import (
    FAIL,
    PRINT,
    SMALL,
    StandIn,
    Truth,
    a_question,
    twin,
)
from zenflow.errors import ConfigError, WorkerError

ROOT = Path(__file__).parents[3]
PATIENCE = 60.0
"""Seconds; a busy machine takes long to load what advice needs."""


def wait_for(condition, what, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"waited {seconds:g} s for {what}")


def next_answer(handle):
    return wait_for(handle.poll, "an answer")


@pytest.fixture
def background():
    """Start advisers, wait until they are ready, and close them at the end."""
    started = []

    def start(adviser, *, wait=True):
        handle = BackgroundAdviser(adviser)
        started.append(handle)
        if wait:
            assert isinstance(next_answer(handle), Ready)
        return handle

    yield start
    for handle in started:
        handle.close()


def process_of(handle):
    return handle._process


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_its_answers_are_those_that_one_would_get_here():
    asked = a_question([Truth(h2d=2.0).stretch(0, Truth().best(SMALL.grid()))], seed=2)
    handle = BackgroundAdviser(Adviser(twin(), SMALL))
    try:
        ready = next_answer(handle)
        assert isinstance(ready, Ready)
        assert ready.seconds > 0
        assert ready.seconds_per_forecast > 0
        handle.ask(asked)
        mine, its = Adviser(twin(), SMALL).advise(asked), next_answer(handle)
        # What is known from before is not simulated again: the process has begun with one.
        uncounted = {"seconds": 0.0, "num_simulated": 0}
        assert replace(mine, **uncounted) == replace(its, **uncounted)
    finally:
        handle.close()


def test_nothing_waits_while_it_thinks_and_closing_does_not_either(background):
    before = set(threading.enumerate())
    handle = background(StandIn(seconds=120.0))
    pid = process_of(handle).pid
    started = time.process_time()
    handle.ask(a_question())
    for _ in range(1000):
        assert handle.poll() is None
    assert time.process_time() - started < 1.0
    assert is_alive(pid)
    handle.close()
    assert not is_alive(pid)
    assert set(threading.enumerate()) <= before
    handle.close()


def test_while_it_starts_there_is_no_answer_and_it_can_be_closed(background):
    handle = background(StandIn(), wait=False)
    assert handle.poll() is None
    pid = process_of(handle).pid
    handle.close()
    assert not is_alive(pid)


def test_what_is_printed_there_is_no_part_of_an_answer(background, capfd):
    handle = background(StandIn())
    for seed in (PRINT, 7):
        handle.ask(a_question(seed=seed))
        assert next_answer(handle).num_simulated == seed
    out, err = capfd.readouterr()
    assert out == ""
    for text in ("printed", "written", "echoed"):
        assert text in err


def test_advice_that_fails_is_an_error_here_and_the_next_question_is_answered(background):
    for error, kind in [
        (ConfigError("no setting"), ConfigError),
        (ZeroDivisionError("division"), WorkerError),
    ]:
        handle = background(StandIn(error=error))
        handle.ask(a_question(seed=FAIL))
        with pytest.raises(kind, match=str(error)):
            next_answer(handle)
        handle.ask(a_question(seed=5))
        assert next_answer(handle).num_simulated == 5


def test_a_process_that_was_killed_is_an_error_at_the_next_poll(background):
    handle = background(StandIn(seconds=120.0))
    handle.ask(a_question())
    process_of(handle).kill()
    process_of(handle).wait()
    with pytest.raises(WorkerError, match="has ended"):
        next_answer(handle)
    with pytest.raises(WorkerError, match="has ended"):
        handle.ask(a_question())
    handle.close()


def test_it_gives_way_to_everything_else(background):
    handle = background(StandIn())
    assert psutil.Process(process_of(handle).pid).nice() == 19


START = """\
import time
from autotune.adviser.process import BackgroundAdviser
from tests.autotune.worlds import StandIn, a_question

def answer():
    found = None
    while found is None:
        found = handle.poll()
        time.sleep(0.01)
    return found

handle = BackgroundAdviser(StandIn(seconds={seconds}))
print(handle._process.pid, flush=True)
"""


@pytest.fixture
def script(tmp_path):
    """Run a script without a guard for __main__, in a group of its own; return it and a pid."""
    running = []

    def run(body, seconds=0.0):
        path = tmp_path / "train.py"
        path.write_text(START.format(seconds=seconds) + body, encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        pid = int(process.stdout.readline())
        running.append((process, pid))
        return process, pid

    yield run
    for process, pid in running:
        process.kill()
        if is_alive(pid):  # it holds the script's output, which ends with it
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE)


def test_a_script_needs_no_guard_and_may_forget_to_close(script):
    body = "answer()\nhandle.ask(a_question(seed=4))\nprint(answer().num_simulated, flush=True)\n"
    process, pid = script(body)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out.split(), err) == (0, ["4"], "")
    wait_for(lambda: not is_alive(pid), "the process to end", seconds=30.0)


INTERRUPTED = """\
{before}
try:
    print("here", flush=True)
    for _ in range(1200):  # a signal that comes just before a sleep does not end that sleep
        time.sleep(0.1)
except KeyboardInterrupt:
    print("saving", flush=True)
{after}
handle.ask(a_question(seed=6))
print(answer().num_simulated, flush=True)
handle.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "starting"])
def test_ctrl_c_is_the_trainings_alone(script, is_ready):
    parts = (
        {"before": "answer()", "after": ""} if is_ready else {"before": "", "after": "answer()"}
    )
    process, pid = script(INTERRUPTED.format(**parts))
    assert process.stdout.readline() == "here\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out.split(), err) == (0, ["saving", "6", "closed"], "")
    assert not is_alive(pid)


@pytest.mark.parametrize("is_thinking", [True, False], ids=["thinking", "idle"])
def test_a_killed_run_leaves_no_process_behind(script, is_thinking):
    ask = "handle.ask(a_question())\n" if is_thinking else ""
    process, pid = script(f"answer()\n{ask}print('here', flush=True)\ntime.sleep(120)\n", 120.0)
    assert process.stdout.readline() == "here\n"
    assert is_alive(pid)
    process.kill()
    wait_for(lambda: not is_alive(pid), "the process to end", seconds=10.0)
