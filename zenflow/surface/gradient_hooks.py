"""Where gradients come from: hooks that release them in backward, or `.grad` at the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.layout import SplitParam
from zenflow.step.engine import Engine
from zenflow.step.released import ReleasedGradient


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
        self._releases = releases
        self._accumulation_steps = accumulation_steps
        self._frozen = list(frozen)
        self._arrivals: dict[SplitParam | Resident, int] = {}
        self._versions: list[int] | None = self._read_versions()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # One for each parameter, used at every step: making one costs as much as some operations.
        self._released = (
            {place: ReleasedGradient(place.param, place.name) for place in places}
            if releases
            else {}
        )

    def register_hooks(self, check: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Release gradients in backward from now on.

        Args:
            check: Raises where a backward can't be followed by a step. Held weakly, like this
                source: parameters outlive optimizers.
        """
        source = weakref.ref(self)

        def hook(place: SplitParam | Resident) -> Callable[[Tensor], None]:
            def arrived(_: Tensor) -> None:
                checker, alive = check(), source()
                if checker is not None and alive is not None:
                    checker()
                    alive._arrived(place)

            return arrived

        for place in self._places:
            handle = place.param.register_post_accumulate_grad_hook(hook(place))
            self._hooks.append(handle)

    def _arrived(self, place: SplitParam | Resident) -> None:
        """Release a gradient once its last micro-batch has been added."""
        arrivals = self._arrivals.get(place, 0) + 1
        self._arrivals[place] = arrivals
        if arrivals != self._accumulation_steps:
            return
        if not torch.is_grad_enabled():  # as in any backward without create_graph
            self._take(place)
            return
        with torch.no_grad():
            self._take(place)

    def _take(self, place: SplitParam | Resident) -> None:
        grad = place.param.grad
        if grad is None or isinstance(grad, ReleasedGradient):
            return
        step = self._engine.step + 1
        self._engine.collector.take(place, grad, step, at_once=self._releases)
        if self._releases:
            place.param.grad = self._released[place]

    @torch.no_grad()
    def take_rest(self) -> None:
        """Take what has not been taken: keep mode, or parameters that some micro-batch missed."""
        for place in reversed(self._places):
            self._take(place)

    def _read_versions(self) -> list[int]:
        """Return torch's counts of in-place changes."""
        return [place.param._version for place in self._places]

    def count_change(self) -> None:
        """Let autograd know that the weights are others: a graph that was kept is of no use."""
        torch.autograd.graph.increment_version([place.param for place in self._places])
        if self._versions is not None:  # changes by others are still noticed
            self._versions = [version + 1 for version in self._versions]

    def expect_new_weights(self) -> None:
        """Allow one change of the weights: a checkpoint's may be loaded after the optimizer's."""
        self._versions = None

    def check_untouched(self) -> None:
        """Refuse what torch's AdamW would take up and this optimizer could not.

        Raises:
            RuntimeError: Weights were changed in place, or a frozen parameter has a gradient.
        """
        now = self._read_versions()
        for place, before, after in zip(self._places, self._versions or now, now, strict=True):
            if before != after:
                raise RuntimeError(
                    f"{place.name} was changed in place after the optimizer was made, which holds "
                    "its true weights elsewhere: load weights first, then make the optimizer"
                )
        self._versions = now
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

    def abandon(self) -> None:
        """Drop it without waiting for anything: the engine has failed."""
        self._engine.collector.discard()
        self._arrivals.clear()
        for place in self._places:
            if isinstance(place.param.grad, ReleasedGradient):
                place.param.grad = None

    def consume(self) -> None:
        """Clear every `.grad`: the step has used them."""
        for place in self._places:
            place.param.grad = None

    def remove_hooks(self) -> None:
        """Leave the parameters as they were."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
