"""Published set-ups: all that a prediction of a published measurement gets to see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Quantity = Literal["step", "stall", "accumulating", "boundary", "host", "compute"]
"""Seconds: of a mean step; in which the device waits; of a window's steps without and with its
update; of the host's pass; of forward and backward alone."""


Scope = Literal["allocated", "reserved", "device"]
"""Bytes that a peak counts: PyTorch's tensors, its allocator's blocks, or the process's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """A step by the seconds of its phases."""

    strategy: str
    num_params: int
    forward: float
    backward: float
    d2h: float
    update: float
    h2d: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPass:
    """One pass of an optimizer over the parameters of one host."""

    machine: str
    devices: int
    num_params: float
    """Number of parameters of one host."""
    bytes_each: float | None = None
    """Bytes of DRAM for each, of a kernel alone; None is DeepSpeed's CPU step."""
    binds_cores: bool = True
    """Whether each device's part stays on one socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model, a machine from the table and a strategy."""

    model: str
    """Name in the table, or of ``config``."""
    machine: str
    devices: int
    """Number of devices of one host."""
    strategy: str
    batch_size: int
    """Sequences of a micro-batch on one device."""
    sequence: int
    accumulation: int = 1
    """Number of micro-batches of a step."""
    hosts: int = 1
    network: str | None = None
    """Network between the hosts; None is the machine's own."""
    checkpointing: float | str = False
    """Layers that are recomputed, as `sim.models.recomputation` has them."""
    offloads_activations: bool = False
    kernels: str = "eager"
    """Kernels of elementwise work, as `sim.models.kernels.KERNELS` names them."""
    attention: str = "fused"
    """Kernels of attention, one of `sim.models.workload.ATTENTIONS`. PyTorch's were ``fused`` when
    the rows were measured."""
    loss: str = "tokens"
    """Loss behind the last layer, one of `sim.models.workload.LOSSES`."""
    dtype: str = "bfloat16"
    """Type of weights, gradients and activations."""
    config: Mapping[str, Any] | None = None
    """Content of a config.json; None is the table's."""
    binds_cores: bool = True
    host_threads: int | None = None
    """Number of threads of each process; None is its share of the cores. torchrun's is 1."""
    trainer: str = "loop"
    """Code around the passes, one of `sim.models.workload.TRAINERS`."""
    launches: tuple[float, float] = (1.0, 1.0)
    """Host's time for a layer's forward and backward, over that of transformers' modules."""
    options: Mapping[str, Any] = field(default_factory=dict)


AnySetup = Phases | HostPass | Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another value that something unknown may have."""

    text: str
    setup: AnySetup | None = None
    """None is the measurement's own."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Values of the machine's figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One published figure."""

    label: str
    seconds: float
    quantity: Quantity
    setup: AnySetup
    group: str
    """Key of the measurement's group in `evidence/data/published`."""
    source: str
    assumption: str
    """Assumptions of the set-up about facts that the source does not state."""
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """One published fit, failure or peak of device memory."""

    label: str
    setup: Setup
    fits: bool = True
    """Whether the published run fitted."""
    peak: float | None = None
    """Bytes of one device at its fullest; None where only the fit is published."""
    scope: Scope = "allocated"
    """Bytes that ``peak`` counts."""
    source: str
    assumption: str
    """Assumptions of the set-up about facts that the source does not state."""
