"""Weights on the host, of which the device holds a layer or two: three systems that stream them.

- MegaTrain (arXiv 2604.05091, infinity/model/cpu_master.py): backward loads layers once to
  compute a few layers' inputs again, and once more for gradients, with no load ahead of the
  computation. The CPU updates 16-bit weights, without masters, when backward is over.
- SlideFormer (arXiv 2603.16428, and its plugin in flagos-ai/Megatron-LM-FL): a window of two
  layers slides over the model. The host has no 16-bit weights: it casts masters for every load.
  It updates a layer while backward goes on, and the next forward waits for it where it needs it.
- RoundPipe (arXiv 2604.27085): every layer serves all micro-batches of a step before the next
  one is loaded. The CPU updates behind the next step, so every update is one step late.

Gradients go down as a layer's backward ends. All layers are streamed alike, embeddings too. Each
of several devices streams the whole model, and the host adds their gradients up. Whether layers
are recomputed is the workload's setting; each recomputed layer's input is counted as kept, of
which MegaTrain keeps one in four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import simpy

from sim.machine import Machine
from sim.memory_parts import (
    ACTIVATION_BUFFERS,
    FLOAT_BYTES,
    STATE_BYTES,
    DeviceParts,
    Part,
    SystemCase,
    SystemParts,
)
from sim.schedules.schedule import AbstractSchedule, Step, System, refuse_below_1
from sim.timing.costs import StepCosts

_SLOTS = 2
"""Number of layers whose weights the device holds: one computes while the next one comes."""

_LOGITS = 128
"""Tokens of each sequence whose logits are there at a time: MegaTrain's ``chunk_size``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Design:
    """Differences between the systems that stream weights."""

    updates: Literal["after", "layerwise", "late"]
    """Time of the CPU's update: after backward, layer by layer in it, or behind the next step."""
    update_bytes: float
    """Bytes of DRAM that an update moves for each parameter in 16 bits."""
    host: tuple[tuple[str, Literal["pageable", "pinned"], float], ...]
    """Host memory: name, place, bytes for each parameter in 16 bits."""
    in_rounds: bool = False
    """Whether a layer serves all micro-batches of a step while it is on the device."""


_MEGATRAIN = _Design(
    updates="after",
    # Gradient 2, moments in and out 16, weight in and out 4, a pinned copy of it 4.
    update_bytes=26.0,
    host=(
        ("weights to update", "pageable", 2.0),
        ("weights to upload", "pinned", 2.0),
        ("gradients", "pageable", 2.0),
        ("moments", "pageable", 8.0),
    ),
)
_SLIDEFORMER = _Design(
    updates="layerwise",
    # Gradient 2, states in and out 24, and masters cast (6) for each of two loads.
    update_bytes=38.0,
    host=(("optimizer state", "pageable", STATE_BYTES),),
)
_ROUNDPIPE = _Design(
    updates="late",
    # Gradients are cast to float32 (6), read 4; states in and out 24; weights cast (6).
    update_bytes=40.0,
    host=(
        ("optimizer state", "pageable", STATE_BYTES + FLOAT_BYTES),
        ("weights to upload", "pinned", 2.0),
        ("gradients", "pinned", 2.0),
    ),
    in_rounds=True,
)


class _Streaming(AbstractSchedule):
    """Passes over the layers, each of which is loaded when one of two slots is free."""

    design: _Design

    def __init__(self, machine: Machine, costs: StepCosts) -> None:
        """Start with both slots free."""
        super().__init__(machine, costs)
        self._used: list[simpy.Event] = []
        self._updated: dict[int, simpy.Event] = {}
        self._late: Sequence[simpy.Event] = ()

    def _step(self, step: int) -> Step:
        machine, count = self.machine, self.costs.accumulation
        rounds = [count] if self.design.in_rounds else [1] * count
        added: list[simpy.Event] = []
        for number, together in enumerate(rounds):
            self._forward(step, together)
            added += self._backward(step, together, is_last=number == len(rounds) - 1)
        assert self._last is not None
        yield self._last
        yield machine.compute("step", self.step_overhead, step)
        since = machine.env.now
        if self.design.updates == "after":
            yield from self.wait(added, "d2h", step)
            yield from self.wait([self._update(self.costs.num_params, step, ())], "host", step)
        elif self.design.updates == "late":
            yield from self.wait(self._late, "host", step)
            self._late = [self._update(self.costs.num_params, step, added)]
        return since

    def _forward(self, step: int, together: int) -> None:
        for index, segment in enumerate(self.costs.segments):
            room = self._room(index)
            done = self._load(index, "forward", together * segment.forward, step, room)
            self._leave_activations(index, step, done, together)

    def _backward(self, step: int, together: int, *, is_last: bool) -> list[simpy.Event]:
        """Queue backward over all layers; return the ends of what their gradients set off."""
        ends = []
        for index in reversed(range(len(self.costs.segments))):
            passed = self._pass_back(index, step, together)
            ends.append(self._leave(index, step, passed, is_last=is_last))
        return ends

    def _pass_back(
        self, index: int, step: int, together: int, *, ahead: bool = True
    ) -> simpy.Event:
        """Queue a layer's backward, of so many micro-batches; return its end."""
        seconds = together * self.costs.segments[index].backward
        arrived = self._fetch_activations(index, step, together)
        passed = self._load(index, "backward", seconds, step, arrived, ahead=ahead)
        self._passed = [*self._passed[1 - ACTIVATION_BUFFERS :], passed]
        return passed

    def _load(
        self,
        index: int,
        name: str,
        seconds: float,
        step: int,
        activations: Sequence[tuple[str, simpy.Event]] = (),
        *,
        ahead: bool = True,
    ) -> simpy.Event:
        """Queue a layer's way to the device and its work there; return the end of the work.

        Args:
            index: Of the layer.
            name: Of the work.
            seconds: That it takes.
            step: Its step.
            activations: Copies that it waits for besides, each with the cause of a stall by it.
            ahead: Whether it is loaded while the layer before computes.
        """
        machine, size = self.machine, self.costs.dtype_bytes
        free = self._used[-_SLOTS if ahead else -1 :][:1]
        updated = [("host", self._updated[index])] if index in self._updated else []
        work = machine.up(self.costs.segments[index].numel * size)
        before = [*free, *(event for _, event in updated)]
        arrived = machine.h2d.submit("weights", step, work, before)
        waits = [*updated, ("h2d", arrived), *activations]
        done = self.compute_behind(name, seconds, step, waits)
        self._used = [*self._used[-_SLOTS + 1 :], done]
        return done

    def _leave(self, index: int, step: int, passed: simpy.Event, *, is_last: bool) -> simpy.Event:
        """Queue what a layer's gradients set off; return its end."""
        machine, size = self.machine, self.costs.dtype_bytes
        numel = self.costs.segments[index].numel
        done = machine.d2h.submit("grads", step, machine.down(numel * size), [passed])
        if self.devices > 1 or (self.costs.accumulation > 1 and not self.design.in_rounds):
            work = machine.host_work(numel * 3.0 * size)  # read, and a sum read and written
            done = machine.host.submit("accumulate", step, work, [done])
        if is_last and self.design.updates == "layerwise":
            self._updated[index] = self._update(numel, step, [done])
        return done

    def _update(self, numel: float, step: int, after: Sequence[simpy.Event]) -> simpy.Event:
        """Queue the CPU's update of so many elements, of which each device has its part."""
        share = numel / self.devices
        late = self.design.updates == "late"
        work = self.machine.host_work(share * self.design.update_bytes)
        return self.machine.host.submit("adam", step, work, after, deadline=step + late)


class MegaTrain(_Streaming):
    """Two loads of a layer in backward, neither ahead of the computation, and a late update."""

    design = _MEGATRAIN

    def __init__(
        self, machine: Machine, costs: StepCosts, *, checkpoint_interval: int = 4
    ) -> None:
        """Take MegaTrain's option of this name.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            checkpoint_interval: Layers between two whose inputs forward keeps.

        Raises:
            ConfigError: It is below 1.
        """
        super().__init__(machine, costs)
        refuse_below_1("checkpoint_interval", checkpoint_interval)
        self._interval = checkpoint_interval

    def _backward(self, step: int, together: int, *, is_last: bool) -> list[simpy.Event]:
        segments, ends = self.costs.segments, []
        starts = range(0, len(segments), self._interval)
        for start in reversed(starts):
            block = range(start, min(start + self._interval, len(segments)))
            for index in block:
                self._load(index, "backward", segments[index].forward, step, ahead=False)
            for index in reversed(block):
                passed = self._pass_back(index, step, together, ahead=False)
                ends.append(self._leave(index, step, passed, is_last=is_last))
        return ends


class SlideFormer(_Streaming):
    """Updates layer by layer behind backward and the next forward."""

    design = _SLIDEFORMER


class RoundPipe(_Streaming):
    """All micro-batches in one pass over the layers, and updates a step late."""

    design = _ROUNDPIPE


def _memory(design: _Design, case: SystemCase) -> SystemParts:
    """Return two layers' weights on the device, and all states on the host."""
    largest = float(max(layer.numel for layer in case.workload.layers)) * case.size
    slots = Part("weights", "device", _SLOTS * largest, "of two layers")
    device = DeviceParts(
        always=[slots],
        in_flight=case.in_flight,
        gradients_after=case.in_flight,
        logits_share=min(1.0, _LOGITS / case.workload.sequence),
    )
    host = [Part(name, place, each * case.params) for name, place, each in design.host]
    if design.updates == "layerwise":
        whole = case.workload.accumulation > 1 or case.count > 1
        size = case.params * case.size if whole else case.in_flight
        host.append(Part("gradients", "pinned", size))
        host.append(Part("weights to upload", "pinned", largest, "of one layer"))
    return device, host


MEGATRAIN = System(
    name="megatrain",
    rule="AdamW on 16-bit weights without masters, so that small updates round away",
    schedule=MegaTrain,
    memory=partial(_memory, _MEGATRAIN),
)
SLIDEFORMER = System(
    name="slideformer",
    rule="AdamW exactly, without clipping by a global norm",
    schedule=SlideFormer,
    memory=partial(_memory, _SLIDEFORMER),
)
ROUNDPIPE = System(
    name="roundpipe",
    rule="AdamW with every update one step late",
    schedule=RoundPipe,
    memory=partial(_memory, _ROUNDPIPE),
)
