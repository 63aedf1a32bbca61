"""Life of an optimizer: the state that it is in, and the calls that each state allows."""

from __future__ import annotations

from enum import Enum

from zenflow.errors import WorkerError, ZenFlowError
from zenflow.host.process import OwnProcess


class Life(Enum):
    """State of an optimizer.

    An optimizer is NEW until its first step or evaluation, and TRAINING from then on. Between
    `eval` and `train` the state is SHOWN. A loaded checkpoint makes an optimizer NEW or LOADED
    again, and is the only end of BROKEN. CLOSED is the last state.
    """

    NEW = "new"
    """State in which the weights alone decide: those that a program loads are the true ones."""
    LOADED = "loaded"
    """State behind a loaded checkpoint, whose model weights may still be loaded."""
    TRAINING = "training"
    """State with the weights of training on the device, which nobody else may change."""
    SHOWN = "shown"
    """State with the true weights on the device, for evaluation, saving or export."""
    BROKEN = "broken"
    """State after a step that was broken off, or has taken values that are not finite."""
    CLOSED = "closed"
    """State after the end of all threads."""

    __hash__ = object.__hash__  # hooks ask for each gradient, and `Enum` hashes in Python


_SOUND = frozenset({Life.NEW, Life.LOADED, Life.TRAINING, Life.SHOWN})
_OPEN = _SOUND | {Life.BROKEN}

ALLOWED = {
    "backward": _SOUND - {Life.SHOWN} | {Life.CLOSED},  # whose hooks are gone
    "step()": _SOUND - {Life.SHOWN},
    "eval()": _SOUND,
    "adopt_weights()": _SOUND,
    "state_dict()": _SOUND,
    "to_adamw_state_dict()": _SOUND,
    "prepare_to_load()": _SOUND,
    "synchronize()": _SOUND | {Life.CLOSED},
    "load_state_dict()": _OPEN,
    "add_param_group()": _OPEN,
    "restart_accumulation()": _OPEN,
    "release_from()": _OPEN,
}
"""States that allow a call. Calls that are not listed, such as `zero_grad()`, `train()` and
`close()`, are allowed in every state."""


class Lifetime:
    """Present state of one optimizer.

    Attributes:
        now: The state.
    """

    def __init__(self, process: OwnProcess) -> None:
        """Begin as NEW, in the process that has the engine's threads."""
        self.now = Life.NEW
        self._process = process
        self._failure: ZenFlowError | None = None

    def check_process(self) -> None:
        """Refuse a call in a fork of the process that has the engine's threads.

        Raises:
            RuntimeError: This is another process.
        """
        self._process.check()

    def check(self, call: str) -> None:
        """Refuse a call that the present state does not allow, or a call in a fork.

        Raises:
            RuntimeError: The optimizer is closed, shows the true weights, or is another process's.
            ZenFlowError: The optimizer failed before: the former error's type.
        """
        self._process.check()
        if self.now in ALLOWED[call]:
            return
        if self.now is Life.CLOSED:
            raise RuntimeError("the optimizer was closed: make a new one to go on")
        if self.now is Life.SHOWN:
            raise RuntimeError(
                "the true weights are on the device since optimizer.eval(): call "
                "optimizer.train() before the next backward"
            )
        assert self._failure is not None
        raise type(self._failure)(
            f"the optimizer failed before and can't go on: {self._failure}"
        ) from self._failure

    def fail(self, error: BaseException) -> None:
        """Become BROKEN by an error, which every later use names."""
        if not isinstance(error, ZenFlowError):
            failure = WorkerError(
                f"a step was broken off ({type(error).__name__}: {error}): resume from the last "
                "checkpoint"
            )
            failure.__cause__ = error
            error = failure
        self._failure = error
        self.now = Life.BROKEN
