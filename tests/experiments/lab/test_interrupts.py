"""SIGTERM ends a study like Ctrl-C, where it was not ignored before."""

import contextlib
import signal

import pytest

from experiments.lab.interrupts import ended_like_ctrl_c, ignore_while_idle


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["heard", "ignored"])
def is_heard(request):
    former = signal.signal(signal.SIGTERM, request.param)
    yield request.param == signal.SIG_DFL
    signal.signal(signal.SIGTERM, former)


def send_sigterm(is_heard):
    answer = pytest.raises(KeyboardInterrupt) if is_heard else contextlib.nullcontext()
    with answer, ended_like_ctrl_c():
        signal.raise_signal(signal.SIGTERM)


def test_a_study_hears_sigterm_unless_it_was_ignored_before(is_heard):
    former = signal.getsignal(signal.SIGTERM)
    send_sigterm(is_heard)
    assert signal.getsignal(signal.SIGTERM) == former


def test_a_process_of_a_pool_hears_it_while_it_makes_a_cell(is_heard):
    ignore_while_idle()
    signal.raise_signal(signal.SIGTERM)
    send_sigterm(is_heard)
    signal.raise_signal(signal.SIGTERM)
