"""Interrupts: a signal raises where it may, and is not forgotten where it may not."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autotune.interrupts import Interrupts, deaf_children

ROOT = Path(__file__).parents[2]


def click():
    signal.raise_signal(signal.SIGINT)


def test_a_signal_between_measurements_waits_for_the_next_check():
    with Interrupts(signal.SIGINT) as interrupts:
        interrupts.check()
        click()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            pytest.fail("nothing is measured once a signal has come")


def test_a_signal_in_a_measurement_ends_it_at_once():
    with Interrupts(signal.SIGINT) as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            click()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_a_second_ctrl_c_has_its_usual_effect():
    with Interrupts(signal.SIGINT):
        click()
        with pytest.raises(KeyboardInterrupt):
            click()


def test_signals_are_given_back():
    former = signal.getsignal(signal.SIGTERM)
    with Interrupts(signal.SIGINT, signal.SIGTERM):
        assert signal.getsignal(signal.SIGTERM) is not former
    assert signal.getsignal(signal.SIGTERM) is former
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_it_does_nothing():
    errors = []

    def use():
        try:
            with Interrupts(signal.SIGINT) as interrupts, interrupts.allowed():
                interrupts.check()
        except BaseException as error:  # noqa: BLE001  (a thread's error is lost otherwise)
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert not errors


CHILDREN = """
import multiprocessing, signal
from autotune.interrupts import start_deaf

def say(pipe):
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        ours, theirs = context.Pipe()
        child = context.Process(target=say, args=(theirs,))
        start_deaf(child)
        print(ours.recv(), end=" ")
        child.join()
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_children_are_deaf_from_the_first_one_on_and_their_parent_is_not(tmp_path):
    """In a process of its own, where multiprocessing has started nothing yet."""
    script = tmp_path / "children.py"
    script.write_text(CHILDREN, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.stdout.split() == ["True", "True", "set()"]


def test_what_comes_while_children_start_is_heard_afterwards():
    heard = []

    def start():
        with deaf_children():
            click()
            heard.append("not yet")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert heard == ["not yet"]


def test_a_signal_that_was_ignored_before_stays_ignored():
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Interrupts(signal.SIGTERM) as interrupts:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
            signal.raise_signal(signal.SIGTERM)
            interrupts.check()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, former)
