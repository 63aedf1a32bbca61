"""Base of all parts of the optimizer's surface: the engine, and whether it is sound."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.layout import SplitParam
from zenflow.errors import GradientError, WorkerError, ZenFlowError
from zenflow.host.signals import whole
from zenflow.surface.gradient_hooks import GradientSource
from zenflow.surface.true_weights import TrueWeights

if TYPE_CHECKING:
    from zenflow.step.engine import Engine


class WithEngine(torch.optim.Optimizer):
    """A torch optimizer that has an engine; `ZenFlowAdamW` makes it."""

    _engine: Engine | None
    """Engine of the optimizer; None while torch's part is being made."""
    _places: dict[Tensor, SplitParam | Resident]
    """Place of every trainable parameter, in registration order."""
    _source: GradientSource
    """Source of the gradients: hooks or `.grad`."""
    _true_weights: TrueWeights
    """Swap between the weights of training and the true ones."""
    _takes_late_weights: bool
    """Whether weights that a program loads into the model are taken for the true ones."""
    _expects_weights: bool
    """Whether a checkpoint's weights may yet be loaded, after the optimizer's state."""
    _failure: ZenFlowError | None
    """Error after which the optimizer can't go on; None while it is sound."""
    _finalizer: weakref.finalize[..., Any]
    """Finalizer that ends the engine when the optimizer is collected."""

    @property
    def _running(self) -> Engine:
        self._check_process()
        assert self._engine is not None
        return self._engine

    @property
    def _is_here(self) -> bool:
        """Whether this is the process that has the engine's threads, and no fork of it."""
        return self._engine is None or self._engine.process.is_here

    def _check_process(self) -> None:
        """Refuse a call in a fork of the process that has the engine's threads."""
        if self._engine is not None:
            self._engine.process.check()

    def _check_can_step(self) -> None:
        """Refuse a backward that no step can follow."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("the optimizer was closed: make a new one to go on")
        self._check_process()

    def _check_no_gradients(self, call: str) -> None:
        self._check_open()
        self._source.drop_missing()
        if self._running.has_gradients:
            raise GradientError(
                f"{call} between backward and step(): gradients have left for the host. Call "
                "step() or optimizer.zero_grad() first"
            )
        self._running.abandon_step()  # an empty one, which clip_grad_norm_() has begun

    def _check_sound(self) -> None:
        """Refuse to show or build on a state that a failure may have spoilt."""
        if self._failure is not None:
            raise type(self._failure)(
                f"the optimizer failed before and can't go on: {self._failure}"
            ) from self._failure

    def _fail(self, error: BaseException) -> None:
        """Remember the failure of a step that was broken off half done: no call may follow."""
        self._source.abandon()
        if not isinstance(error, ZenFlowError):
            failure = WorkerError(
                f"a step was broken off ({type(error).__name__}: {error}): resume from the last "
                "checkpoint"
            )
            failure.__cause__ = error
            error = failure
        self._failure = error

    @whole
    def synchronize(self) -> None:
        """Wait until the host has done all its work so far; `report` is then of the last step.

        Raises:
            GradientError: The gradient norm of the last step is not finite, which a GPU tells only
                now; every later call says so too, until a checkpoint is loaded.
            WorkerError: A copy or the host's update failed.
        """
        self._check_sound()
        self._running.drain()
        try:
            self._running.reporter.resolve()
        except GradientError as error:
            self._fail(error)
            raise
