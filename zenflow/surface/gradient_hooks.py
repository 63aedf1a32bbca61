"""Where gradients come from: hooks that release them in backward, or `.grad` at the step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.layout import SplitParam
from zenflow.columns.shards import RowSpread, spread
from zenflow.errors import GradientError
from zenflow.host.signals import whole
from zenflow.step.engine import Engine
from zenflow.step.gradients.released import ReleasedGradient, is_released
from zenflow.surface.arguments import made_for_inference

_log = logging.getLogger(__name__)

Mark = tuple[int, int, torch.dtype]
"""A parameter's version (torch's count of changes in place), address and dtype."""


class GradientSource:
    """Hands the parameters' gradients to the engine's collector, each once a step."""

    def __init__(
        self,
        engine: Engine,
        places: Sequence[SplitParam | Resident],
        *,
        frozen: Sequence[Tensor],
        releases: bool,
        accumulation_steps: int,
    ) -> None:
        """Start without hooks.

        Args:
            engine: Engine whose collector takes the gradients.
            places: Every trainable parameter's, in registration order.
            frozen: Parameters that were not trainable when the optimizer was made.
            releases: Whether a gradient's memory is given up when it is taken.
            accumulation_steps: Backward passes per step; only release mode looks at it.
        """
        self._engine = engine
        self._places = list(places)
        self.releases = releases
        self._accumulation_steps = accumulation_steps
        self._frozen = list(frozen)
        self._arrivals: dict[SplitParam | Resident, int] = {}
        self._marks = self._read_marks()
        self._has_warned = False
        self.has_hooks = False
        self._averages: list[SplitParam | Resident] = []
        self._check: weakref.WeakMethod[Callable[[], None]] | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # One for each parameter, used at every step: making one costs as much as some operations.
        self._released: dict[SplitParam | Resident, Tensor] = {}
        self._make_released(places)

    def _make_released(self, places: Sequence[SplitParam | Resident]) -> None:
        if self.releases:
            self._released |= {
                p: spread(ReleasedGradient(p.data, p.name), RowSpread.of(p.param), 0)
                for p in places
            }

    def add(self, places: Sequence[SplitParam | Resident], frozen: Sequence[Tensor]) -> None:
        """Take the gradients of more parameters from the next backward on."""
        self._places += places
        self._frozen += frozen
        self._marks += self._read_marks()[len(self._marks) :]
        self._make_released(places)
        if self._check is not None:
            self._hook(places, self._check)

    def register_hooks(self, check: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Release gradients in backward from now on.

        Args:
            check: Raises where a backward can't be followed by a step. Held weakly, like this
                source: parameters outlive optimizers.
        """
        self._check = check
        self._hook(self._places, check)
        self.has_hooks = True

    def _hook(
        self,
        places: Sequence[SplitParam | Resident],
        check: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        source = weakref.ref(self)

        def hook(place: SplitParam | Resident) -> Callable[[Tensor], None]:
            def arrived(_: Tensor) -> None:
                checker, alive = check(), source()
                if checker is not None and alive is not None:
                    checker()
                    alive._arrived(place)

            return arrived

        for place in places:
            handle = place.param.register_post_accumulate_grad_hook(hook(place))
            self._hooks.append(handle)

    @whole
    def _arrived(self, place: SplitParam | Resident) -> None:
        """Release a gradient once its last micro-batch has been added."""
        if not self._is_last_arrival(place):
            return
        if not torch.is_grad_enabled():  # as in any backward without create_graph
            self._take(place)
            return
        with torch.no_grad():
            self._take(place)

    def _is_last_arrival(self, place: SplitParam | Resident) -> bool:
        """Count a micro-batch; return whether it is the step's last."""
        self._arrivals[place] = self._arrivals.get(place, 0) + 1
        return self._arrivals[place] == self._accumulation_steps

    @whole
    @torch.no_grad()
    def average_came(self, place: SplitParam | Resident, grad: Tensor) -> None:
        """Release a gradient that ranks have averaged, once its last micro-batch is in it.

        `leave_placeholders` follows when nobody writes to `.grad` any more.
        """
        if self._is_last_arrival(place):
            engine = self._engine
            engine.collector.take(place, grad, engine.step + 1, at_once=True)
            self._averages.append(place)

    def leave_placeholders(self) -> None:
        """Give up the memory of the averages that have been taken."""
        for place in self._averages:
            place.param.grad = self._released[place]
        self._averages.clear()

    def check_hooks(self) -> None:
        """Refuse gradients of data-parallel ranks that nothing has let leave.

        Raises:
            GradientError: They were to leave during backward.
        """
        if self.releases and not self.has_hooks:
            raise GradientError(
                "release mode under a process_group takes gradients as DistributedDataParallel "
                "averages them: call optimizer.release_from(model) before the first backward, or "
                'make the optimizer with offload_gradients="keep"'
            )

    def _take(self, place: SplitParam | Resident) -> None:
        param, engine = place.param, self._engine
        grad = param.grad
        released = self._released.get(place)  # only in release mode
        if grad is None or is_released(grad, is_sharded=place.is_sharded):
            return
        if released is not None and grad.dtype != released.dtype:
            self.check_untouched()  # says that the model was cast
        engine.collector.take(place, grad, engine.step + 1, at_once=released is not None)
        if released is not None:
            param.grad = released

    @torch.no_grad()
    def take_rest(self) -> None:
        """Take what has not been taken: keep mode, or parameters that some micro-batch missed."""
        for place in reversed(self._places):
            self._take(place)
        self._engine.collector.measure_rest()

    def warn_of_nothing(self) -> None:
        """Log a warning, once, of a step in which no parameter has a gradient."""
        if self._engine.collector.is_empty and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "no parameter of this optimizer has a gradient: was the model wrapped (PEFT), "
                "copied or frozen after the optimizer was made?"
            )

    def _read_marks(self) -> list[Mark]:
        """Return what a change of the weights changes, and what says where they are."""
        for place in self._places:
            if place.param.is_inference():  # has no version
                raise RuntimeError(made_for_inference(place.name))
        return [(p.param._version, p.data.data_ptr(), p.param.dtype) for p in self._places]

    def count_change(self) -> None:
        """Let autograd know that the weights are others: a graph that was kept is of no use."""
        torch.autograd.graph.increment_version([place.param for place in self._places])
        # Changes by others are still noticed.
        self._marks = [(version + 1, place, dtype) for version, place, dtype in self._marks]

    def accept_weights(self) -> None:
        """Go on from the weights as they are."""
        self._marks = self._read_marks()

    @property
    def are_changed(self) -> bool:
        """Whether somebody else has changed weights since they were last looked at."""
        return self._read_marks() != self._marks

    def check_kinds(self) -> None:
        """Refuse parameters that were cast or moved.

        Raises:
            RuntimeError: One was.
        """
        device = self._engine.device.torch_device
        for place, (_, _, dtype) in zip(self._places, self._marks, strict=True):
            if place.param.dtype != dtype:
                raise RuntimeError(
                    f"{place.name} was cast from {dtype} to {place.param.dtype} after the "
                    "optimizer was made: cast the model first, then make the optimizer"
                )
            if place.param.device != device:
                raise RuntimeError(
                    f"{place.name} was moved from {device} to {place.param.device} after the "
                    "optimizer was made: move the model first, then make the optimizer"
                )

    def check_untouched(self) -> None:
        """Refuse what torch's AdamW would take up and this optimizer could not.

        Raises:
            RuntimeError: Weights were changed, or a frozen parameter has a gradient.
        """
        now = self._read_marks()
        if now != self._marks:
            self.check_kinds()
            for place, before, after in zip(self._places, self._marks, now, strict=True):
                if before != after:
                    raise changed(place.name)
        for param in self._frozen:
            if param.grad is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} was frozen when the optimizer was "
                    "made and has a gradient now: make a new optimizer after unfreezing"
                )

    def forget(self) -> None:
        """Drop what was taken since the last step."""
        if not self._engine.collector.is_empty:
            self._engine.discard()
        self.abandon()

    def restart_count(self) -> None:
        """Count a step's backward passes anew."""
        self._arrivals.clear()

    def abandon(self) -> None:
        """Drop it without waiting for anything: the engine has failed."""
        self._engine.collector.discard()
        self._arrivals.clear()
        self._averages.clear()
        for place in self._places:
            if is_released(place.param.grad, is_sharded=place.is_sharded):
                place.param.grad = None

    def consume(self) -> None:
        """Clear every `.grad`: the step has used them."""
        self._arrivals.clear()
        for place in self._places:
            place.param.grad = None

    def remove_hooks(self) -> None:
        """Leave the parameters as they were."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()


def changed(name: str) -> RuntimeError:
    """Return the error that somebody else has changed this parameter's weights."""
    return RuntimeError(
        f"{name} was changed after the optimizer was made, which holds its true weights "
        "elsewhere: load weights before the optimizer is made, or call optimizer.adopt_weights() "
        "to go on from these. To swap weights for an average and back, do it inside of "
        "`with optimizer.true_weights():`"
    )
