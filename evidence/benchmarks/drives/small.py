"""A small model whose compute takes a known time, on a machine whose drive and link are slowed.

Each layer's forward sleeps, and its backward twice as long. So a step has the proportions of a
large model's on a GPU, and leaves a processor to the engine. Bytes go to a real drive and come
from it; each read and write takes at least as long as a drive of the given rates would.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from sim.hardware.components import Nvme
from sim.hardware.quantity import Quantity
from sim.simulate import Prediction, Strategy, simulate
from sim.timing import block_plan, drive_memory
from sim.timing.phases import costs_of_phases
from zenflow import PacedLink, ZenFlowAdamW, ZenFlowConfig, stream_weights
from zenflow.drive import disk, extents
from zenflow.lanes.copies import PacedDirection

SLOTS = 3
"""Visiting layers on the device."""
_ENDLESS = 1e15
"""Bytes per second of a link that nothing waits for."""
_SLEEPERS_CORES = 64
"""Cores of the predicted host: layers that sleep take none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A model of square matrices."""

    layers: int
    width: int
    seconds: float
    """Seconds of a layer's forward; its backward takes twice as many."""

    @property
    def num_params(self) -> int:
        """Number of elements of all matrices."""
        return self.layers * self.width**2

    def module(self) -> nn.Sequential:
        """Return the model, with the same weights each time."""
        torch.manual_seed(0)
        return nn.Sequential(*(_Layer(self.width, self.seconds) for _ in range(self.layers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second of a slowed machine."""

    read: float
    write: float
    link: float = _ENDLESS
    """Rate of each direction of the link."""


class _Timed(torch.autograd.Function):
    """Product of matrices that sleeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(x, weight)
        time.sleep(seconds)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return grad @ weight, grad.t() @ x, None


class _Layer(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.bfloat16) / width)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + _Timed.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return out


def pass_of(model: nn.Module, width: int) -> None:
    """Compute a step's gradients."""
    model(torch.ones(2, width, dtype=torch.bfloat16)).float().square().mean().backward()


class Run:
    """A training of a small model, whose turns are timed. `close` ends it.

    Attributes:
        optimizer: Its optimizer.
    """

    def __init__(
        self,
        small: Small,
        config: ZenFlowConfig,
        *,
        model: nn.Sequential | None = None,
        state_dir: str | None = None,
        link: float | None = None,
        streams: bool = False,
    ) -> None:
        """Make the optimizer.

        Args:
            small: The model.
            config: The update rule.
            model: The model's module, where it is there already.
            state_dir: Folder of states on a drive; None keeps them in memory.
            link: Bytes per second of each direction of the link; None for no pacing.
            streams: Whether layers visit the device.
        """
        self._width = small.width
        self._model = small.module() if model is None else model
        self._stream = None
        if streams:
            self._stream = stream_weights(
                self._model, "cpu", layers=list(self._model), slots=SLOTS
            )
        self._window = config.update_interval
        self.optimizer = ZenFlowAdamW(
            self._model.parameters(),
            lr=1e-4,
            config=config,
            host_threads=1,
            offload_gradients="release",
            link=None if link is None else PacedLink(link, link),
            timeline_steps=4,
            state_dir=state_dir,
        )

    def turn(self, steps: int) -> float:
        """Return the mean seconds of so many steps, behind a first window that catches up."""
        self._take(self._window)
        started = time.perf_counter()
        self._take(steps)
        return (time.perf_counter() - started) / steps

    def update_seconds(self) -> float:
        """Return the host's seconds of work in a step, of the last steps."""
        spans = [span for span in self.optimizer.timeline.spans if span.lane == "host"]
        steps = len({span.step for span in spans})
        return sum(span.end - span.start for span in spans) / max(1, steps)

    def _take(self, count: int) -> None:
        for _ in range(count):
            pass_of(self._model, self._width)
            self.optimizer.step()

    def close(self) -> None:
        """End the run."""
        self.optimizer.close()
        if self._stream is not None:
            self._stream.close()


@contextmanager
def slowed_drive(rates: Rates) -> Iterator[None]:
    """Let reads and writes of all states take as long as on a drive of these rates, at least."""
    ways = {"read": PacedDirection(rates.read), "write": PacedDirection(rates.write)}
    calls = {name: getattr(disk, name) for name in ways}

    def slowed(name: str) -> Any:
        def call(file: int, memory: Any, offset: int) -> None:
            with ways[name].carrying(memory.nbytes):
                calls[name](file, memory, offset)

        return call

    with mock.patch.multiple(disk, **{name: slowed(name) for name in ways}):
        yield


@contextmanager
def extents_of(elements: int) -> Iterator[None]:
    """Cut states into extents of so many elements, in the engine and in predictions of it.

    Buffers are then as small a share of a small model's states as of a large one's.
    """
    block_plan._host_memory.cache_clear()
    with (
        mock.patch.object(extents, "EXTENT_ELEMENTS", elements),
        mock.patch.object(drive_memory, "EXTENT_ELEMENTS", elements),
    ):
        yield
    block_plan._host_memory.cache_clear()


def predicted(
    small: Small,
    strategy: Strategy,
    rates: Rates,
    *,
    alone: float,
    update: float,
) -> Prediction:
    """Return the prediction of a step.

    Args:
        small: The model.
        strategy: The update rule, and where weights and states are.
        rates: The machine.
        alone: Seconds of a step that waits for nothing.
        update: Seconds of the host's pass over all states for one gradient.
    """
    forward = small.layers * small.seconds
    copy = 2 * small.num_params / rates.link
    costs = costs_of_phases(
        forward=forward, backward=alone - forward, d2h=copy, update=update, h2d=copy,
        num_params=small.num_params, num_layers=small.layers,
    )  # fmt: skip
    whole = costs.hardware
    ways: Mapping[str, Quantity] = {
        "read": Quantity(value=rates.read),
        "write": Quantity(value=rates.write),
        "capacity": Quantity(value=1e15),
    }
    hardware = replace(
        whole,
        device=replace(whole.device, is_cpu=True),  # which launches nothing ahead
        host=replace(whole.host, cores=_SLEEPERS_CORES),
        nvme=Nvme(name="slowed", **ways),
    )
    return simulate(replace(costs, hardware=hardware), strategy)
