"""Hardware: the parts and rates of a machine, each quantity with its kind and source.

A `HardwareProfile` is one device type, how many of them, their link to the host, the fabric
between them, the host, its NVMe drives, and the network to other hosts that are like it. Profiles
come from the table in `sim/data` or from `zenflow calibrate`, or are put together by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any

from sim.hardware.components import Device, EngineOverheads, Fabric, Host, Link, Network, Nvme
from sim.hardware.quantity import RANGES, Quantity
from zenflow.config import raise_violations
from zenflow.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """A whole machine: devices, links, host, drives, network.

    Raises:
        ConfigError: Quantities contradict one another; the message lists how.

    Examples:
        A slower link, to ask what it would cost:

        >>> from sim.hardware.catalog import find_machine
        >>> machine = find_machine("hgx-h100", 1)
        >>> machine.with_values({"link.d2h": 20e9}).link.d2h.value
        20000000000.0
    """

    name: str
    device: Device
    """Type of all devices."""
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
    """Costs of the engine's own parts."""
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
        """Check the rules that tie quantities to one another."""
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
            quantity = attrgetter(name)(self)
            if quantity is not None and not low <= (value := quantity.value) <= high:
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
        """Return every quantity by its dotted name, such as ``link.d2h``."""
        found: dict[str, Quantity] = {}
        for part in fields(self):
            record = getattr(self, part.name)
            for item in fields(record) if is_dataclass(record) else ():
                name, value = f"{part.name}.{item.name}", getattr(record, item.name)
                if isinstance(value, Quantity):
                    found[name] = value
                elif isinstance(value, Mapping):  # peaks by dtype
                    found |= {f"{name}.{key}": quantity for key, quantity in value.items()}
        return found

    def with_values(self, values: Mapping[str, float]) -> HardwareProfile:
        """Return the profile with other values at these dotted names; kind and source stay.

        Raises:
            ConfigError: There is no such quantity, or a value breaks a rule.
        """
        quantities = self.quantities()
        unknown = sorted(values.keys() - quantities.keys())
        if unknown:
            known = ", ".join(quantities)
            raise ConfigError(f"{self.name} has no quantity {', '.join(unknown)}; it has {known}")
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            part, item, *dtype = name.split(".")
            changed = changes.setdefault(part, {})
            quantity = replace(quantities[name], value=value)
            if dtype:
                peaks = getattr(getattr(self, part), item)
                changed[item] = {**changed.get(item, peaks), dtype[0]: quantity}
            else:
                changed[item] = quantity
        parts = {part: replace(getattr(self, part), **new) for part, new in changes.items()}
        return replace(self, **parts)
