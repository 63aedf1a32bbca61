"""Hardware: what a machine can do, each figure with its kind and source.

A `HardwareProfile` is one device type, how many of them, their link to the host, the fabric
between them, the host, its NVMe drives, and the network to other hosts that are like it. It comes
from the table in `sim/data`, from `zenflow calibrate`, or is put together by hand. SI units:
bytes/s, FLOP/s, seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_args

from zenflow.config import raise_violations
from zenflow.errors import ConfigError

Kind = Literal["spec", "measured", "estimated"]
KINDS: tuple[str, ...] = get_args(Kind)

DEFAULT_SIGMA: Mapping[str, float] = {"spec": 0.05, "measured": 0.03, "estimated": 0.25}
"""Relative uncertainty of a figure whose source states none."""

RANGES: Mapping[str, tuple[float, float]] = {
    "link.duplex": (0.0, 1.0),
    "link.pageable": (0.0, 1.0),
    "host.numa_hop": (0.0, 1.0),
    "device.matmul_efficiency": (0.0, 1.25),
    "device.float32_efficiency": (0.0, 1.0),
    "device.sustained_share": (0.0, 1.0),
    "device.attention_efficiency": (0.0, 1.0),
    "device.attention_backward_efficiency": (0.0, 1.0),
    "device.bandwidth_efficiency": (0.0, 1.0),
    "host.core_sharing": (1.0, 2.0),
    "host.adam_share": (0.0, 1.0),
}
"""Least and largest value of quantities that are bounded; none may be 0."""


def bounded(name: str, value: float) -> float:
    """Return the value nearest to this one that the quantity of this name may have."""
    low, high = RANGES.get(name, (0.0, math.inf))
    return min(high, max(low, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number of a profile, with its kind and source.

    Raises:
        ConfigError: The value is not a positive finite number, or the kind is none of `KINDS`.
    """

    value: float
    """Value in SI units."""
    kind: Kind = "estimated"
    """Kind of its source."""
    source: str = ""
    """Data sheet, page, benchmark or reasoning that the value comes from."""
    sigma: float | None = None
    """Relative standard deviation; None is `DEFAULT_SIGMA` of the kind."""

    def __post_init__(self) -> None:
        """Check what every figure must be."""
        if not (isinstance(self.value, int | float) and math.isfinite(self.value)):
            raise ConfigError(f"a figure must be a finite number, got {self.value!r}")
        if not self.value > 0:
            raise ConfigError(
                f"a figure must be positive, got {self.value}: leave out what a machine lacks"
            )
        if self.kind not in KINDS:
            raise ConfigError(
                f"a figure's kind must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )

    @property
    def uncertainty(self) -> float:
        """Relative standard deviation."""
        return DEFAULT_SIGMA[self.kind] if self.sigma is None else self.sigma


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator; or a CPU in its role, which then shares the host's cores."""

    name: str
    is_cpu: bool = False
    """Whether it computes on the host's cores, beside the host worker."""
    memory: Quantity
    """Bytes of device memory."""
    flops: Mapping[str, Quantity]
    """Dense peak FLOP/s by dtype (bfloat16, float16, float32); never with sparsity."""
    matmul_efficiency: Quantity
    """Share of the peak that the best matrix product reaches: above 1 where the clock boosts."""
    float32_efficiency: Quantity | None = None
    """The same of plain float32 products, without tensor cores; None is ``matmul_efficiency``."""
    sustained_share: Quantity | None = None
    """Share of that rate which a model's products sustain: not all have the best shape. None is
    all of it, as of a rate that was fitted to a model's products."""
    matmul_latency: Quantity
    """Seconds that a matrix product takes beside its FLOP: tiles that are not full, its ends."""
    attention_efficiency: Quantity
    """Share of the peak that attention's own products reach."""
    attention_backward_efficiency: Quantity | None = None
    """The same in backward; None is as in forward."""
    bandwidth: Quantity
    """Bytes/s of device memory."""
    bandwidth_efficiency: Quantity
    """Share of it that elementwise kernels and the optimizer reach."""
    cache: Quantity | None = None
    """Bytes of a last-level cache from which a tensor is read that was just written; None is none
    that counts."""
    launch: Quantity
    """Seconds from one small kernel's start to the next one's, with an interpreter between."""
    backward_factor: Quantity = Quantity(
        value=1.0, kind="estimated", source="count of FLOP and bytes"
    )
    """Factor on what backward's FLOP and bytes would take at forward's rates."""
    backward_launch: Quantity | None = None
    """The same in backward, where no interpreter runs between kernels; None is ``launch``."""
    compiled_launch: Quantity | None = None
    """The same of compiled layers, both ways; None is ``launch``."""
    gradient_bandwidth: Quantity | None = None
    """Bytes/s at which gradients' memory is taken and filled; None is no cost.

    On a CPU its pages are new in every step."""

    def cached(self, tensor_bytes: float) -> float:
        """Return the share of a kernel's reads that the cache serves, by one tensor's bytes.

        All where the cache holds what a kernel reads and what it writes, none where one of the two
        fills it.
        """
        if self.cache is None:
            return 0.0
        return min(1.0, max(0.0, 2.0 - 2.0 * tensor_bytes / self.cache.value))

    def product_rate(self, dtype: str) -> float:
        """Return the FLOP/s that a model's matrix products sustain in a dtype."""
        best = self.matmul_efficiency
        if dtype == "float32" and self.float32_efficiency is not None:
            best = self.float32_efficiency
        share = 1.0 if self.sustained_share is None else self.sustained_share.value
        return self.flops[dtype].value * best.value * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between one device and the host."""

    name: str
    d2h: Quantity
    """Bytes/s to the host from pinned memory, with nothing the other way."""
    h2d: Quantity
    """Bytes/s to the device from pinned memory, with nothing the other way."""
    duplex: Quantity
    """Both directions together as a share of d2h + h2d alone, in (0, 1]: 1 is full duplex."""
    pageable: Quantity
    """Factor on both with memory that is not pinned, in (0, 1]."""
    latency: Quantity
    """Seconds of one copy beside its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Between the devices of one host."""

    name: str
    bandwidth: Quantity
    """Bytes/s of one device, one way, that collectives reach."""
    latency: Quantity
    """Seconds of a collective beside its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Between hosts that train together, all alike."""

    name: str
    adapters: int
    """Number of network adapters of one host."""
    bandwidth: Quantity
    """Bytes/s of one adapter, one way, that collectives reach."""
    latency: Quantity
    """Seconds that each further host adds to a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvme:
    """All drives of the host together."""

    name: str
    read: Quantity
    """Bytes/s from the drives."""
    write: Quantity
    """Bytes/s to the drives."""
    capacity: Quantity
    """Bytes that they hold."""


CORE_UPDATE = Quantity(
    value=1.4e9,
    kind="estimated",
    source="0.6 to 0.75 ns for a root and a division, on cores with AVX2 or AVX-512",
)
"""AdamW steps of an element, per second, of a core where none has been measured."""

ADAM_SHARE = Quantity(
    value=0.715,
    kind="measured",
    source="geometric mean of the largest size of four kernels: CPU-Adam on two Xeon 8168 0.78 "
    "(ZeRO-Offload, arXiv 2101.06840, table 4), GraceAdam 0.76 and CPU-Adam 0.60 on Grace "
    "(SuperOffload, arXiv 2509.21271), torch's fused Adam on 32 cores of Ice Lake 0.74 "
    "(zhuhaozhe/Misc)",
    sigma=0.13,
)
"""What AdamW kernels reach on hosts where none has been measured: mean and predictive spread."""

DEEPSPEED_SHARE = Quantity(
    value=0.3256,
    kind="estimated",
    source="as on the EPYC 7742, the only host that it is known for; kernels alone differ by 0.13 "
    "between hosts",
    sigma=0.2,
)
"""What DeepSpeed's CPU step reaches where it has not been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """CPU sockets and their memory."""

    name: str
    sockets: int
    """Number of sockets."""
    cores: int
    """Number of cores of one socket."""
    dram: Quantity
    """Bytes/s of one socket's memory that a STREAM-like loop reaches."""
    dram_bytes: Quantity
    """Bytes of memory, all sockets together."""
    core_bandwidth: Quantity
    """Bytes/s that the optimizer's loop moves on one core: threads add up until DRAM is full."""
    numa_hop: Quantity
    """Factor on links and DRAM for memory of another socket, in (0, 1]."""
    core_sharing: Quantity
    """Work of two busy hardware threads of one core as a multiple of one's, in [1, 2]."""
    core_update: Quantity = CORE_UPDATE
    """AdamW steps of an element, per second, that one core takes on data in its caches: what
    bounds a pass over many gradients, where the loop's bytes no longer do."""
    adam_share: Quantity = ADAM_SHARE
    """Bytes/s that an AdamW kernel alone moves on all its threads, as a share of ``dram``: seven
    streams suit memory less than STREAM's three do. 1 where ``dram`` is from the kernel itself."""
    deepspeed_share: Quantity = DEEPSPEED_SHARE
    """Bytes/s that DeepSpeed's CPU step moves on one socket, as a share of ``dram``: its AdamW
    kernel and the slower passes around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOverheads:
    """What the engine's own parts take beside bytes over bandwidth."""

    host_task: Quantity
    """Seconds of a host task beside its bytes: queue, hand-over between threads."""
    copy: Quantity
    """Seconds of a bucket's copy beside its bytes: launching it, or a lane thread's work."""
    bucket: Quantity
    """Seconds of one parameter on the training thread: its hook, gathering, writing back."""
    step: Quantity
    """Seconds of an optimizer step beside its elements."""
    select: Quantity
    """Seconds of one block's selection and hand-over."""
    intake_bandwidth: Quantity
    """Bytes/s of gradients that are measured and gathered on the device."""
    pack_bandwidth: Quantity
    """Bytes/s of gradients that one lane thread (a CPU) or the copy stream (a GPU) packs."""
    unpack_bandwidth: Quantity | None = None
    """Bytes/s of weights that the other lane writes into their columns; None is as packing."""
    device_update: Quantity
    """Parameters/s that AdamW on the device updates where they are whole."""
    column_update: Quantity | None = None
    """Parameters/s of important columns: AdamW on them, and writing them into the weights. None is
    as ``device_update``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """A whole machine.

    Raises:
        ConfigError: Figures contradict one another; the message lists how.
    """

    name: str
    device: Device
    """Type of its devices."""
    num_devices: int = 1
    """Number of devices of one host."""
    link: Link
    """Link between each device and the host."""
    fabric: Fabric | None = None
    """Fabric between the devices; None with one device."""
    host: Host
    """Sockets and their memory."""
    nvme: Nvme | None = None
    """Drives of the host; None where there are none."""
    overheads: EngineOverheads
    """What the engine's own parts take."""
    host_threads: int | None = None
    """Number of threads of the host's update for each device.

    None leaves one core to each device's launching thread and shares the others out."""
    binds_cores: bool = True
    """Whether each device's host memory and threads are on the socket that it hangs on; else they
    are spread over all sockets."""
    num_hosts: int = 1
    """Number of hosts that train together."""
    network: Network | None = None
    """Network between the hosts; None with one host."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON-ready facts: versions, residuals, whether a link is emulated."""

    def __post_init__(self) -> None:
        """Check the rules across figures."""
        raise_violations(f"the profile {self.name!r}", self._violations())

    def _violations(self) -> Iterator[str]:
        if self.num_devices < 1:
            yield f"num_devices must be at least 1, got {self.num_devices}"
        if self.num_devices > 1 and self.fabric is None:
            yield "several devices need a fabric: name nvlink, or the pcie that joins them"
        if self.num_hosts < 1:
            yield f"num_hosts must be at least 1, got {self.num_hosts}"
        if self.num_hosts > 1 and self.network is None:
            yield "several hosts need a network: name one of the table, such as 8x-infiniband-hdr"
        if self.network is not None and self.network.adapters < 1:
            yield f"network.adapters must be at least 1, got {self.network.adapters}"
        if self.host.sockets < 1 or self.host.cores < 1:
            yield "a host needs at least one socket with one core"
        for name, (low, high) in RANGES.items():
            figure = attrgetter(name)(self)
            if figure is not None and not low <= (value := figure.value) <= high:
                rule = "in [1, 2]" if low else f"a share in (0, {high:g}]"
                yield f"{name} must be {rule}, got {value}"
        if not self.device.flops:
            yield "device.flops must name the peak of at least one dtype"
        if self.host_threads is not None and self.host_threads < 1:
            yield f"host_threads must be at least 1, got {self.host_threads}"

    @property
    def total_devices(self) -> int:
        """Devices of all hosts."""
        return self.num_devices * self.num_hosts

    @property
    def total_cores(self) -> int:
        """Cores of all sockets of one host."""
        return self.host.sockets * self.host.cores

    @property
    def sockets_reached(self) -> int:
        """Sockets whose cores and memory a device's share of the host is spread over."""
        return 1 if self.binds_cores else self.host.sockets

    @property
    def devices_per_socket(self) -> int:
        """Devices that hang on the fullest socket."""
        sockets = min(self.host.sockets, self.num_devices)
        return -(-self.num_devices // sockets)

    @property
    def dram_sharers(self) -> int:
        """Devices that share the memory of the sockets which each of them reaches."""
        return self.devices_per_socket if self.binds_cores else self.num_devices

    @property
    def threads_per_device(self) -> int:
        """Host threads that work for one device."""
        if self.host_threads is not None:
            return self.host_threads
        cores = self.sockets_reached * self.host.cores
        return max(1, cores // self.dram_sharers - 1)

    def quantities(self) -> dict[str, Quantity]:
        """Return every figure by its dotted name, such as ``link.d2h``."""
        found: dict[str, Quantity] = {}
        for part in fields(self):
            record = getattr(self, part.name)
            for item in fields(record) if is_dataclass(record) else ():
                name, value = f"{part.name}.{item.name}", getattr(record, item.name)
                if isinstance(value, Quantity):
                    found[name] = value
                elif isinstance(value, Mapping):  # peaks by dtype
                    found |= {f"{name}.{key}": figure for key, figure in value.items()}
        return found

    def with_values(self, values: Mapping[str, float]) -> HardwareProfile:
        """Return the profile with other values at these dotted names; kind and source stay.

        Raises:
            ConfigError: There is no such figure, or a value breaks a rule.
        """
        figures = self.quantities()
        unknown = sorted(values.keys() - figures.keys())
        if unknown:
            known = ", ".join(figures)
            raise ConfigError(f"{self.name} has no figure {', '.join(unknown)}; it has {known}")
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            part, item, *dtype = name.split(".")
            changed, figure = changes.setdefault(part, {}), replace(figures[name], value=value)
            if dtype:
                peaks = getattr(getattr(self, part), item)
                changed[item] = {**changed.get(item, peaks), dtype[0]: figure}
            else:
                changed[item] = figure
        parts = {part: replace(getattr(self, part), **new) for part, new in changes.items()}
        return replace(self, **parts)
