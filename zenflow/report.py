"""Records for users: the report of one step (StepReport), and the memory in use (MemoryPlan).

Both are plain frozen records: the engine makes them, controllers, tuners and logs read them.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

STALL_CAUSES: tuple[str, ...] = ("d2h", "host", "h2d", "select", "weights", "drive")
"""Causes of a wait: gradient copies, the host's update, uploads, a selection, streamed weights,
states on a drive."""


@dataclass(frozen=True, slots=True)
class WindowNorms:
    """Norms of deferred and important gradients, over all blocks with open windows of one age.

    Windows that end with the step count with the gradients they end with.
    """

    age: int
    """Number of gradients in the window after this step, n."""

    accumulated: float
    """Estimate of the squared norm of the sum of the window's deferred gradients, clipped."""

    important: float
    """Squared norm of this step's important gradients of the same blocks, clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Facts of one optimizer step: times in seconds, sizes in bytes."""

    step: int
    """Number of the step, from 1; skipped steps (an overflowed loss scale) aren't counted."""

    seconds: float
    """Seconds from the end of the step before to the end of this one."""

    stall_seconds: float
    """Seconds in which the device waited, a part of ``seconds``: the sum of ``stalls``."""

    stalls: Mapping[str, float]
    """Seconds waited by cause, one of ``STALL_CAUSES``; a cause without a wait may be absent."""

    d2h_bytes: int
    """Number of bytes that left the device for the host in this step."""

    h2d_bytes: int
    """Number of bytes that came from the host to the device in this step."""

    staleness: int
    """Largest age in steps of a gradient whose update landed in this step; 0 if none landed."""

    captured_energy: float
    """Fraction of the split parameters' squared gradient norm in important columns, in [0, 1].

    1 where that norm is 0, as where no parameter is split: no gradient is deferred then.
    """

    grad_norm: float
    """L2 norm over all gradients, before clipping."""

    clip_factor: float
    """Factor of clipping on the gradients, in (0, 1]: min(1, max_norm / (norm + 1e-6))."""

    update_interval: int
    """Window length S in force during this step, in steps."""

    lag: int
    """Number of steps from a host update's start to its landing, in force during this step."""

    topk_ratio: float
    """Fraction k of each block's columns that the device owned in this step.

    Columns move at the end of the first step of a new k, so that step still has the old value.
    """

    select_interval: int
    """Number of steps between two selections, in force during this step; 0 for one selection."""

    learning_rates: tuple[float, ...]
    """Learning rate of each parameter group in this step."""

    starved: int = 0
    """Number of full buckets of gradients at which the device had run out of work.

    It then waited for the host's launches, which is no stall. 0 on a CPU."""

    weights_d2h_bytes: int = 0
    """Number of bytes of ``d2h_bytes`` that are streamed weights, or sums of their gradients."""

    weights_h2d_bytes: int = 0
    """Number of bytes of ``h2d_bytes`` that are streamed weights, or sums of their gradients."""

    drive_read_bytes: int = 0
    """Number of bytes of states that were read from a drive since the step before."""

    drive_written_bytes: int = 0
    """Number of bytes of states that were written to a drive since the step before."""

    drive_worn: float | None = None
    """Fraction of the drive's warranted writes (``drive_tbw``) that its folder has used so far."""

    windows: tuple[WindowNorms, ...] = ()
    """Norms of open windows' gradients by age, ascending; only where the controller asks."""

    energy_curve: Mapping[float, float] | None = None
    """Fraction of the columns' scores that the best columns of each block hold, by their ratio.

    Measured only in the steps for which the controller asks.
    """

    @property
    def stall_fraction(self) -> float:
        """Fraction of the step's time in which the device waited, in [0, 1]; 0 for a 0 s step."""
        return self.stall_seconds / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, and ``stall_fraction``: one line of a JSON log."""
        record = {item.name: getattr(self, item.name) for item in fields(self)}
        record["stalls"] = dict(self.stalls)
        record["learning_rates"] = list(self.learning_rates)
        record["windows"] = [asdict(norms) for norms in self.windows]
        curve = self.energy_curve
        record["energy_curve"] = None if curve is None else {str(k): v for k, v in curve.items()}
        record["stall_fraction"] = self.stall_fraction
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> StepReport:
        """Return the report that ``to_dict`` gave, through JSON too."""
        added = {item.name: item.default for item in fields(cls) if item.default is not MISSING}
        known = {**added, **record}  # earlier reports lack some
        values = {item.name: known[item.name] for item in fields(cls)}
        curve = values["energy_curve"]
        values["learning_rates"] = tuple(values["learning_rates"])
        values["windows"] = tuple(WindowNorms(**norms) for norms in values["windows"])
        values["energy_curve"] = None if curve is None else {float(k): v for k, v in curve.items()}
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory that the optimizer takes beside the model and its gradients, in bytes.

    Where ranks share parameters or the host's work, the plan is of this rank.
    """

    num_params: int
    """Number of trainable parameters (elements), tied ones counted once."""

    split_params: int
    """Number of elements in split parameters, whose columns device and host share."""

    model_bytes: int
    """Bytes of the trainable parameters on the device, with room for the layers that visit it."""

    host_bytes: int
    """Bytes allocated on the host, ``pinned_bytes`` included."""

    pinned_bytes: int
    """Bytes of ``host_bytes`` that are page-locked, or would be on a GPU: the bounded rings."""

    queue_depth: int
    """Largest number of a column's gradients, q, that wait on the host for one pass over its
    state."""

    device_extra_bytes: int
    """Bytes of masters, moments and scores on the device, beside the model; not of the rings."""

    device_ring_bytes: int
    """Bytes of the bounded staging buffers on the device."""

    device_step_bytes: int
    """Bytes that a step takes on the device for a while, beside its gradients: important columns
    of them, float32 gradients of whole tensors, and the update's temporaries."""

    home_bytes: int = 0
    """Bytes of ``pinned_bytes`` in which streamed weights live, and sums of their gradients."""

    buffer_bytes: int = 0
    """Bytes of ``host_bytes`` through which states of a drive pass."""

    drive_bytes: int = 0
    """Bytes of the drive that the states take, two places for each."""

    host_threads: int = field(default=0, compare=False)
    """Number of threads that work on the host's rows; 0 in a plan without an optimizer."""

    host_cores: tuple[int, ...] = field(default=(), compare=False)
    """Processors that these threads may run on; none where the system does not say."""

    host_nodes: tuple[int, ...] = field(default=(), compare=False)
    """NUMA nodes of these processors."""

    @property
    def host_bytes_per_param(self) -> float:
        """Host bytes for each trainable parameter; 0 for a model without any."""
        return self.host_bytes / self.num_params if self.num_params else 0.0

    @property
    def device_extra_bytes_per_param(self) -> float:
        """Device bytes beside the model for each trainable parameter, without the rings."""
        return self.device_extra_bytes / self.num_params if self.num_params else 0.0

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: model, states, buffers, and what a step takes of them.

        Gradients and activations come on top.
        """
        beside = self.device_extra_bytes + self.device_ring_bytes + self.device_step_bytes
        return self.model_bytes + beside

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, and both figures per parameter."""
        return asdict(self) | {
            "host_bytes_per_param": self.host_bytes_per_param,
            "device_extra_bytes_per_param": self.device_extra_bytes_per_param,
        }

    def __str__(self) -> str:
        """Return the plan as a table of a few lines."""
        share = self.split_params / self.num_params if self.num_params else 0.0
        each = self.device_extra_bytes_per_param
        count = f"{self.num_params:,} parameters, {share:.1%} of them shared with the host"
        waiting = f"part of it, up to {self.queue_depth} gradients wait there"
        rows = [
            ("device", self.device_bytes, "gradients and activations come on top"),
            ("  model", self.model_bytes, count),
            ("  states", self.device_extra_bytes, f"{each:.2f} B per parameter"),
            ("  copies", self.device_ring_bytes, "gradients on their way to the host"),
            ("  step", self.device_step_bytes, "given back after every step"),
            ("host", self.host_bytes, f"{self.host_bytes_per_param:.2f} B per parameter"),
            ("  pinned", self.pinned_bytes, waiting),
        ]
        if self.home_bytes:
            rows.append(("  weights", self.home_bytes, "streamed; part of what is pinned"))
        if self.drive_bytes:
            rows.append(("  buffers", self.buffer_bytes, "through which states of the drive pass"))
            rows.append(("drive", self.drive_bytes, "two places for each state"))
        table = [(name, readable(size), note) for name, size, note in rows]
        if self.host_threads:
            table.append(("  threads", str(self.host_threads), self._place_of_threads()))
        return "\n".join(f"{name:<11}{value:>8}   {note}".rstrip() for name, value, note in table)

    def _place_of_threads(self) -> str:
        """Return where the host's threads may run, in a few words."""
        count = len(self.host_cores)
        if not count:
            return ""
        nodes = ", ".join(map(str, self.host_nodes))
        cores = "core" if count == 1 else "cores"
        return f"on {count} {cores} of NUMA node{'s'[: len(self.host_nodes) > 1]} {nodes}"


def readable(num_bytes: float) -> str:
    """Return a size with an SI unit and 3 digits.

    >>> [readable(size) for size in (64, 1234, 999_900, 3.1e9, 2e15)]
    ['64 B', '1.23 kB', '1000 kB', '3.1 GB', '2000 TB']
    """
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if (value := num_bytes / scale) >= 1:
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return f"{num_bytes:.0f} B"
