"""SharedController: one rank's controller decides for all ranks, which act at the same step.

A decision may follow from seconds, which differ from rank to rank. So one rank decides, and tells
the others while the next step is computed. All act when that step ends, so that no rank waits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from zenflow.controller import AbstractController, ObservedTimeline
from zenflow.errors import CheckpointError
from zenflow.knobs import Knobs
from zenflow.report import StepReport

_MESSAGE_BYTES = 512
_LATER = 1
"""Number of steps from a decision to its execution."""
_SHARED = ("measures_windows", "curve_interval", "least_topk_ratio", "largest_interval",
           "timeline_steps")  # fmt: skip
"""Attributes of the controller that all ranks' optimizers need."""
_STATE = "shared"


class SharedController(AbstractController):
    """Lets the controller of rank 0 decide for all ranks.

    All ranks make one, before their optimizers; they also call ``state_dict`` together. The
    controller is asked a step ahead, with the number of the step after which its decision comes in
    force, and the newest report. In a process without ranks it is asked as early.
    """

    def __init__(
        self, controller: AbstractController | None, *, last_step: int | None = None
    ) -> None:
        """Tell the other ranks the controller's needs.

        Args:
            controller: Controller of the first rank; None on all others.
            last_step: Number of steps of the run, read on the first rank: no decision is taken for
                later ones. None for a run without a known end.
        """
        self._controller = controller
        self._group: Any = None
        if distributed.is_available() and distributed.is_initialized():
            self._group = distributed.new_group(backend="gloo")
        self._last_step = self._of_first(last_step)
        own = [] if controller is None else [getattr(controller, name) for name in _SHARED]
        for name, value in zip(_SHARED, self._of_first(own), strict=True):
            setattr(self, name, value)
        self._message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        self._under_way: Any = None
        self._decided: Knobs | None = None
        looks = True if controller is None else controller.looks_at_windows
        self.looks_at_windows = self._of_first(looks)

    def next_knobs(self, step: int, report: StepReport | None, knobs: Knobs) -> Knobs:
        """Return the decision of a step ago; on the first rank, decide for the next step."""
        self._take()
        decided = knobs if self._decided is None else self._decided
        self._decided = None
        ahead = step + _LATER
        if self._last_step is not None and ahead > self._last_step:
            return decided
        if self._controller is not None:
            new = self._controller.next_knobs(ahead, report, decided)
            self._write({"knobs": new.to_dict(), "looks": self._controller.looks_at_windows})
        if self._group is not None:
            self._under_way = distributed.broadcast(
                self._message, src=0, group=self._group, async_op=True
            )
        else:
            self._read()
        return decided

    def _write(self, message: Mapping[str, Any]) -> None:
        text = json.dumps(message).encode().ljust(_MESSAGE_BYTES)
        self._message.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def _take(self) -> None:
        """Wait for a decision that is under way."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
            self._read()

    def _read(self) -> None:
        message = json.loads(bytes(self._message.tolist()))
        self._decided = Knobs(**message["knobs"])
        self.looks_at_windows = message["looks"]

    def _of_first(self, value: Any) -> Any:
        if self._group is None:
            return value
        found = [value]
        distributed.broadcast_object_list(found, src=0, group=self._group)
        return found[0]

    def attach(self, observed: ObservedTimeline) -> None:
        """Hand the first rank's timeline on to the controller."""
        if self._controller is not None:
            self._controller.attach(observed)

    @property
    def search_seconds(self) -> float:
        """CPU seconds of the controller's search; 0 on ranks that have none."""
        return 0.0 if self._controller is None else self._controller.search_seconds

    def close(self) -> None:
        """End the controller's own threads and processes."""
        if self._controller is not None:
            self._controller.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state with the decision to come, the same on all ranks."""
        self._take()
        inner = self._of_first({} if self._controller is None else self._controller.state_dict())
        decided = None if self._decided is None else self._decided.to_dict()
        return {_STATE: inner, "decided": decided, "looks": self.looks_at_windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state of ``state_dict``, or of a controller that was not shared.

        Raises:
            CheckpointError: The state isn't this controller's.
        """
        self._take()
        self._decided = None
        inner: Mapping[str, Any] = state
        if _STATE in state:
            try:
                inner, decided = state[_STATE], state["decided"]
                self.looks_at_windows = bool(state["looks"])
            except KeyError as error:
                raise CheckpointError(
                    f"the state of a SharedController lacks {error}: resume with the controller "
                    "that was saved"
                ) from error
            self._decided = None if decided is None else Knobs.from_dict(decided)
        if self._controller is not None:
            self._controller.load_state_dict(inner)
