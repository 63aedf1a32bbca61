"""SIGTERM ends a study like Ctrl-C, where it was not ignored before."""

import signal

import pytest

from experiments.lab.interrupts import ended_like_ctrl_c, ignore_while_idle


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["heard", "ignored"])
def is_heard(request):
    former = signal.signal(signal.SIGTERM, request.param)
    yield request.param == signal.SIG_DFL
    signal.signal(signal.SIGTERM, former)


def test_a_study_hears_sigterm_unless_it_was_ignored_before(is_heard):
    if is_heard:
        with pytest.raises(KeyboardInterrupt), ended_like_ctrl_c():
            signal.raise_signal(signal.SIGTERM)
    else:
        with ended_like_ctrl_c():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_process_of_a_pool_hears_it_while_it_makes_a_cell(is_heard):
    ignore_while_idle()
    signal.raise_signal(signal.SIGTERM)
    if is_heard:
        with pytest.raises(KeyboardInterrupt), ended_like_ctrl_c():
            signal.raise_signal(signal.SIGTERM)
    else:
        with ended_like_ctrl_c():
            signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
