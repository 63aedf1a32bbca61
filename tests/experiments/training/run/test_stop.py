"""Signals end a run with everything saved, at the first try."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from experiments.training.parts.files.checkpoint import latest_checkpoint
from experiments.training.parts.files.step_log import read_steps
from experiments.training.run import launch
from experiments.training.run import stop as interrupt
from experiments.training.run.stop import StopRequest
from tests.experiments.runs import FAST, end, ended, write_text
from tests.starts import environment


@pytest.fixture
def clock(monkeypatch):
    """The time, in seconds, that signals come at."""
    now = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    return now


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _as_in_a_terminal():
    """No signal is ignored, even where the tests were begun with nohup."""
    former = [signal.signal(number, signal.SIG_DFL) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(SIGNALS, former, strict=True):
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "code"),
    [*zip(SIGNALS, (130, 143, 129, 128 + signal.SIGUSR1, 128 + signal.SIGUSR2), strict=True)],
)
def test_the_first_signal_is_answered_at_once(capfd, clock, number, code):
    with StopRequest("Stopping.") as stop:
        send(number)
        assert capfd.readouterr().err == "\nStopping.\n"
        assert stop.requested
        assert stop.exit_code == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once_unless_it_comes_with_the_first(clock, number):
    with StopRequest() as stop:
        send(number)
        clock[0] += 0.3
        send(number)
        assert stop.requested
        clock[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            send(number)


NOBODY_READS = """
import sys
from experiments.output.progress import Reporter
reporter = Reporter()
sys.stdin.read()
reporter.say("lost")
sys.stdout.write("by the bar's thread, which is not told")
sys.exit(129)
"""


@pytest.mark.parametrize("make", [os.pipe, pty.openpty], ids=["pipe", "terminal"])
def test_what_nobody_reads_any_more_does_not_change_the_exit_code(make):
    """Python flushes what is left as it ends, and makes a failure of that its own code, 120."""
    ours, theirs = make()
    process = subprocess.Popen(
        [sys.executable, "-c", NOBODY_READS], stdin=subprocess.PIPE, stdout=theirs
    )
    os.close(theirs)
    os.close(ours)
    process.stdin.close()
    assert process.wait(60) == 129


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_the_end_may_be_announced_as_often_as_anybody_likes(clock, number):
    with StopRequest() as stop:
        for _ in range(3):
            send(number)
            clock[0] += 60
        assert stop.exit_code == 128 + number


def test_a_schedulers_sigterm_does_not_cut_off_the_save_that_it_announced(clock):
    with StopRequest() as stop:
        send(signal.SIGUSR1)
        clock[0] += 60
        send(signal.SIGTERM)
        assert stop.exit_code == 128 + signal.SIGUSR1
        clock[0] += 60
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_was_ignored_before_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    with StopRequest() as stop:
        send(number)
        assert not stop.requested
    assert signal.getsignal(number) == signal.SIG_IGN


def test_handlers_are_given_back():
    former = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest():
        assert all(signal.getsignal(number) not in former for number in SIGNALS)
    assert [signal.getsignal(number) for number in SIGNALS] == former


def test_quitting_at_once_says_what_there_is_to_go_on_from(tmp_path, monkeypatch):
    real = launch.run

    def quit_at_once(*args, stop, **kwargs):
        real(*args, stop=stop, **kwargs)
        stop.signal = signal.SIGINT
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run", quit_at_once)
    text = write_text(tmp_path / "text.txt")
    said = ended(130, "--out", tmp_path / "run", *FAST, "--data", text, "--steps", "2")
    assert "Ended at once. The last save is" in said
    assert f"step-00000002. Go on with: zenflow train --resume {tmp_path / 'run'}" in said


IN_A_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from experiments.cli import main
main()
"""


def test_a_run_whose_terminal_closes_is_saved(tmp_path, request):
    """Its output goes nowhere from then on, which is no reason to fail."""
    out, text = tmp_path / "run", write_text(tmp_path / "text.txt")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", IN_A_TERMINAL, "train", "--out", str(out), *FAST]
    process = subprocess.Popen(
        [*command, "--data", str(text), "--steps", "1000000"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    request.addfinalizer(lambda: end(process))  # it would train for hours
    os.close(theirs)
    deadline = time.monotonic() + 120
    while not read_steps(out / "steps.jsonl"):
        assert time.monotonic() < deadline
        assert process.poll() is None
        os.set_blocking(ours, False)
        try:
            os.read(ours, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
    os.close(ours)
    assert process.wait(60) == 129
    done = read_steps(out / "steps.jsonl")[-1]["step"]
    left = latest_checkpoint(out / "checkpoint")
    assert left is not None
    assert int(left.name[5:]) == done
