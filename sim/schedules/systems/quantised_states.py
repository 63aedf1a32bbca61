"""AdamW whose moments stay on the device in 8 or 4 bits (Dettmers et al. 2022; Li et al. 2023).

Formats are those of torchao.optim, and of bitsandbytes from 0.44 on for 8 bits: a float32 scale
for each block of each moment, and tensors below 4096 elements in float32. An update is one pass
over weight, gradient and moments. No master is kept unless it is asked for: 16-bit weights then
lose updates below half of their last digit, or round stochastically.

Paged moments are bitsandbytes': in memory that the driver moves between device and host. Here they
wait on the host, and a step moves all of them both ways.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import simpy

from sim.machine import Machine
from sim.memory_parts import FLOAT_BYTES, Part, SystemCase, SystemParts
from sim.models.workload import Workload
from sim.schedules.schedule import System
from sim.schedules.systems.on_device import OnDevice
from sim.timing.costs import StepCosts
from zenflow.errors import ConfigError

_LEAST_QUANTISED = 4096
"""Elements below which a tensor's moments are float32: bitsandbytes' ``min_8bit_size``."""


@dataclass(frozen=True, slots=True)
class MomentFormat:
    """Storage format of both moments of a tensor."""

    bits: int
    """Bits of an element of one moment."""
    block: int
    """Number of elements that share a scale."""

    def bytes_of(self, numel: int) -> float:
        """Return the bytes of both moments of a tensor with so many elements."""
        if numel < _LEAST_QUANTISED:
            return 2.0 * FLOAT_BYTES * numel
        return 2.0 * (numel * self.bits / 8 + FLOAT_BYTES * math.ceil(numel / self.block))


EIGHT_BITS = MomentFormat(bits=8, block=256)
FOUR_BITS = MomentFormat(bits=4, block=128)


class _QuantisedStates(OnDevice):
    """`OnDevice` with another update: bytes over the bandwidth of elementwise operations."""

    moments: MomentFormat

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        float32_master: bool = False,
        float_embeddings: bool = False,
        paged: bool = False,
        in_backward: bool = False,
    ) -> None:
        """Settle which weights and moments stay in full precision, and where moments are.

        Args:
            machine: What it runs on.
            costs: Of one step of the model.
            float32_master: Whether there are float32 weights beside 16-bit ones.
            float_embeddings: Whether moments of embeddings are float32, as Hugging Face's Trainer
                has it for bitsandbytes.
            paged: Whether moments wait on the host, so that the device need not have room for
                them. Where it has, the driver leaves them there, and this is the longest that a
                step may take.
            in_backward: Whether each weight is updated as soon as backward has its gradient,
                which is freed then, as torchtune's ``optimizer_in_bwd``. A step takes as long.

        Raises:
            ConfigError: Gradients are updated in backward, and there are several micro-batches,
                or several devices.
        """
        super().__init__(machine, costs)
        if in_backward and (costs.accumulation > 1 or self.devices > 1):
            raise ConfigError(
                "in_backward updates by the gradients of one micro-batch of one device, got "
                f"{costs.accumulation} of each of {self.devices}"
            )
        size = costs.dtype_bytes
        moments = _moments(self.moments, _tensors(costs), float_embeddings=float_embeddings)
        weight = 2 * FLOAT_BYTES + size if float32_master and size < FLOAT_BYTES else 2 * size
        self._bytes_each = size + weight + 2 * moments / costs.num_params
        self._paged = moments / self.devices if paged else 0.0

    def _fetched(self, step: int) -> list[simpy.Event]:
        """Queue the copy of paged moments to the device."""
        if not self._paged:
            return []
        return [self.machine.h2d.submit("states", step, self.machine.up(self._paged))]

    def _sent_home(self, step: int) -> list[simpy.Event]:
        """Queue the copy of paged moments to the host, behind which there is room again."""
        if not self._paged:
            return []
        return [self.machine.d2h.submit("states", step, self.machine.down(self._paged))]

    def update_seconds(self, elements: float) -> float:
        """Return the seconds of a pass that reads and writes weights and moments."""
        return elements * self._bytes_each / self.costs.elementwise_bandwidth


class AdamW8bit(_QuantisedStates):
    """AdamW with both moments in 8 bits."""

    moments = EIGHT_BITS


class AdamW4bit(_QuantisedStates):
    """AdamW with both moments in 4 bits."""

    moments = FOUR_BITS


def _tensors(costs: StepCosts) -> list[tuple[bool, int]]:
    """Return for each tensor whether it is an embedding, and its elements."""
    if costs.workload is not None:
        return _tensors_of(costs.workload)
    return [
        (False, numel)
        for segment in costs.segments
        for numel in (*(rows * columns for rows, columns in segment.matrices), segment.vectors)
    ]


def _tensors_of(workload: Workload) -> list[tuple[bool, int]]:
    first = workload.layers[0]
    return [(layer is first, p.numel) for layer in workload.layers for p in layer.parameters]


def _moments(
    moments: MomentFormat, tensors: Iterable[tuple[bool, int]], *, float_embeddings: bool
) -> float:
    """Return the bytes of both moments of all tensors."""
    return sum(
        2.0 * FLOAT_BYTES * numel if float_embeddings and is_table else moments.bytes_of(numel)
        for is_table, numel in tensors
    )


def _memory(moments: MomentFormat, case: SystemCase) -> SystemParts:
    """Return states of which each device holds a part, as under ZeRO-1."""
    own = _moments(
        moments,
        _tensors_of(case.workload),
        float_embeddings=case.options["float_embeddings"],
    )
    note = f"moments in {moments.bits} bits"
    parts = [Part("optimizer state", "device", own / case.count, note)]
    hosted: list[Part] = []
    if case.options["paged"]:
        parts, hosted = [], [Part("optimizer state", "pageable", own, f"{note}, paged")]
    if case.options["float32_master"] and case.size < FLOAT_BYTES:
        parts.append(Part("masters", "device", FLOAT_BYTES * case.params / case.count))
    if case.options["in_backward"]:
        return case.device(*parts, in_flight=float(case.largest * case.size)), hosted
    return case.device(*parts, after=case.params * case.size), hosted


ADAMW_8BIT = System(
    name="adamw_8bit",
    rule="AdamW with moments in 8 bits",
    schedule=AdamW8bit,
    memory=partial(_memory, EIGHT_BITS),
)
ADAMW_4BIT = System(
    name="adamw_4bit",
    rule="AdamW with moments in 4 bits",
    schedule=AdamW4bit,
    memory=partial(_memory, FOUR_BITS),
)
