"""A completion is launched, then done: well, badly, or too late."""

import threading

import pytest

from zenflow import DeadlineError, WorkerError
from zenflow.lanes.completion import Completion, already_done, unique


def test_a_launched_copy_is_done_only_when_the_device_has_passed_it():
    calls = []
    copy = Completion("a copy")
    copy.when_done(lambda: calls.append("done"))
    copy.mark_launched("an event")
    copy.wait_launched(0.0)
    assert not copy.is_done
    assert calls == []
    with pytest.raises(DeadlineError, match=r"waited 0\.01 s for a copy"):
        copy.wait_done(0.01)
    watching = threading.Timer(0.02, copy.mark_done)
    watching.start()
    copy.wait_done(5.0)
    assert copy.has_succeeded
    assert calls == ["done"]
    watching.join()


def test_a_copy_that_fails_on_the_device_is_an_error_for_who_waits():
    copy = Completion("a copy")
    copy.mark_launched("an event")
    watching = threading.Timer(0.02, copy.fail, [ZeroDivisionError("a broken link")])
    watching.start()
    with pytest.raises(WorkerError, match=r"a copy failed.*a broken link"):
        copy.wait_done(5.0)
    watching.join()


def test_who_asks_after_the_end_is_told_at_once():
    calls = []
    already_done().when_done(lambda: calls.append(1))
    assert calls == [1]


def test_failed_work_is_done_and_has_not_succeeded():
    task, told = Completion("a task"), []
    task.when_done(lambda: told.append(task.error))
    error = ZeroDivisionError("a broken part")
    task.fail(error)
    assert task.is_done
    assert not task.has_succeeded
    assert told == [error]
    with pytest.raises(WorkerError, match=r"a task failed.*a broken part") as caught:
        task.wait_done(0.0)
    assert caught.value.__cause__ is error


def test_work_that_is_never_launched_is_an_error_that_names_it():
    with pytest.raises(DeadlineError, match=r"waited 0\.01 s for a copy"):
        Completion("a copy").wait_launched(0.01)


def test_each_completion_is_waited_for_once_and_in_order():
    first, second = already_done(), already_done()
    assert unique([second, None, first, second]) == [second, first]
