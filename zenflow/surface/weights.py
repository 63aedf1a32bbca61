"""Weights on the device: those of training, the true ones, and those that a program loads."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zenflow.columns.device_rows import NamedParam
from zenflow.columns.layout import SplitParam
from zenflow.device.base import Arrival
from zenflow.device.kernels.base import HostColumns
from zenflow.rule.sizes import pieces
from zenflow.surface.gradient_hooks import GradientSource, changed
from zenflow.surface.life import Life, Lifetime
from zenflow.surface.state.restart import take_weights

if TYPE_CHECKING:
    from zenflow.step.engine import Engine

_log = logging.getLogger(__name__)


class Weights:
    """Swaps deferred columns on the device between the weights of training and the masters.

    Important columns and residents are always true.
    """

    def __init__(self, engine: Engine, source: GradientSource, life: Lifetime) -> None:
        """Start with the weights of training on the device."""
        self._engine = engine
        self._source = source
        self._life = life

    # ---- true weights -----------------------------------------------------------------------

    def stash(self) -> None:
        """Copy the weights of training to their memory, if they are not there already."""
        if self._life.now is Life.SHOWN:
            return
        engine = self._engine
        engine.drain()
        device = engine.device
        for split in engine.layout.splits:
            with split.held():
                own = split.part.of(split.weight())
                device.pack([(own, *job) for job in engine.training.pieces_of(split)],
                            device.mark())  # fmt: skip
                if split.page is not None:  # the page may leave then
                    device.synchronize()
        device.synchronize()

    @torch.no_grad()
    def show(self) -> None:
        """Bring the masters to the device, all host updates so far included.

        Raises:
            RuntimeError: Somebody else has changed the weights.
        """
        self._check_own()
        self.stash()
        for split in self._engine.layout.splits:
            self._engine.show_true(split)
        if self._engine.stream is not None:
            self._engine.stream.rest()
        self._life.now = Life.SHOWN
        self._source.count_change()

    def hide(self) -> None:
        """Put the weights of training back in the place of the true ones.

        Raises:
            RuntimeError: Somebody has changed the true weights meanwhile.
        """
        self.go_on()
        if self._source.are_changed and self.are_there():
            self._source.accept_weights()  # swapped for an average, say, and back
        self._source.check_untouched()
        self._check_own()
        self.restore()
        self._life.now = Life.TRAINING
        self._source.count_change()

    @torch.no_grad()
    def restore(self) -> None:
        """Write the weights of training into the device's deferred columns."""
        device, training = self._engine.device, self._engine.training
        for split in self._engine.layout.splits:
            with split.held(changes=True):
                arrivals = [
                    Arrival(values, columns, split.weight())
                    for columns, values in training.pieces_of(split)
                ]
                device.unpack(arrivals, device.mark(), self._engine.layout.gather)
                device.synchronize()

    # ---- weights that a program loads -------------------------------------------------------

    def adopt(self) -> None:
        """Take the present weights of a drained optimizer for the true ones."""
        in_flight = self._engine.in_flight
        for update in in_flight:
            in_flight.end(update)
        take_weights(self._engine)
        if self._life.now is Life.SHOWN:
            self._life.now = Life.TRAINING
        self.go_on()
        self._source.accept_weights()

    def go_on(self) -> None:
        """Let streamed weights stay on the device after their use again."""
        if self._engine.stream is not None:
            self._engine.stream.keeps = True

    def settle(self) -> None:
        """Begin to train, with a look at weights that were loaded before or behind a state.

        Such weights are the true ones where all state follows from them: before the first step,
        and after a state without masters.

        Raises:
            RuntimeError: Weights are not of the loaded state's checkpoint.
            CheckpointError: The states' folder has a checkpoint that was not loaded.
        """
        if self._life.now is Life.NEW:
            self.check_states()
            if self._source.are_changed or self.first_foreign() is not None:
                self._source.check_kinds()
                take_weights(self._engine)
                self._source.accept_weights()
        elif self._life.now is Life.LOADED:
            if self._source.are_changed:
                self._accept_checkpoint()
        else:
            return
        self._life.now = Life.TRAINING

    def check_states(self) -> None:
        """Refuse to train where a drive has a checkpoint that nobody has loaded.

        Raises:
            CheckpointError: It has one.
        """
        if self._engine.drive is not None:
            self._engine.drive.folder.claim()

    def _accept_checkpoint(self) -> None:
        """Go on from the weights that were loaded behind the optimizer's state.

        Raises:
            RuntimeError: The weights are not of the state's checkpoint.
        """
        self._source.check_kinds()
        self._check_own()
        if not self.are_of_training():
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
        if (foreign := self.first_foreign()) is not None:
            raise changed(foreign.name)

    @torch.no_grad()
    def first_foreign(self) -> NamedParam | None:
        """Return a parameter that somebody else has written to; None if there is none.

        Compares where the device has masters in any case: important columns, and residents with a
        copy. So a write to a whole parameter is found.
        """
        for split in self._engine.layout.splits:
            if len(split.important_columns) and not _has_own(split):
                return split
        for resident in self._engine.layout.residents:
            if resident.has_master and not _are_shown(resident.master, resident.data):
                return resident
        return None

    @torch.no_grad()
    def are_there(self) -> bool:
        """Whether all weights are the masters, bit for bit; a resident may be its own master."""
        return self.first_foreign() is None and all(
            _have(split, ((c, rows.weights(split.param.dtype)) for c, rows in split.host_pieces()))
            for split in self._engine.layout.splits
        )

    @torch.no_grad()
    def are_of_training(self) -> bool:
        """Whether deferred weights equal those of training that a loaded state has brought."""
        return all(
            _have(split, self._engine.training.pieces_of(split))
            for split in self._engine.layout.splits
        )


@torch.no_grad()
def _has_own(split: SplitParam) -> bool:
    """Whether the device's important columns are the masters."""
    with split.held():
        masters, weight_IO = split.important_masters, split.weight().t()
        return all(
            _are_shown(masters[part], weight_IO[split.important_columns[part]])
            for part in pieces(len(masters), masters[:1].nbytes)
        )


@torch.no_grad()
def _have(split: SplitParam, values: Iterable[tuple[HostColumns, Tensor]]) -> bool:
    """Whether the device's deferred columns have some values, (D, O) for each of their pieces."""
    with split.held():
        for columns, values_DO in values:
            own_IO, indices = columns.turned(split.part.of(split.weight()))
            if not _are_shown(values_DO, own_IO[indices]):
                return False
    return True


def _are_shown(masters: Tensor, weights: Tensor) -> bool:
    """Whether weights equal the masters in their dtype; NaN equals NaN."""
    if masters.dim() == 0:
        masters, weights = masters[None], weights[None]
    row_bytes = masters[:1].nbytes
    return all(
        _are_equal(masters[part].to(weights.dtype).to(weights.device), weights[part])
        for part in pieces(len(masters), row_bytes)
    )


def _are_equal(these: Tensor, those: Tensor) -> bool:
    """Whether numbers are equal, or both NaN; for the second question few have to be asked."""
    if torch.equal(these, those):
        return True
    return bool(((these == those) | (these.isnan() & those.isnan())).all())
