"""The part of the optimizer's surface that saves and loads states."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zenflow.errors import CheckpointError
from zenflow.host.signals import whole
from zenflow.surface.arguments import SETTINGS
from zenflow.surface.state.adamw import (
    adamw_state,
    check_adamw_state,
    load_adamw_state,
)
from zenflow.surface.state.checks import ENTRY, has_steps, places_by_key, saved_engine
from zenflow.surface.state.parameter import param_state, shown_state
from zenflow.surface.state.restart import end_windows
from zenflow.surface.state.state_dict import add_engine_state, load_engine_state
from zenflow.surface.with_engine import WithEngine


class Checkpointed(WithEngine):
    """Saves and loads the optimizer's state, and torch's AdamW's."""

    _filled_version: int | None
    """Version of the layout whose tensors `state` shows; None where it is empty."""
    _makes_compact_states: bool = False
    """Whether `state_dict` returns compact states."""

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state, at any step: mid-window, with updates in flight, in eval mode.

        It has torch's keys, and one more, "zenflow", in the first parameter group. Before the
        first step it has no tensors. Tensors are views of the live state, as in torch: save or
        copy them before the next backward.

        Raises:
            GradientError: Called between backward and step() in release mode, or the gradient norm
                of the last step is not finite: a state that may hold it is not given away.
            WorkerError: A step was broken off half done.
        """
        self._check_no_gradients("state_dict()")
        self.synchronize()
        if self._running.step:
            self._fill_state()
        return super().state_dict()

    @contextmanager
    def compact_states(self) -> Iterator[None]:
        """Let `state_dict` leave out tensors that follow from others, for files loaded whole.

            with optimizer.compact_states():
                torch.save(optimizer.state_dict(), "optimizer.pt")

        `load_state_dict` takes up either kind, with the same bits. A compact state's tensors
        differ from step to step, so `torch.distributed.checkpoint`, which loads in place, needs
        full ones. Where ranks share parameters or the host's work, all states are full.
        """
        self._makes_compact_states = True
        try:
            yield
        finally:
            self._makes_compact_states = False

    @whole
    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state that `state_dict` returned; deferred weights on the device included.

        Also takes up a state of `torch.optim.AdamW`: the model's weights are then the true ones,
        and AdamW's moments and steps go on. Load the model's weights before the next step.

        An optimizer that stopped at a norm that was not finite goes on from the loaded state. Load
        the model's state too, whose resident parameters may hold such values.

        Raises:
            CheckpointError: The state is of another model, configuration or optimizer; nothing has
                been changed then.
        """
        self._check_no_gradients("load_state_dict()")
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():  # as torch calls them
            state_dict = before(self, state_dict) or state_dict
        self._running.drain()
        saved = saved_engine(state_dict)
        order = places_by_key(self.param_groups, self._places, state_dict)
        if saved is None:
            check_adamw_state(order, state_dict)
            load_adamw_state(self._running, order, state_dict)
            self._true_weights.forget()
            self._takes_late_weights = True
        else:
            load_engine_state(self._running, order, self._true_weights, state_dict, saved)
            self._takes_late_weights = not has_steps(state_dict, saved)
        # Copies: a rate that is a tensor would be both optimizers'.
        for group, there in zip(
            self.param_groups, copy.deepcopy(state_dict["param_groups"]), strict=True
        ):
            names = there if saved is not None else (*SETTINGS, "initial_lr")
            kept = ("params", ENTRY)
            group.update({key: there[key] for key in names if key in there and key not in kept})
        self._failure = None
        self._source.accept_weights()
        self._expects_weights = True
        self._hide_state()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @whole
    @torch.inference_mode(False)
    def prepare_to_load(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Give this optimizer's tensors the shapes of a state that will be loaded in place.

        `torch.distributed.checkpoint` loads into the tensors of a `state_dict()`. Where a
        controller has changed k since the start, those of a new optimizer are of other shapes.
        Load the parameter groups alone, hand them to this call, and take a `state_dict()` anew.

        Args:
            param_groups: Parameter groups of the saved state.

        Raises:
            CheckpointError: The groups are not of a state of this optimizer.
        """
        engine = self._running
        saved = saved_engine({"param_groups": param_groups, "state": {}})
        if saved is None:
            raise CheckpointError("the parameter groups are not of a ZenFlowAdamW's state")
        if engine.layout.topk_ratio != saved["topk_ratio"]:
            self.synchronize()
            engine.abandon_step()
            engine.resize(saved["topk_ratio"])
            end_windows(engine)
            self._hide_state()

    def to_adamw_state_dict(self) -> dict[str, Any]:
        """Return a state with which `torch.optim.AdamW` over the same parameters can go on.

        The state has AdamW's moments of all gradients so far, in float32, copied to the CPU: 8
        bytes a parameter. Its weights are the true ones (`true_weights`).

        Raises:
            CheckpointError: The update rule is the published one, whose moments are of means of
                gradients.
            GradientError: As with `state_dict`.
            WorkerError: A step was broken off half done.
        """
        if not self._running.config.is_exact:
            raise CheckpointError(
                'update_rule="published" has no moments of AdamW: only "exact" can be gone on '
                "with by torch.optim.AdamW"
            )
        self._check_no_gradients("to_adamw_state_dict()")
        self.synchronize()
        return adamw_state(self._running, self._places, self.param_groups)

    def _check_state_is_there(self) -> None:
        """Refuse an emptied `state`, which would reset torch's optimizers, but not this one."""
        if self._filled_version is not None and not self.state:
            raise RuntimeError(
                "optimizer.state was emptied, but only shows what the optimizer has: to begin "
                "anew make a new optimizer, or load the state that it had before its first step"
            )

    def _fill_state(self) -> None:
        """Put every parameter's live tensors into `state`, as torch's optimizers have them."""
        self._filled_version = self._running.layout.version
        for place in self._places.values():
            self.state[place.param] = shown_state(place, param_state(self._running, place))

    def _hide_state(self) -> None:
        """Empty `state` until the next step or `state_dict`: trainers would copy tensors to a GPU.

        Parameters keep empty entries once a step was taken: without entries torch's
        `get_state_dict` would take a step, to make some.
        """
        self.state.clear()
        if self._running.step:
            self.state.update({param: {} for param in self._places})
        self._filled_version = None

    def _add_engine_state(self, state: dict[str, Any]) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        places = {i: self._places[p] for i, p in enumerate(params) if p in self._places}
        add_engine_state(
            self._running,
            self._true_weights,
            places,
            state,
            is_compact=self._makes_compact_states,
        )


def complete_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Add the engine's part to torch's part of a state, before other hooks see the state."""
    assert isinstance(optimizer, Checkpointed)
    optimizer._add_engine_state(state)
