"""Sources of gradients: hooks that release them in backward, or `.grad` at the step."""

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
from zenflow.step.gradients.ownership import is_own
from zenflow.step.gradients.released import ReleasedGradient, is_released
from zenflow.surface.arguments import made_for_inference
from zenflow.surface.gradient_sums import GradientSums

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
    ) -> None:
        """Start without hooks.

        Args:
            engine: Engine whose collector takes the gradients.
            places: Place of every trainable parameter, in registration order.
            frozen: Parameters that were not trainable when the optimizer was made.
        """
        self._engine = engine
        self._places = list(places)
        self.releases = engine.options.releases
        self._accumulation_steps = engine.options.accumulation_steps
        self._frozen = list(frozen)
        self._arrivals: dict[SplitParam | Resident, int] = {}
        self._sums: dict[SplitParam | Resident, _Identity] = {}
        self._left: dict[SplitParam | Resident, None] = {}  # in this order, since the last step
        self._marks = self._read_marks()
        self._has_warned = False
        self.has_hooks = False
        self._averages: list[SplitParam | Resident] = []
        self._check: weakref.WeakMethod[Callable[[], None]] | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # One for each parameter, used at every step: making one costs as much as some operations.
        self._released: dict[SplitParam | Resident, Tensor] = {}
        self._make_released(places)
        self.sums: GradientSums | None = None
        if engine.transfers is not None:
            self.sums = GradientSums(engine, self._released, self._note_swap)

    def _make_released(self, places: Sequence[SplitParam | Resident]) -> None:
        if self.releases:
            self._released |= {
                p: spread(ReleasedGradient(_there(p), p.name), RowSpread.of(p.param), 0)
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
            check: Method that raises where no step can follow a backward. Held weakly, like this
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

        def before(place: SplitParam) -> Callable[[Tensor], None]:
            def comes(_: Tensor) -> None:
                alive = source()
                if alive is not None and alive.sums is not None:
                    with torch.no_grad():
                        alive.sums.restore(place)

            return comes

        for place in places:
            handle = place.param.register_post_accumulate_grad_hook(hook(place))
            self._hooks.append(handle)
            if self.sums is not None and self.sums.have(place):
                self._hooks.append(place.param.register_hook(before(place)))

    def note_arrivals(self, noted: set[SplitParam | Resident]) -> None:
        """From now on, add every parameter whose gradient comes or grows to this set."""

        def note(place: SplitParam | Resident) -> Callable[[Tensor], None]:
            return lambda _: noted.add(place)

        for place in self._places:
            self._hooks.append(place.param.register_post_accumulate_grad_hook(note(place)))

    @whole
    def _arrived(self, place: SplitParam | Resident) -> None:
        """Release a gradient once its last micro-batch has been added."""
        if self._accumulation_steps > 1:
            self._restart_if_replaced(place)
        if not self._is_last_arrival(place):
            if self.sums is not None and self.sums.have(place):
                with torch.no_grad():
                    self.sums.came(place)
            return
        if not torch.is_grad_enabled():  # as in any backward without create_graph
            self._take(place)
            return
        with torch.no_grad():
            self._take(place)

    def _is_last_arrival(self, place: SplitParam | Resident) -> bool:
        """Count a micro-batch, and return whether it is the step's last.

        Raises:
            GradientError: The gradient of a whole step has left already, and is not in `.grad`.
        """
        if place in self._left:
            raise GradientError(
                f"the gradient of {place.name} was dropped or replaced after it had left for the "
                "host, and this backward's forward has seen weights that were moved by it: drop a "
                "batch with optimizer.zero_grad(), which undoes that; model.zero_grad() and "
                '.grad = None can\'t. Or make the optimizer with offload_gradients="keep"'
            )
        self._arrivals[place] = self._arrivals.get(place, 0) + 1
        return self._arrivals[place] == self._accumulation_steps

    def _restart_if_replaced(self, place: SplitParam | Resident) -> None:
        """Count micro-batches anew if the sum of the earlier ones has gone from `.grad`."""
        grad = place.param.grad
        known = self._sums.get(place)
        if known is not None and not known.is_of(grad):
            self._arrivals.pop(place, None)
        if grad is None:  # another hook has dropped it
            self._arrivals[place] = -1
        else:
            self._sums[place] = _Identity(grad)

    def _note_swap(self, place: SplitParam) -> None:
        """Take the tensor that is in `.grad` now for the sum of the micro-batches so far."""
        assert place.param.grad is not None
        self._sums[place] = _Identity(place.param.grad)

    def expect_passes(self, count: int) -> None:
        """Let gradients leave in the last of `count` backward passes, from the next one on.

        For steps of more or fewer passes than the optimizer was made for. Later steps have as many
        passes as this one in all. Where gradients have left already nothing changes.
        """
        if not self._engine.has_gradients:
            self._accumulation_steps = max(self._arrivals.values(), default=0) + count

    @whole
    @torch.no_grad()
    def average_came(self, place: SplitParam | Resident, grad: Tensor) -> None:
        """Release a gradient that ranks have averaged, once its last micro-batch is in it.

        `leave_placeholders` follows when DDP has done its last write to `.grad`.
        """
        if self._is_last_arrival(place):
            self._engine.take(place, grad, at_once=True, is_own=False)
            self._averages.append(place)

    def leave_placeholders(self) -> None:
        """Put placeholders in the place of averages that were taken, whose memory is then free."""
        for place in self._averages:
            self._leave_placeholder(place)
        self._averages.clear()

    def _leave_placeholder(self, place: SplitParam | Resident) -> None:
        place.param.grad = self._released[place]
        self._left[place] = None

    def check_hooks(self) -> None:
        """Refuse release mode under data parallelism without `release_from`.

        Raises:
            GradientError: No hook lets the ranks' gradients leave during backward.
        """
        if self.releases and not self.has_hooks:
            raise GradientError(
                "release mode under a process_group takes gradients as DistributedDataParallel "
                "averages them: call optimizer.release_from(model) before the first backward, or "
                'make the optimizer with offload_gradients="keep"'
            )

    def _take(self, place: SplitParam | Resident) -> None:
        param, is_sharded = place.param, place.is_sharded
        if param.grad is None or is_released(param.grad, is_sharded=is_sharded):
            return
        # FSDP2 has another name for it while its hooks run, and does not use it again.
        own = (self.releases and is_sharded) or is_own(param, is_sharded=is_sharded)
        grad = param.grad
        if self.releases and grad.dtype != self._released[place].dtype:
            self.check_untouched()  # says that the model was cast
        self._engine.take(place, grad, at_once=self.releases, is_own=own)
        if self.releases:
            self._leave_placeholder(place)

    @torch.no_grad()
    def take_rest(self) -> None:
        """Take the gradients left in `.grad`: keep mode's, or those that a micro-batch missed."""
        for place in reversed(self._places):
            if self.sums is not None and self.sums.have(place):
                self.sums.restore(place)
            if place.page is None:
                self._take(place)
            elif place.param.grad is not None and not is_released(
                place.param.grad, is_sharded=False
            ):
                with place.held():
                    self._take(place)
        self._engine.measure_rest()

    def warn_of_nothing(self) -> None:
        """Log a warning, once, of a step in which no parameter has a gradient."""
        if not (self._engine.has_gradients or self._has_warned):
            self._has_warned = True
            _log.warning(
                "no parameter of this optimizer has a gradient: was the model wrapped (PEFT), "
                "copied or frozen after the optimizer was made? Under FSDP2: did the last pass "
                "before step() reduce gradients (set_requires_gradient_sync)?"
            )

    def _read_marks(self) -> list[Mark]:
        """Return a mark of every parameter, which differs after a change of its weights."""
        for place in self._places:
            if place.param.is_inference():  # has no version
                raise RuntimeError(made_for_inference(place.name))
        return [(p.param._version, _address(p), p.param.dtype) for p in self._places]

    def count_change(self) -> None:
        """Tell autograd that weights have changed: a backward through an old graph then fails."""
        torch.autograd.graph.increment_version([place.param for place in self._places])
        # Changes by others are still noticed.
        self._marks = [(version + 1, place, dtype) for version, place, dtype in self._marks]

    def accept_weights(self) -> None:
        """Take the weights as they are for unchanged."""
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
            if place.device != device:
                raise RuntimeError(
                    f"{place.name} was moved from {device} to {place.param.device} after the "
                    "optimizer was made: move the model first, then make the optimizer"
                )

    def check_untouched(self) -> None:
        """Refuse changes by others that torch's AdamW would take up and this optimizer can't.

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

    def drop_missing(self) -> None:
        """Drop gradients that have left and whose placeholders have gone from `.grad`.

        As with torch's optimizers, a gradient that is gone when the step is taken does not count.
        No forward has seen the weights that its fresh step has moved.

        Raises:
            GradientError: Another tensor is in a placeholder's place.
        """
        missing = [p for p in self._left if p.param.grad is not self._released[p]]
        if not missing:
            return
        for place in missing:
            if place.param.grad is not None:
                raise GradientError(
                    f"the gradient of {place.name} was replaced after it had left for the host: "
                    "to change gradients between backward and step(), make the optimizer with "
                    'offload_gradients="keep"; to drop them, call optimizer.zero_grad()'
                )
        if len(missing) == len(self._left):
            self.forget()
            return
        self._engine.drop(dict.fromkeys(missing))
        for place in missing:
            del self._left[place]

    def forget(self) -> None:
        """Drop the gradients that were taken since the last step."""
        if self._engine.has_gradients:
            self._engine.discard()
        self.abandon()

    def restart_count(self) -> None:
        """Count a step's backward passes anew."""
        self._arrivals.clear()
        self._sums.clear()

    def abandon(self) -> None:
        """Drop the gradients that were taken, without a wait: the engine may have failed."""
        self._engine.abandon_step()
        if self.sums is not None:
            self.sums.forget()
        self.restart_count()
        self._left.clear()
        self._averages.clear()
        for place in self._places:
            if is_released(place.param.grad, is_sharded=place.is_sharded):
                place.param.grad = None

    def consume(self) -> None:
        """Clear every `.grad`: the step has used them."""
        self.restart_count()
        self._left.clear()
        for place in self._places:
            place.param.grad = None

    def remove_hooks(self) -> None:
        """Remove all hooks from the parameters."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()


def _there(place: SplitParam | Resident) -> Tensor:
    """Return a tensor like the parameter on its device, which may have no memory."""
    return place.data if place.page is None else place.page.device_tensor(place.param)


def _address(place: SplitParam | Resident) -> int:
    """Return a number that differs after somebody has set the parameter's `.data`."""
    if place.page is not None and place.page.shows(place.param):
        return id(place.page)
    return place.data.data_ptr()


class _Identity:
    """Recognizes a tensor without keeping it alive."""

    def __init__(self, tensor: Tensor) -> None:
        # While there is a weak reference no other tensor gets this address.
        self._reference = torch._C._WeakTensorRef(tensor)  # type: ignore[attr-defined]
        self._address = tensor._cdata

    def is_of(self, tensor: Tensor | None) -> bool:
        """Whether `tensor` is the one that was remembered."""
        return tensor is not None and tensor._cdata == self._address


def changed(name: str) -> RuntimeError:
    """Return the error that somebody else has changed this parameter's weights."""
    return RuntimeError(
        f"{name} was changed after the optimizer was made, which holds its true weights "
        "elsewhere: load weights before the optimizer is made, or call optimizer.adopt_weights() "
        "to go on from these. To swap weights for an average and back, do it inside of "
        "`with optimizer.true_weights():`"
    )
