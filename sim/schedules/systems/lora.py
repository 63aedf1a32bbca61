"""LoRA and QLoRA: frozen weights on the device, and trained adapters of low rank beside them.

By Hu et al. 2021 and Dettmers et al. 2023. A matrix W (O, I) gets A (r, I) and B (O, r), and only
these are trained. So backward makes no gradients of W: one product for each of forward's, not two.
QLoRA keeps W in 4 bits (NF4) and turns it to 16 bits before every product with it. Both fit a
model to other weights than full fine-tuning does: what is learned is not compared here.

Adapters, their gradients and moments are float32, as PEFT has them under automatic casts. Dropout
before the adapters is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from sim.machine import Machine
from sim.memory_parts import FLOAT_BYTES, DeviceParts, Part, SystemCase, SystemParts
from sim.models.activations import Activations
from sim.models.kernels import Passes
from sim.models.shapes.parts import Layer, Parameter
from sim.models.work import LayerWork, Work
from sim.models.workload import Workload
from sim.schedules.schedule import System, refuse_below_1
from sim.schedules.systems.on_device import OnDevice
from sim.timing.costs import StepCosts, layer_seconds
from sim.timing.segments import Segment, delayed
from sim.timing.trainers import trainer_seconds
from zenflow.config import unknown_name
from zenflow.errors import ConfigError

TARGETS = ("all", "attention")
"""Matrices of the layers with attention that get adapters: all, or attention's own."""
_ATTENTION = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "c_attn", "c_proj",
     "query", "key", "value", "attention.output", "q_a_proj", "q_b_proj",
     "kv_a_proj_with_mqa", "kv_b_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z",
     "in_proj_a", "in_proj_b", "in_proj", "x_proj", "dt_proj", "mamba.out_proj", "conv.in_proj",
     "conv.out_proj")
)  # fmt: skip
_NO_PRODUCTS = ("conv1d.", "A_log")
"""Beginnings of the names of tensors with two dimensions that no product is with."""
_KERNELS = 4
"""Kernels of an adapter's forward: two products, a scaling, a sum."""
_MODULES = 10
"""Modules that PEFT 0.21 adds for each target: a wrapper, a dropout, both matrices, and six
dictionaries, of these three and of what adapters of other kinds have."""

_BLOCK, _BLOCKS_OF_SCALES = 64, 256
"""Elements of NF4 that share a scale, and scales that share one of their own."""


def nf4_bytes() -> float:
    """Return the bytes of an element in NF4 with double quantisation (Dettmers et al. 2023, 3).

    4 bits, an 8-bit scale for 64 elements, and a float32 one for 256 scales: 4.127 bits.
    """
    return (4.0 + 8.0 / _BLOCK + 32.0 / (_BLOCK * _BLOCKS_OF_SCALES)) / 8.0


class Lora(OnDevice):
    """Forward and backward with frozen weights, AdamW over the adapters alone.

    Of phases whose workload is not known only the adapters' own update is counted.
    """

    _unpacked_bytes = 0.0
    """Bytes of device memory moved for an element that is turned to 16 bits for a pass."""

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        lora_rank: int = 16,
        lora_targets: str = "all",
    ) -> None:
        """Put adapters beside the weights.

        Args:
            machine: What it runs on.
            costs: Of one step of the whole model.
            lora_rank: Rank of every adapter, r.
            lora_targets: Matrices with adapters, one of `TARGETS`.

        Raises:
            ConfigError: An option breaks its rule.
        """
        _check(lora_rank, lora_targets, costs.workload)
        if costs.workload is None:
            segments = tuple(_of_phases(costs, lora_rank))
        else:
            work = costs.workload
            own = _adapted(costs, work, lora_rank, lora_targets, self._unpacked_bytes)
            targets = sum(len(_matrices(layer, lora_targets)) for layer in work.layers)
            waiting = trainer_seconds(work, more_modules=_MODULES * targets)
            segments = delayed(tuple(own), waiting)
        super().__init__(machine, replace(costs, segments=segments, dtype_bytes=FLOAT_BYTES))


class Qlora(Lora):
    """LoRA with frozen weights in NF4, whose scales are quantised too.

    Every pass reads a matrix in 4 bits and writes it in 16, and its scales in float32 twice.
    """

    _unpacked_bytes = nf4_bytes() + 2.0 + 2.0 * FLOAT_BYTES / _BLOCK

    def __init__(
        self,
        machine: Machine,
        costs: StepCosts,
        *,
        lora_rank: int = 16,
        lora_targets: str = "all",
        keeps_inputs: bool = False,
    ) -> None:
        """Put adapters beside the weights.

        Args:
            machine: What it runs on.
            costs: Of one step of the whole model.
            lora_rank: As LoRA's.
            lora_targets: As LoRA's.
            keeps_inputs: Whether products keep their inputs although nothing reads them, as in
                bitsandbytes before 0.43.2 (autograd/_functions.py, pull request 1270). Memory
                alone depends on it.
        """
        del keeps_inputs
        super().__init__(machine, costs, lora_rank=lora_rank, lora_targets=lora_targets)


def _check(rank: int, targets: str, workload: Workload | None) -> None:
    refuse_below_1("lora_rank", rank)
    if workload is not None and workload.keeps_products:
        raise ConfigError(
            f"checkpointing {workload.checkpointing!r} counts a layer's products, and adapters "
            "have their own between them: take a share of the layers"
        )
    if targets not in TARGETS:
        raise ConfigError(f"lora_targets {unknown_name(targets, TARGETS)}")


def _matrices(layer: Layer, targets: str = "all") -> list[Parameter]:
    """Return the matrices of a layer with attention that are targets."""
    if not layer.is_inner:
        return []
    matrices = [
        p for p in layer.parameters if len(p.shape) > 1 and not p.name.startswith(_NO_PRODUCTS)
    ]
    if targets == "all":
        return matrices
    return [p for p in matrices if p.name.removesuffix(".weight") in _ATTENTION]


def adapters(workload: Workload, rank: int, targets: str = "all") -> int:
    """Return the number of elements of all adapters: r (I + O) for each target."""
    return sum(rank * sum(p.shape) for layer in workload.layers for p in _matrices(layer, targets))


def _of_phases(costs: StepCosts, rank: int) -> Iterator[Segment]:
    for segment in costs.segments:
        yield replace(segment, matrices=_pairs(segment.matrices, rank), vectors=0)


def _pairs(shapes: tuple[tuple[int, ...], ...], rank: int) -> tuple[tuple[int, int], ...]:
    return tuple(pair for out, into in shapes for pair in ((rank, into), (out, rank)))


def _adapted(
    costs: StepCosts, workload: Workload, rank: int, targets: str, unpacked_bytes: float
) -> Iterator[Segment]:
    """Yield each layer's segment with its weights frozen and adapters beside them."""
    if workload.traced is not None:
        raise ConfigError("a trace is of the training that it has: leave out --from-trace")
    device, is_compiled = costs.hardware.device, workload.kernels == "compiled"
    works, leaving = Work(workload).all(), Activations(workload).leaving_bytes()
    again = workload.recomputed
    for index, (layer, work, away) in enumerate(zip(workload.layers, works, leaving, strict=True)):
        forward, backward = layer_seconds(
            work, device, workload.dtype, is_frozen=True, is_compiled=is_compiled
        )
        chosen = _matrices(layer, targets)
        added = adapter_work(workload, chosen, rank)
        more = layer_seconds(added, device, workload.dtype, is_compiled=is_compiled)
        frozen = sum(p.numel for p in _matrices(layer))
        unpacked = unpacked_bytes * frozen / costs.elementwise_bandwidth
        forward += more[0] + unpacked
        backward += more[1] + unpacked
        if again[index]:
            backward += forward
        yield Segment(
            name=layer.name,
            forward=forward,
            backward=backward if index else 0.0,  # nothing below the first adapter is trained
            matrices=_pairs(tuple(p.shape for p in chosen), rank),
            leaving=away,
        )


def adapter_work(workload: Workload, targets: list[Parameter], rank: int) -> LayerWork:
    """Return the forward of a layer's adapters.

    Beside their products: B's output is scaled and added to the layer's; backward scales its
    gradient, and adds A's to the gradient of the layer's input.

    Args:
        workload: Model and batch.
        targets: Matrices that have adapters.
        rank: Of the adapters.
    """
    size, tokens = workload.dtype_bytes, workload.tokens
    inputs = tokens * sum(p.active * p.shape[-1] for p in targets)
    outputs = tokens * sum(p.active * p.shape[0] for p in targets)
    between = tokens * rank * sum(p.active for p in targets)
    return LayerWork(
        matmul_flop=2.0 * rank * (inputs + outputs),
        num_matmuls=2 * len(targets),
        attention_flop=0.0,
        elementwise_bytes=Passes(5 * outputs, 2 * outputs + 3 * inputs) * size,
        weight_bytes=float(size * rank * sum(sum(p.shape) for p in targets)),
        product_bytes=size * (inputs + 2 * between + outputs),
        num_kernels=_KERNELS * len(targets),
    )


def _memory(case: SystemCase, *, quantises: bool) -> SystemParts:
    """Return frozen weights, and 16 bytes for each element of an adapter."""
    work, rank, targets = case.workload, case.options["lora_rank"], case.options["lora_targets"]
    _check(rank, targets, work)
    trained = adapters(work, rank, targets)
    frozen = sum(p.numel for layer in work.layers for p in _matrices(layer)) if quantises else 0
    always = [
        Part("weights", "device", case.size * (case.params - frozen)),
        Part("adapters", "device", float(FLOAT_BYTES * trained), "float32"),
        Part("optimizer state", "device", 2.0 * FLOAT_BYTES * trained / case.count),
    ]
    if quantises:
        largest = max(p.numel for layer in work.layers for p in _matrices(layer))
        always += [
            Part("quantised weights", "device", nf4_bytes() * frozen, "NF4, scales quantised"),
            Part("unpacked matrix", "device", float(case.size * largest)),
        ]
    gradients = float(FLOAT_BYTES * trained)
    device = DeviceParts(
        always=always,
        in_flight=gradients,
        gradients_before=gradients if work.accumulation > 1 else 0.0,
        gradients_after=gradients,
        trains_tables=False,
        layer_activations=_less_activations(
            work, rank, targets, keeps_inputs=bool(case.options.get("keeps_inputs"))
        ),
    )
    return device, []


def _less_activations(workload: Workload, rank: int, targets: str, *, keeps_inputs: bool) -> float:
    """Return the bytes by which a layer's activations differ from full training's.

    A frozen matrix without an adapter needs no input, which it may keep all the same. An adapter
    keeps what is between A and B.
    """
    layer = next(layer for layer in workload.layers if layer.is_inner)
    chosen = _matrices(layer, targets)
    between = sum(p.active for p in chosen) * rank
    spared = 0.0
    if targets == "attention" and not keeps_inputs:
        spared = workload.hidden + layer.inner_width
    return workload.tokens * workload.dtype_bytes * (between - spared)


LORA = System(
    name="lora",
    rule="AdamW on adapters of low rank beside frozen weights: not full fine-tuning",
    schedule=Lora,
    memory=partial(_memory, quantises=False),
)
QLORA = System(
    name="qlora",
    rule="AdamW on adapters of low rank beside frozen 4-bit weights: not full fine-tuning",
    schedule=Qlora,
    memory=partial(_memory, quantises=True),
)
