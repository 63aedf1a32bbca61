"""The part of the optimizer's surface about the model's weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from zenflow.host.signals import whole
from zenflow.surface.gradient_hooks import changed
from zenflow.surface.state.restart import take_weights
from zenflow.surface.with_engine import WithEngine

_log = logging.getLogger(__name__)


class TrueWeightsShown(WithEngine):
    """Shows the true weights on the device, and takes up weights that a user loads."""

    @whole
    def eval(self) -> None:
        """Put the true weights on the device: for evaluation, saving and export.

        While training, deferred weights on the device are the host's of some steps ago, moved on
        by momentum and by the gradients since. `eval` uploads the host's masters; `train` restores
        the weights of training, bit for bit.

        Raises:
            GradientError: Called between backward and step() in release mode, or the gradient norm
                of the last step is not finite.
            RuntimeError: Somebody else has changed the weights, which `eval` would undo.
        """
        self._check_no_gradients("eval()")
        self._take_late_weights()
        if not self._true_weights.are_shown:
            self._source.check_untouched()
        self.synchronize()
        if self._true_weights.are_shown:
            return  # or, swapped for them, an average that is evaluated
        self._check_own()
        self._true_weights.show()
        self._source.count_change()

    @whole
    def train(self) -> None:
        """Put the weights of training back; without `eval` nothing changes.

        Raises:
            RuntimeError: Somebody has changed the weights since `eval`.
        """
        self._check_process()
        if self._true_weights.are_shown:
            if self._source.are_changed and self._true_weights.are_there():
                self._source.accept_weights()  # swapped for an average, say, and back
            self._source.check_untouched()
            self._check_own()
            self._true_weights.restore()
            self._source.count_change()

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """Show the true weights in a `with` block: `eval` at its begin, `train` at its end.

        Inside another such block, or after `eval`, nothing changes.
        """
        were_shown = self._true_weights.are_shown
        self.eval()
        try:
            yield
        finally:
            if not were_shown and self._is_here:  # a fork that ends inside of it has no say
                self.train()

    @whole
    def adopt_weights(self) -> None:
        """Take the model's present weights for the true ones, after others were loaded into it.

        Moments and step counts stay. Gradients that the host has taken in are applied to the
        moments. Updates in flight are dropped.

        Raises:
            GradientError: Called between backward and step() in release mode.
        """
        self._check_no_gradients("adopt_weights()")
        self.synchronize()
        in_flight = self._running.in_flight
        for update in in_flight:
            in_flight.end(update)
        take_weights(self._running)
        self._true_weights.forget()
        self._source.accept_weights()

    @whole
    def _take_late_weights(self) -> None:
        """Look once at weights that were loaded before the first step, or behind a state.

        Such weights are the true ones where all state follows from them: before the first step,
        and after a state without masters.
        """
        if self._takes_late_weights:
            if self._source.are_changed or self._true_weights.first_foreign() is not None:
                self._source.check_kinds()
                take_weights(self._running)
                self._source.accept_weights()
        elif self._expects_weights and self._source.are_changed:
            self._accept_checkpoint()
        self._takes_late_weights = self._expects_weights = False

    def _accept_checkpoint(self) -> None:
        """Go on from the weights that were loaded behind the optimizer's state.

        Raises:
            RuntimeError: The weights are not of the state's checkpoint.
        """
        self._source.check_kinds()
        self._check_own()
        if not self._true_weights.are_of_training():
            _log.warning(
                "the model was loaded behind the optimizer's state, with its true weights: "
                "training goes on from these, but not bit for bit as it would have. Load the "
                "model first, then the optimizer"
            )
        self._source.accept_weights()

    def _check_own(self) -> None:
        """Refuse weights that were changed without torch's notice, through `.data.copy_` say.

        Raises:
            RuntimeError: Such a change was found.
        """
        if (foreign := self._true_weights.first_foreign()) is not None:
            raise changed(foreign.name)
