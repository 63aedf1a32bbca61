"""Errors that zenflow raises; each message states the rule, the value and the remedy.

Mistakes in a call (a wrong type, an unknown name) are ``TypeError`` and ``ValueError``, as in
Python itself. The classes here are for errors that a program may want to tell apart.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike, fspath


class ZenFlowError(Exception):
    """Base of every error that zenflow defines: catch it to catch them all."""


class ConfigError(ZenFlowError, ValueError):
    """A configuration breaks a rule, has an unknown key, or asks for what can't be honoured.

    Raised while a configuration is made or read, never in the middle of training. One error
    lists every broken rule.
    """


class NoRoomError(ConfigError):
    """A machine has no room for what is asked: too little memory or disk, or no setting fits.

    Raised before work begins where sizes are known by then, and by commands where an allocation
    is refused later.
    """


class GradientError(ZenFlowError):
    """A gradient can't be used: not finite, of another shape, or already released.

    Raised by ``step()``, which takes no step then: true weights and moments are as before. In
    release mode the deferred weights that backward has moved become the true ones. Raised too by
    reading ``.grad`` of a parameter whose gradient has left for the host. On a GPU a norm that is
    not finite is noticed a step late: then by every call that would build on the weights or show
    them, until a checkpoint is loaded.
    """

    is_late: bool = False
    """Whether the error was noticed a step late, so that weights may hold the gradient."""


class NormError(GradientError):
    """The norm of a step's gradients is not finite."""

    step: int = 0
    """Number of the step that the gradients were for."""
    norm: float = float("nan")
    """L2 norm over all of the step's gradients: infinite, or no number."""


class WorkerError(ZenFlowError):
    """The host's update thread, or a copy it waited for, failed.

    Raised by the next call into the optimizer, with the original exception as ``__cause__``.
    The optimizer can't go on after it: start again from the last checkpoint.
    """


class DeadlineError(WorkerError):
    """A wait lasted longer than its deadline (``wait_timeout``); the message says for what."""


class CheckpointError(ZenFlowError):
    """A checkpoint can't be written or read, or belongs to another model or configuration.

    Raised by saving (a full disk, for one; the earlier checkpoint is then still whole) and by
    loading, before anything of the running state has been replaced.
    """


@contextmanager
def naming_file(
    path: str | PathLike[str], draft: str | PathLike[str] | None = None
) -> Iterator[None]:
    """Add the file's name to errors of the disk inside: a failed write or flush names none.

    Args:
        path: The file.
        draft: Temporary file that is written in its place; None where the file itself is.
    """
    hidden = None if draft is None else fspath(draft)
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, hidden):
            raise
        raise OSError(error.errno, error.strerror, fspath(path)) from error


def unknown_name(name: object, known: Iterable[str]) -> str:
    """Return "'naem' is unknown; did you mean 'name'?", or all known names if none is near."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
    return f"{name!r} is unknown; {hint}"


def raise_violations(subject: str, violations: Iterable[str]) -> None:
    """Raise one ``ConfigError`` that lists the violations, or return if there are none."""
    found = list(violations)
    if not found:
        return
    plural = "s" if len(found) > 1 else ""
    listed = "".join(f"\n- {violation}" for violation in found)
    raise ConfigError(f"{subject} breaks {len(found)} rule{plural}:{listed}")
