"""Interrupts: a signal raises where it may, and is not forgotten where it may not."""

import signal
import threading

import pytest

from autotune.interrupts import Interrupts


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
