"""What other systems hold, by their papers and by measurements of their code. No torch.

Each device of several updates an equal part of the model, so that the host holds all of it once;
weights are whole on every device, as the schedules have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sim.hardware.profile import HardwareProfile
from sim.machine import Machine
from sim.memory.engine import rounded
from sim.memory.parts import DeviceParts, Part
from sim.models.workload import Workload
from sim.schedules.deep_optimizer_states import DeepOptimizerStates
from sim.simulate import Strategy
from sim.timing.costs import costs_of
from zenflow.config import unknown_name
from zenflow.errors import ConfigError

_STATE = 12.0
"""Of an element: master and two moments in float32."""
_FLOAT = 4.0
_REDUCE_BUCKET = 500_000_000
"""Elements: DeepSpeed's default ``reduce_bucket_size``, one contiguous buffer without
``overlap_comm``."""
_RELEASED_BYTES = 28.0
"""Of an element on the host with ZeRO-2 and CPU offload, as measured (DeepSpeed issue 7693):
master 4, gradient 4, moments 8, 2 of 16-bit weights to upload; the rest is temporaries of
unscaling, clipping and the Adam call."""

Parts = tuple[DeviceParts, list[Part]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What all recipes go by."""

    workload: Workload
    strategy: Strategy
    hardware: HardwareProfile

    @property
    def size(self) -> int:
        """Bytes of an element of the model."""
        return self.workload.dtype_bytes

    @property
    def params(self) -> float:
        """Elements of the model."""
        return float(self.workload.num_params)

    @property
    def count(self) -> int:
        """Devices."""
        return self.hardware.num_devices

    @property
    def in_flight(self) -> float:
        """Bytes of gradients while they leave: one layer's, and the next one's behind it."""
        largest = max(layer.numel for layer in self.workload.layers)
        return min(self.params, 2.0 * largest) * self.size

    def option(self, name: str, default: float) -> float:
        """Return an option of the strategy."""
        return float(self.strategy.options.get(name, default))

    def device(
        self, *more: Part, in_flight: float | None = None, after: float | None = None
    ) -> DeviceParts:
        """Return the parts of a device that holds all weights.

        Args:
            more: Parts beside the weights.
            in_flight: Bytes of gradients in backward; None is `_Case.in_flight`.
            after: Bytes of gradients when it ends; None is the same.
        """
        leaving = self.in_flight if in_flight is None else in_flight
        whole = self.params * self.size
        return DeviceParts(
            always=[Part("weights", "device", whole), *more],
            in_flight=leaving,
            gradients_before=whole if self.workload.accumulation > 1 else 0.0,
            gradients_after=leaving if after is None else after,
        )

    def pinned(self, name: str, bytes_each: float, note: str = "") -> list[Part]:
        """Return a pinned buffer of each device's part of the model, with its rounding."""
        share = self.params / self.count * bytes_each
        return [
            Part(name, "pinned", self.count * share, note),
            Part(
                f"rounding of {name}", "pinned", self.count * (rounded(share) - share),
                "to a power of two",
            ),
        ]  # fmt: skip


def system_parts(workload: Workload, strategy: Strategy, hardware: HardwareProfile) -> Parts:
    """Return what one device holds, and what lies on the host and its drives.

    Raises:
        ConfigError: No recipe is known for the strategy.
    """
    if strategy.name not in RECIPES:
        raise ConfigError(f"the memory of {unknown_name(strategy.name, RECIPES)}")
    return RECIPES[strategy.name](_Case(workload=workload, strategy=strategy, hardware=hardware))


def _on_device(case: _Case) -> Parts:
    """Return ZeRO-1's parts (Rajbhandari et al. 2020, section 5): 12 bytes of state are shared."""
    state = (_STATE if case.size < _FLOAT else _STATE - _FLOAT) * case.params / case.count
    whole = case.params * case.size
    return case.device(Part("optimizer state", "device", state), after=whole), []


def _offloaded(case: _Case, *, gradient_buffers: int = 1) -> list[Part]:
    """Return the host's parts with all state there: 16 bytes in 16 bits (Ren et al. 2021, 4.1)."""
    return [
        Part("optimizer state", "pageable", _STATE * case.params, "masters, moments"),
        Part("gradients", "pinned", gradient_buffers * case.size * case.params),
        Part("weights to upload", "pinned", case.size * case.params),
    ]


def _zero_offload(case: _Case) -> Parts:
    return case.device(), _offloaded(case)


def _delayed(case: _Case) -> Parts:
    """Return a second gradient buffer too: new ones come while the last are still read."""
    return case.device(), _offloaded(case, gradient_buffers=2)


def _deepspeed_device(case: _Case, *more: Part) -> DeviceParts:
    return case.device(*more, in_flight=min(case.in_flight, _REDUCE_BUCKET * case.size) + (
        _REDUCE_BUCKET * case.size
    ))  # fmt: skip


def _deepspeed_zero_offload(case: _Case) -> Parts:
    temporary = _RELEASED_BYTES - _STATE - _FLOAT - 2.0
    host = [
        *case.pinned("masters", _FLOAT),
        *case.pinned("gradients", _FLOAT),
        *case.pinned("weights to upload", 2.0),
        Part("moments", "pageable", 2 * _FLOAT * case.params),
        Part("temporaries", "pageable", temporary * case.params, "28 bytes measured in all"),
    ]
    return _deepspeed_device(case), host


def _deepspeed_zenflow(case: _Case) -> Parts:
    """Return the release's parts: 32 bytes with overlap, or 16, and 4 of 16-bit buffers.

    deepspeed/ops/adam/zenflow_cpu_adam.py and runtime/zenflow: a stale copy of the master, two
    gradient buffers and two sets of moments.
    """
    vectors = sum(p.numel for p in case.workload.parameters if len(p.shape) == 1)
    important = case.option("topk_ratio", 0.1) * (case.params - vectors) + vectors
    device = _deepspeed_device(
        case,
        Part("important moments", "device", 2 * case.size * important, "in the model's dtype"),
        Part("important gradients", "device", 2 * case.size * important, "and a copy"),
    )
    copies = 2 if case.option("overlap", 1) else 1
    host = [
        Part("masters", "pageable", copies * _FLOAT * case.params),
        Part("moments", "pageable", copies * 2 * _FLOAT * case.params, f"sets: {copies}"),
        Part("gradients", "pageable", copies * _FLOAT * case.params, f"buffers: {copies}"),
        *case.pinned("staging", case.size),
    ]
    if case.option("update_interval", 4) > 1:
        host += case.pinned("accumulators", case.size)
    return device, host


def _zero_infinity(case: _Case) -> Parts:
    """Return tiles in host memory and state on the drives (Rajbhandari et al. 2021, section 5)."""
    share = case.params / case.count
    tiles = case.option("buffer_count", 3) * min(share, case.option("tile", 1 << 25)) * case.count
    host = [
        Part("gradients", "pinned", case.size * case.params),
        Part("tiles of state", "pinned", _STATE * tiles),
        Part("tiles of weights", "pinned", case.size * tiles),
        Part("optimizer state", "nvme", _STATE * case.params),
    ]
    return case.device(), host


def _deep_optimizer_states(case: _Case) -> Parts:
    """Return two sub-groups' states on the device, and the gradients that it updates by."""
    machine = Machine(case.hardware, keeps_spans=False)
    schedule = case.strategy.schedule(machine, costs_of(case.workload, case.hardware))
    assert isinstance(schedule, DeepOptimizerStates)
    share = case.params / case.count
    subgroup = min(share, case.option("subgroup", 100_000_000))
    on_device = share // (subgroup * schedule.stride) * subgroup
    kept = case.size * on_device
    buffers = min(2 * subgroup, on_device)
    states = Part("sub-groups' states", "device", _STATE * buffers, f"stride {schedule.stride}")
    return case.device(states, after=case.in_flight + kept), _offloaded(case)


def _superoffload(case: _Case) -> Parts:
    """Return float32 both ways, and the state of the device's own part (Lian et al. 2025)."""
    ratio = case.option("ratio", 0.9)
    own = (1 - ratio) * case.params / case.count
    device = case.device(
        Part("optimizer state", "device", _STATE * own, "of the device's own part"),
        in_flight=case.in_flight * (1 + _FLOAT / case.size),  # beside its float32 copy
        after=case.in_flight * (1 + _FLOAT / case.size) + case.size * own,
    )
    host = [
        Part("masters", "pinned", ratio * _FLOAT * case.params),
        Part("gradients", "pinned", ratio * _FLOAT * case.params),
        Part("moments", "pageable", ratio * 2 * _FLOAT * case.params),
    ]
    return device, host


RECIPES: Mapping[str, Callable[[_Case], Parts]] = {
    "published_on_device": _on_device,
    "published_zero_offload": _zero_offload,
    "published_delayed": _delayed,
    "deepspeed_zero_offload": _deepspeed_zero_offload,
    "deepspeed_zenflow": _deepspeed_zenflow,
    "zero_infinity": _zero_infinity,
    "deep_optimizer_states": _deep_optimizer_states,
    # StrongHold's weights stay on the device here, as in its schedule.
    "layer_overlapped": _zero_offload,
    "superoffload": _superoffload,
}
"""Parts of every strategy that is not the engine's."""
