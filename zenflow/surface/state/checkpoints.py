"""Checkpoints: the optimizer's state as torch shows it, and states taken up."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zenflow.columns.device_rows import Resident
from zenflow.columns.layout import SplitParam
from zenflow.errors import CheckpointError
from zenflow.surface.arguments import SETTINGS
from zenflow.surface.gradient_hooks import GradientSource
from zenflow.surface.life import Life, Lifetime
from zenflow.surface.state.adamw import adamw_state, check_adamw_state, load_adamw_state
from zenflow.surface.state.checks import ENTRY, has_steps, places_by_key, saved_engine
from zenflow.surface.state.host_format import format_there, is_converted
from zenflow.surface.state.on_drive import check_drive
from zenflow.surface.state.parameter import param_state, shown_state
from zenflow.surface.state.restart import end_windows
from zenflow.surface.state.state_dict import add_engine_state, load_engine_state
from zenflow.surface.weights import Weights

if TYPE_CHECKING:
    from zenflow.step.engine import Engine

State = MutableMapping[Tensor, Any]
"""Entries of an optimizer's `state`, by parameter."""


class Checkpoints:
    """Shows the engine's tensors as torch's optimizers do, and takes states up.

    Attributes:
        makes_compact: Whether states are compact.
        makes_portable: Whether states have what is on a drive.
        is_filled: Whether the optimizer's `state` shows tensors.
    """

    def __init__(
        self,
        engine: Engine,
        source: GradientSource,
        weights: Weights,
        places: Mapping[Tensor, SplitParam | Resident],
        life: Lifetime,
    ) -> None:
        """Start with an empty `state`.

        Args:
            engine: The engine.
            source: Source of the gradients, which watches the weights.
            weights: Swap between weights of training and true weights.
            places: Place of every trainable parameter, which the optimizer adds to.
            life: State of the optimizer.
        """
        self._engine = engine
        self._source = source
        self._weights = weights
        self._places = places
        self._life = life
        self._filled_version: int | None = None
        self.makes_compact = False
        self.makes_portable = False

    @property
    def is_filled(self) -> bool:
        """Whether the optimizer's `state` shows tensors."""
        return self._filled_version is not None

    @property
    def is_up_to_date(self) -> bool:
        """Whether the optimizer's `state` shows the tensors of the present layout."""
        return self._filled_version == self._engine.layout.version

    def check_state_is_there(self, state: State) -> None:
        """Refuse an emptied `state`, which would reset torch's optimizers, but not this one.

        Raises:
            RuntimeError: Somebody has emptied it.
        """
        if self.is_filled and not state:
            raise RuntimeError(
                "optimizer.state was emptied, but only shows what the optimizer has: to begin "
                "anew make a new optimizer, or load the state that it had before its first step"
            )

    def fill(self, state: State) -> None:
        """Put every parameter's live tensors into `state`, as torch's optimizers have them."""
        if not self._engine.step:
            return
        self._filled_version = self._engine.layout.version
        for place in self._places.values():
            state[place.param] = shown_state(place, param_state(self._engine, place))

    def hide(self, state: State) -> None:
        """Empty `state` until the next step or `state_dict`: trainers would copy tensors to a GPU.

        Parameters keep empty entries once a step was taken: without entries torch's
        `get_state_dict` would take a step, to make some.
        """
        state.clear()
        if self._engine.step:
            state.update({param: {} for param in self._places})
        self._filled_version = None

    def complete(
        self, state_dict: dict[str, Any], param_groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Add the engine's part to torch's part of a state."""
        params = [param for group in param_groups for param in group["params"]]
        places = {i: self._places[p] for i, p in enumerate(params) if p in self._places}
        add_engine_state(
            *(self._engine, self._weights, places, state_dict),
            is_compact=self.makes_compact,
            is_portable=self.makes_portable,
        )

    def load(
        self, state_dict: Mapping[str, Any], param_groups: list[dict[str, Any]], state: State
    ) -> None:
        """Take up a state of this optimizer or of torch's AdamW.

        Args:
            state_dict: The state.
            param_groups: The optimizer's groups, whose settings become the state's.
            state: The optimizer's `state`, which is empty afterwards.

        Raises:
            CheckpointError: The state is of another model, configuration or optimizer; nothing has
                been changed then.
        """
        engine = self._engine
        engine.abandon_step()  # an empty one, which clip_grad_norm_() has begun
        engine.drain()
        saved = saved_engine(state_dict)
        order = places_by_key(param_groups, self._places, state_dict)
        if saved is None:
            check_drive(engine, {}, has_steps=True)
            check_adamw_state(order, state_dict)
            load_adamw_state(engine, order, state_dict)
        else:
            untouched = self._life.now is Life.NEW and not self._source.are_changed
            load_engine_state(
                *(engine, order, self._weights, state_dict, saved),
                is_new=untouched and not engine.step,
            )
        is_new = saved is None or not has_steps(state_dict, saved)
        self._life.now = Life.NEW if is_new else Life.LOADED
        self._weights.go_on()
        # Copies: a rate that is a tensor would be both optimizers'.
        for group, there in zip(
            param_groups, copy.deepcopy(state_dict["param_groups"]), strict=True
        ):
            names = there if saved is not None else (*SETTINGS, "initial_lr")
            kept = ("params", ENTRY)
            group.update({key: there[key] for key in names if key in there and key not in kept})
        self._source.accept_weights()
        self.hide(state)

    def prepare_to_load(self, saved_groups: Sequence[Mapping[str, Any]], state: State) -> None:
        """Give the tensors of a drained engine the shapes of a state with these groups.

        Raises:
            CheckpointError: The groups are not of a state of this optimizer.
        """
        engine = self._engine
        saved = saved_engine({"param_groups": saved_groups, "state": {}})
        if saved is None:
            raise CheckpointError("the parameter groups are not of a ZenFlowAdamW's state")
        if is_converted(engine, saved):
            raise CheckpointError(
                f"the state was saved with host_state={format_there(saved)!r} and is loaded in "
                f"place, into {engine.config.host_state!r}: make the optimizer with the state's, "
                "and convert what its state_dict() returns"
            )
        if engine.layout.topk_ratio != saved["topk_ratio"]:
            engine.abandon_step()
            engine.resize(saved["topk_ratio"])
            end_windows(engine)
            self.hide(state)

    def adamw_state(self, param_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a drained engine's state as one of `torch.optim.AdamW`.

        Raises:
            CheckpointError: The rule is the published one, with moments of means of gradients.
        """
        if not self._engine.config.is_exact:
            raise CheckpointError(
                'update_rule="published" has no moments of AdamW: only "exact" can be gone on '
                "with by torch.optim.AdamW"
            )
        return adamw_state(self._engine, self._places, param_groups)
