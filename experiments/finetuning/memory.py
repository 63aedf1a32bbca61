"""Memory of a fine-tuning before any of it is allocated: refusals, and a table with its sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.finetuning.settings import FineTuning
from experiments.output.files import free_space
from experiments.training.parts.memory_check import (
    check_device_memory,
    check_host_memory,
    memory_of_engine,
)
from experiments.training.parts.streams import stream_arguments
from experiments.training.run.saved.space import check_room
from sim.hardware.catalog import find_machine
from sim.hardware.profile import HardwareProfile
from sim.memory.need import memory_of
from sim.memory.saved import checkpoint_bytes
from sim.memory_parts import Part
from sim.schedules.streams import Streams
from sim.simulate import Strategy
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError
from zenflow.host.limits import free_bytes
from zenflow.report import readable

if TYPE_CHECKING:
    import torch

_STAND_IN = "rtx4090-desktop"
"""A machine with a GPU: the parts that are asked for are the same on any."""
_OF_THE_HOST = ("pageable", "pinned")
"""Places in the host's memory."""
_OF_A_GPU = ("framework", "allocator's reserve")
"""Parts that a CPU in the device's place does not have."""
_LEAST_SHOWN = 0.01
"""Smallest share of a place's sum that has a line of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedMemory:
    """Bytes of a run by place, and of its files."""

    parts: tuple[Part, ...]
    """Bytes by place and purpose, those of the fullest moment of a step."""
    checkpoint: int
    """Bytes of a checkpoint."""
    activations: bool
    """Whether activations are among the parts: the simulator knows the model's family."""
    told_of_disk: str
    """Words on the room for checkpoints."""

    def at(self, *places: str) -> float:
        """Return the sum of the parts in these places: device, pageable, pinned."""
        return sum(part.num_bytes for part in self.parts if part.place in places)

    @property
    def device(self) -> float:
        """Bytes of the device at the fullest moment of a step."""
        return self.at("device")

    @property
    def host(self) -> float:
        """Bytes of the host's memory."""
        return self.at(*_OF_THE_HOST)

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as plain JSON values."""
        return {
            "device_bytes": self.device,
            "host_bytes": self.host,
            "checkpoint_bytes": self.checkpoint,
            "with_activations": self.activations,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A run's model before its weights have any memory, and where they will be."""

    settings: FineTuning
    """Settings of the run."""
    model: Any
    """Model of which only shapes and dtypes are looked at."""
    device: torch.device
    """Device on which the run computes."""
    config: ZenFlowConfig
    """Configuration that the run starts from."""
    streams: Mapping[str, Any] | None
    """Arguments of `stream_weights`; None where all weights stay on the device."""

    @classmethod
    def of(
        cls, settings: FineTuning, model: Any, device: torch.device, config: ZenFlowConfig
    ) -> Placed:
        """Return the run with what `--stream` comes to on this device."""
        streams = stream_arguments(model, config, device, settings.run)
        return cls(settings=settings, model=model, device=device, config=config, streams=streams)

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return sum(p.nbytes for p in self.model.parameters())

    @property
    def on_drive(self) -> bool:
        """Whether the host's states are on a drive."""
        return self.settings.run.state_dir is not None


def expect(run: Placed, folder: Path, *, has_one: bool) -> ExpectedMemory:
    """Return the memory that a run will take, and refuse checkpoints that have no room.

    Args:
        run: The run.
        folder: Where checkpoints go.
        has_one: Whether one is there already.

    Raises:
        NoRoomError: The disk has no room for checkpoints.
    """
    settings, weights = run.settings, run.weights
    engine = memory_of_engine(run.model, run.config, on_drive=run.on_drive)
    size = checkpoint_bytes(engine) + weights
    told = "checkpoint: none (--no-checkpoint)"
    if settings.run.checkpoint:
        told = check_room(size, free_space(folder), folder, has_one=has_one)
    try:
        parts, activations = _simulated(run), True
    except ConfigError:  # a family that the simulator does not know
        plan = engine.plan(has_ring=settings.run.gradients == "release")
        beside = plan.device_extra_bytes + plan.device_ring_bytes + plan.device_step_bytes
        parts, activations = (
            (
                Part("weights", "device", weights),
                Part("optimizer", "device", beside),
                Part("optimizer", "pageable", plan.host_bytes),
            ),
            False,
        )
    if run.device.type == "cpu":
        parts = tuple(part for part in parts if part.name not in _OF_A_GPU)
    return ExpectedMemory(parts=parts, checkpoint=size, activations=activations, told_of_disk=told)


def _simulated(placed: Placed) -> tuple[Part, ...]:
    """Return the parts that the simulator expects.

    Raises:
        ConfigError: It does not know the model's family.
    """
    run, streams = placed.settings.run, placed.streams
    stay = None if streams is None else Streams(resident_layers=streams["resident_layers"] or 0)
    strategy = Strategy.of(run.strategy, releases=run.gradients == "release", streams=stay)
    workload = run.workload(placed.model.config.to_dict())
    strategy = replace(strategy, config=placed.config, state_on_drive=placed.on_drive)
    return memory_of(workload, strategy, _machine()).parts


def _machine() -> HardwareProfile:
    """Return a machine with a GPU and this host's memory."""
    found = find_machine(_STAND_IN, 1)
    dram = replace(found.host.dram_bytes, value=max(1.0, free_bytes()[0]))
    return replace(found, host=replace(found.host, dram_bytes=dram))


def check(placed: Placed) -> None:
    """Refuse a run whose optimizer and weights can't have the memory that they take for sure.

    Raises:
        NoRoomError: Host or device have not as much.
    """
    run, config = placed.settings.run, placed.config
    if not run.memory_check:
        return
    on_cpu, streams = placed.device.type == "cpu", placed.streams is not None
    sums_wait = run.grad_accum > 1 and (streams or run.offload_sums)
    beside = placed.weights * ((on_cpu or streams) + sums_wait)
    check_host_memory(placed.model, config, on_cpu=on_cpu, on_drive=placed.on_drive, beside=beside)
    if not on_cpu:
        there = 0 if streams else placed.weights
        check_device_memory(placed.model, config, placed.device, beside=there)


def table(expected: ExpectedMemory, device: torch.device) -> str:
    """Return the parts that count, their sums, and what a checkpoint takes, in lines."""
    name = "device" if device.type != "cpu" else "device (this CPU)"
    lines = ["Memory, expected by the simulator before anything is allocated:"]
    lines += _lines(name, [part for part in expected.parts if part.place == "device"])
    lines += _lines("host", [part for part in expected.parts if part.place in _OF_THE_HOST])
    lines += _lines("drive", [part for part in expected.parts if part.place == "nvme"])
    if not expected.activations:
        lines.append("  Activations come on top: the simulator does not know this family.")
    return "\n".join([*lines, f"  {expected.told_of_disk}"])


def _lines(name: str, parts: Sequence[Part]) -> list[str]:
    """Return a place's sum and its parts, the largest first; nothing where nothing is."""
    if not parts:
        return []
    total = sum(part.num_bytes for part in parts)
    lines = [f"  {name:<24}{readable(total):>9}   in sum"]
    for part in sorted(parts, key=lambda part: -part.num_bytes):
        if part.num_bytes >= _LEAST_SHOWN * total:
            line = f"    {part.name:<22}{readable(part.num_bytes):>9}   {part.note}"
            lines.append(line.rstrip())
    return lines


def doubt(expected: ExpectedMemory, device: torch.device) -> str | None:
    """Return a warning where a device has less memory than is expected; None elsewhere."""
    if device.type == "cpu":
        return None
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    if expected.device <= total:
        return None
    return (
        f"Warning: the step is expected to take {readable(expected.device)} of the device's "
        f"{readable(total)}, and may run out: lower --batch-size, --sequence or --topk-ratio, or "
        "let layers visit it with --stream --topk-ratio 0"
    )
