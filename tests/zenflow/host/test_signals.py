"""Handlers of signals wait for the end of what must be whole, and are there again behind it."""

import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from zenflow.host import signals
from zenflow.host.signals import Uninterrupted, whole

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="signals are POSIX's")


@pytest.fixture
def heard():
    """What the handlers of two signals have heard."""
    heard = []

    def note(number, frame):
        heard.append((signal.Signals(number).name, frame.f_code.co_name))

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    former = [signal.signal(number, note) for number in numbers]
    yield heard
    for number, handler in zip(numbers, former, strict=True):
        signal.signal(number, handler)


def names(heard):
    return [name for name, _ in heard]


def test_handlers_run_behind_the_block_once_each_and_in_order(heard):
    with Uninterrupted():
        for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2):
            signal.raise_signal(number)
        assert heard == []
    assert names(heard) == ["SIGUSR2", "SIGUSR1"]


def test_handlers_are_in_their_places_again_whatever_ends_the_block(heard):
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    with pytest.raises(KeyError), Uninterrupted():
        raise KeyError
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before


def test_an_inner_block_holds_nothing_back_from_the_outer_one(heard):
    with Uninterrupted():
        with Uninterrupted():
            signal.raise_signal(signal.SIGUSR1)
        assert heard == []
    assert names(heard) == ["SIGUSR1"]


def test_what_a_signal_does_without_a_handler_of_pythons_it_does_at_once():
    former = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with Uninterrupted():
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_in_another_thread_nothing_changes(heard):
    inside = threading.Event()
    over = threading.Event()

    def work():
        with Uninterrupted():
            inside.set()
            over.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(20)
    signal.raise_signal(signal.SIGUSR1)
    assert names(heard) == ["SIGUSR1"]
    over.set()
    thread.join()


def test_a_handler_that_is_put_there_meanwhile_stays(heard):
    def other(number, frame):
        heard.append("other")

    with Uninterrupted():
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGUSR1) is other


def test_of_handlers_that_raise_all_run_and_the_errors_are_told_together(heard):
    def fail(number, frame):
        raise ZeroDivisionError

    signal.signal(signal.SIGUSR1, fail)

    @whole
    def broken():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        raise KeyError

    with pytest.raises(ZeroDivisionError) as caught:
        broken()
    assert isinstance(caught.value.__context__, KeyError)
    assert names(heard) == ["SIGUSR2"]


def test_a_signal_that_comes_again_a_second_later_is_not_held_up(heard, monkeypatch):
    now = [10.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Uninterrupted():
        signal.raise_signal(signal.SIGUSR1)
        now[0] += 0.9
        signal.raise_signal(signal.SIGUSR1)
        assert heard == []
        now[0] += 0.2
        signal.raise_signal(signal.SIGUSR1)
        assert names(heard) == ["SIGUSR1"]
    assert names(heard) == ["SIGUSR1"]


def test_a_signal_at_any_line_leaves_every_handler_in_its_place(heard):
    """Before, at and behind each of the lines that put handlers there and back."""

    class Stop(BaseException):
        pass

    def stop(number, frame):
        raise Stop

    signal.signal(signal.SIGUSR1, stop)
    others = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR2)]
    places = set()

    def called(frame, event, argument):
        return passed if frame.f_code.co_filename == signals.__file__ else None

    def passed(frame, event, argument):
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                places.add(frame.f_lineno)
                signal.raise_signal(signal.SIGUSR1)
        return passed

    for line in range(1, 400):
        left = line
        sys.settrace(called)
        try:
            with Uninterrupted():
                pass
        except Stop:
            left = 0
        finally:
            sys.settrace(None)
        assert signal.getsignal(signal.SIGUSR1) is stop
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGUSR2)] == others
        assert Uninterrupted._outermost is None
        if left > 0:
            break
    assert left > 0, "all lines had their turn"
    assert len(places) > 20


def test_a_whole_function_returns_what_it_returns(heard):
    @whole
    def add(first, *, second):
        signal.raise_signal(signal.SIGUSR1)
        assert heard == []
        return first + second

    assert add(1, second=2) == 3
    assert names(heard) == ["SIGUSR1"]
