"""A process of its own for advice, so that searching never delays a step.

A thread would hold the interpreter's lock for milliseconds at a time, just when the training
thread has kernels to launch. The process has the lowest priority. It ends when its input does,
however the run ended, and needs no guard in the user's script.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import IO, Any

from autotune.adviser.adviser import Adviser
from autotune.adviser.messages import Advice, Question
from autotune.interrupts import deaf_children
from zenflow.errors import ConfigError, WorkerError

_START = """\
import sys
sys.path[:] = {path!r}
from autotune.adviser.process import serve
serve()
"""


@dataclass(frozen=True, slots=True)
class Ready:
    """Message of a process that has loaded and can be asked."""

    seconds: float
    """CPU seconds of loading."""
    seconds_per_forecast: float
    """CPU seconds of one simulation."""


class AbstractAdviserHandle(ABC):
    """Connection to an adviser, for one question at a time."""

    @abstractmethod
    def ask(self, question: Question) -> None:
        """Hand a question over; no other one may be open."""

    @abstractmethod
    def poll(self) -> Ready | Advice | None:
        """Return a new message, or None; never waits.

        Raises:
            ConfigError: No setting keeps the constraints.
            WorkerError: Advice failed, or its process ended.
        """

    @abstractmethod
    def close(self) -> None:
        """End the adviser."""


class BackgroundAdviser(AbstractAdviserHandle):
    """An adviser in a child process."""

    def __init__(self, adviser: Adviser) -> None:
        """Start the process; it loads what it needs while training begins."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with deaf_children():  # Ctrl-C is the training's, which saves
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=list(sys.path))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="advice", daemon=True)
        self._reader.start()
        self._send(adviser)

    def ask(self, question: Question) -> None:
        """Send a question off."""
        self._send(question)

    def poll(self) -> Ready | Advice | None:
        """Return a new message, or None."""
        try:
            answer = self._answers.get_nowait()
        except queue.Empty:
            return None
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Ready | Advice)
        return answer

    def close(self) -> None:
        """End the process; an open question is dropped."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended by itself, with something unsent
                self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=5.0)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(f"the adviser's process has ended: {error}") from error

    def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                self._answers.put(pickle.load(self._process.stdout))
            except (EOFError, OSError, ValueError, pickle.UnpicklingError):
                self._answers.put(WorkerError("the adviser's process has ended"))
                return


def serve() -> None:
    """Answer questions from standard input until it ends: the child's main function."""
    os.nice(19)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever prints must not get between answers, nor must its children
        adviser: Adviser = pickle.load(sys.stdin.buffer)
        questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(questions,), daemon=True).start()
        _reply(answers, Ready(time.process_time(), adviser.seconds_per_forecast()))
        while True:
            _reply(answers, _answer(adviser, questions.get()))


def _listen(questions: queue.SimpleQueue[Question]) -> None:
    """Pass questions on; end the process with its input, also in the middle of a search."""
    while True:
        try:
            questions.put(pickle.load(sys.stdin.buffer))
        except (EOFError, pickle.UnpicklingError):  # the run has ended, or was killed in a line
            os._exit(0)


def _answer(adviser: Adviser, question: Question) -> Advice | Exception:
    try:
        return adviser.advise(question)
    except ConfigError as error:
        return error
    except Exception as error:  # noqa: BLE001 - it is raised where the question was asked
        return WorkerError(f"advice failed: {error!r}")


def _reply(answers: IO[bytes], message: object) -> None:
    pickle.dump(message, answers)
    answers.flush()
