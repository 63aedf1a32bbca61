"""Catalog: devices, hosts, links and whole machines by name, from the table in ``sim/data``.

Every quantity there has its unit, kind and source. Names match whatever their case and separators:
``RTX 4090``, ``rtx-4090`` and ``NVIDIA GeForce RTX 4090``, as torch reports it, are one device. A
name that says too little stands for the SXM module with most memory of its generation: ``a100`` is
``a100-80-sxm``. ``2x-epyc-7742`` is a host with two sockets, ``8x-infiniband-hdr`` a network of
eight adapters in each host.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from sim.hardware.cells import Entry, quantity_of, read_table, record_of, refuse_unknown
from sim.hardware.components import Device, EngineOverheads, Fabric, Host, Link, Network, Nvme
from sim.hardware.profile import HardwareProfile
from sim.hardware.quantity import Quantity
from sim.names import fold, nearest
from zenflow.errors import ConfigError

_TABLES: Mapping[str, str] = {
    "device": "devices",
    "host": "hosts",
    "link": "links",
    "fabric": "fabrics",
    "network": "networks",
    "nvme": "nvme",
    "machine": "machines",
}
_LISTS: Mapping[str, str] = {
    "device": "gpus", "host": "hosts", "link": "links", "nvme": "drives", "machine": "machines",
}  # fmt: skip
"""Word of the command line that lists a kind."""
_DEFAULTS = "default"
_MOST_ADAPTERS = 8
_LABELS = ("title", "aliases")
_BESIDE = ("memory_bus", "most_memory_per_socket", "launch_share")
"""Cells of a host that bound others or scale a device's, and are no part of it."""
_LAUNCHES = ("launch", "backward_launch", "compiled_launch")
_MACHINE_KEYS = (
    *_LABELS, "device", "host", "link", "fabric", "network", "nvme", "num_devices", "host_memory",
    "source",
)  # fmt: skip


def names(kind: str) -> list[str]:
    """Return the names of all devices, hosts, links, machines or other parts in the table.

    Args:
        kind: device, host (with one socket or two), link, fabric, network (with each number of
            adapters), nvme or machine.

    Examples:
        >>> names("link")[:2]
        ['pcie3-x16', 'pcie4-x16']
    """
    return list(_entries(kind))


def title_of(kind: str, name: str) -> str:
    """Return the maker's name of a part or a machine.

    Raises:
        ConfigError: There is none of the name; the nearest names are given.

    Examples:
        >>> title_of("device", "rtx4090")
        'NVIDIA GeForce RTX 4090 24 GB'
    """
    return str(_lookup(kind, name)[1]["title"])


def find_device(name: str) -> Device:
    """Return a device by name.

    Raises:
        ConfigError: There is none; the nearest names are given.

    Examples:
        >>> find_device("RTX 4090").name
        'rtx4090'
    """
    found = _device(name)
    return replace(found, flops=dict(found.flops))  # a caller may change its own


@functools.cache
def _device(name: str) -> Device:
    name, entry = _lookup("device", name)
    return record_of(
        Device,
        {**read_table("devices")[_DEFAULTS], **entry},
        name,
        beside=(*_LABELS, "silicon"),
        name=name,
        is_cpu=False,
    )


@functools.cache
def find_host(name: str) -> Host:
    """Return a host by name; ``2x-NAME`` has two sockets.

    Raises:
        ConfigError: There is none; the nearest names are given.

    Examples:
        >>> find_host("2x-epyc-7742").sockets
        2
    """
    name, entry = _lookup("host", name)
    sockets = entry.get("sockets", 1)
    socket_memory = quantity_of(entry["memory_per_socket"], "memory_per_socket", name)
    return record_of(
        Host,
        {**read_table("hosts")[_DEFAULTS], **entry},
        name,
        beside=(*_LABELS, *_BESIDE, "max_sockets", "memory_per_socket", "sockets", "cores"),
        name=name,
        sockets=sockets,
        cores=entry["cores"],
        dram_bytes=replace(socket_memory, value=sockets * socket_memory.value),
    )


def most_memory(host: Host) -> float | None:
    """Return the most bytes that a host's sockets take together; None where no table has it.

    Examples:
        >>> round(most_memory(find_host("desktop-ddr4")) / 2**30)  # GiB
        128
    """
    if host.name not in names("host"):  # as measured by `zenflow calibrate`
        return None
    name, entry = _lookup("host", host.name)
    cell = quantity_of(entry["most_memory_per_socket"], "most_memory_per_socket", name)
    return host.sockets * cell.value


@functools.cache
def find_link(name: str) -> Link:
    """Return a link by name.

    Raises:
        ConfigError: There is none; the nearest names are given.

    Examples:
        >>> round(find_link("pcie5-x16").d2h.value / 1e9)  # GB/s
        55
    """
    name, entry = _lookup("link", name)
    return record_of(Link, entry, name, beside=(*_LABELS, "limit"), name=name)


@functools.cache
def find_fabric(name: str) -> Fabric:
    """Return a fabric by name.

    Raises:
        ConfigError: There is none; the nearest names are given.

    Examples:
        >>> round(find_fabric("nvlink3").bandwidth.value / 1e9)  # GB/s
        230
    """
    name, entry = _lookup("fabric", name)
    return record_of(Fabric, entry, name, beside=(*_LABELS, "limit"), name=name)


@functools.cache
def find_network(name: str) -> Network:
    """Return a network between hosts by name; ``8x-NAME`` has eight adapters in each host.

    Raises:
        ConfigError: There is none; the nearest names are given.

    Examples:
        >>> find_network("8x-infiniband-hdr").adapters
        8
    """
    name, entry = _lookup("network", name)
    return record_of(
        Network,
        entry,
        name,
        beside=(*_LABELS, "limit", "adapters"),
        name=name,
        adapters=entry.get("adapters", 1),
    )


@functools.cache
def find_nvme(name: str) -> Nvme:
    """Return a set of NVMe drives by name.

    Raises:
        ConfigError: There is none; the nearest names are given.

    Examples:
        >>> round(find_nvme("4x-gen4").read.value / 1e9)  # GB/s
        10
    """
    name, entry = _lookup("nvme", name)
    return record_of(Nvme, entry, name, beside=_LABELS, name=name)


def find_machine(
    name: str, num_devices: int | None = None, *, num_hosts: int = 1, network: str | None = None
) -> HardwareProfile:
    """Return a machine by name.

    Args:
        name: One of `names("machine")`, or an alias.
        num_devices: How many of its devices are used; None is all.
        num_hosts: How many of these machines train together.
        network: Between them; None is the machine's own.

    Raises:
        ConfigError: There is none, with the nearest names; it holds fewer devices; or it has no
            network that is known, and several hosts need one.

    Examples:
        >>> machine = find_machine("dgx-a100-80", 2)
        >>> machine.num_devices, machine.device.name
        (2, 'a100-80-sxm')
    """
    name, entry = _lookup("machine", name)
    refuse_unknown(entry, _MACHINE_KEYS, name)
    held = entry["num_devices"]
    used = held if num_devices is None else num_devices
    if not 1 <= used <= held:
        raise ConfigError(
            f"{name} holds {held} devices, so num_devices must be in 1..{held}, got {used}: take "
            f"several hosts of it (--num-hosts {-(-max(1, used) // held)}), or name the parts of "
            f"another machine (--gpu {entry['device']} --host, --link and --fabric)"
        )
    memory = entry.get("host_memory")
    profile = assemble(
        entry["device"],
        entry["host"],
        entry["link"],
        used,
        fabric=entry.get("fabric"),
        nvme=entry.get("nvme"),
        host_memory=None if memory is None else quantity_of(memory, "host_memory", name),
    )
    metadata = {"title": entry["title"], "source": entry["source"]}
    return clustered(
        replace(profile, name=name, metadata=metadata), num_hosts, network or entry.get("network")
    )


def network_of(machine: str) -> str | None:
    """Return the name of the network that a machine of the table has; None if none is known."""
    entry = _entries("machine").get(machine, {})
    found: str | None = entry.get("network")
    return found


def clustered(hardware: HardwareProfile, num_hosts: int, network: str | None) -> HardwareProfile:
    """Return a machine of several hosts on a network.

    Args:
        hardware: One host.
        num_hosts: How many there are.
        network: Between them, by name; unused with one host.

    Raises:
        ConfigError: There is no such network; or there are several hosts and no network.
    """
    joined = find_network(network) if network is not None and num_hosts > 1 else None
    return replace(hardware, num_hosts=num_hosts, network=joined)


def assemble(
    device: str | Device,
    host: str | Host,
    link: str | Link,
    num_devices: int = 1,
    *,
    fabric: str | Fabric | None = None,
    nvme: str | Nvme | None = None,
    host_memory: float | Quantity | None = None,
    overheads: EngineOverheads | None = None,
) -> HardwareProfile:
    """Return a machine put together from parts, by name or made by hand.

    A device by name is launched as fast as its host's cores do, where the table says so.

    Args:
        device: Its devices, all of one type.
        host: Sockets and their memory.
        link: Between each device and the host.
        num_devices: How many there are.
        fabric: Between them; needed by more than one.
        nvme: The host's drives.
        host_memory: Bytes of all sockets together; None is the host's own.
        overheads: The engine's; None derives a GPU's from its bandwidth.

    Raises:
        ConfigError: A name is unknown, or the parts do not make a machine.

    Examples:
        >>> machine = assemble("rtx-4090", "epyc-7742", "pcie4-x16", host_memory=64 << 30)
        >>> machine.name
        '1x rtx4090, epyc-7742, pcie4-x16'
    """
    if isinstance(device, str):
        device = launched_by(host, device)
    host = find_host(host) if isinstance(host, str) else host
    link = find_link(link) if isinstance(link, str) else link
    if host_memory is not None:
        if not isinstance(host_memory, Quantity):
            host_memory = Quantity(value=host_memory, kind="spec", source="given by the caller")
        host = replace(host, dram_bytes=host_memory)
    return HardwareProfile(
        name=f"{num_devices}x {device.name}, {host.name}, {link.name}",
        device=device,
        num_devices=num_devices,
        link=link,
        fabric=find_fabric(fabric) if isinstance(fabric, str) else fabric,
        host=host,
        nvme=find_nvme(nvme) if isinstance(nvme, str) else nvme,
        overheads=overheads or gpu_overheads(device),
    )


def launched_by(host: str | Host, device: str) -> Device:
    """Return the table's device beside a host, whose cores launch its kernels.

    Raises:
        ConfigError: There is no such device or host; the nearest names are given.

    Examples:
        >>> round(launched_by("epyc-7742", "a100").launch.value * 1e6)  # us
        25
        >>> round(launched_by("xeon-8480c", "a100").launch.value * 1e6)
        16
    """
    found = find_device(device)
    if isinstance(host, Host) and host.name not in names("host"):  # made by hand, or measured
        return found
    name, entry = _lookup("host", host.name if isinstance(host, Host) else host)
    if "launch_share" not in entry:
        return found
    share = quantity_of(entry["launch_share"], "launch_share", name)
    cells = {launch: getattr(found, launch) for launch in _LAUNCHES}
    launches = {
        launch: replace(
            cell, value=share.value * cell.value, source=f"{cell.source}; {share.source}"
        )
        for launch, cell in cells.items()
        if cell is not None
    }
    return replace(found, **launches)


def gpu_overheads(device: Device) -> EngineOverheads:
    """Return estimates of what the engine's parts take with a GPU, where none were measured.

    Raises:
        ConfigError: The device is a CPU, whose lanes share its cores and are to be measured.
    """
    if device.is_cpu:
        raise ConfigError(
            f"{device.name} is a CPU, for which the table has no overheads: give `overheads`, or "
            "measure the machine with `zenflow calibrate`"
        )
    entry = dict(read_table("overheads")["gpu"])
    rules = {
        key: quantity_of(entry.pop(key), key, "overheads of a GPU")
        for key in ("intake_share", "pack_share", "update_bytes")
    }
    reached = device.bandwidth.value * device.bandwidth_efficiency.value
    return record_of(
        EngineOverheads,
        entry,
        "overheads of a GPU",
        intake_bandwidth=_scaled(rules["intake_share"], reached * rules["intake_share"].value),
        pack_bandwidth=_scaled(rules["pack_share"], reached * rules["pack_share"].value),
        device_update=_scaled(rules["update_bytes"], reached / rules["update_bytes"].value),
    )


def _scaled(rule: Quantity, value: float) -> Quantity:
    return replace(rule, value=value, source=f"the device's bandwidth; {rule.source}")


def _lookup(kind: str, name: str) -> tuple[str, Entry]:
    """Return a name as the table has it, and its entry."""
    known = _folded(kind)
    found = known.get(fold(str(name)))
    if found is None:
        listed = f"; zenflow plan --list {_LISTS[kind]} has all" if kind in _LISTS else ""
        raise ConfigError(f"there is no {kind} {name!r}: {nearest(str(name), known)}{listed}")
    return found, _entries(kind)[found]


@functools.cache
def _folded(kind: str) -> dict[str, str]:
    """Return the name of each entry by its name and aliases, folded."""
    return {
        fold(alias): own
        for own, entry in _entries(kind).items()
        for alias in (own, *entry.get("aliases", ()))
    }


@functools.cache
def _entries(kind: str) -> dict[str, Entry]:
    """Return a table's entries by name, with each number of sockets or adapters there may be."""
    table = read_table(_TABLES[kind])
    entries = {name: entry for name, entry in table.items() if name != _DEFAULTS}
    if kind not in ("host", "network"):
        return entries
    counted = "sockets" if kind == "host" else "adapters"
    several = {
        f"{count}x-{name}": {
            **entry,
            counted: count,
            "aliases": [f"{count}x-{alias}" for alias in entry["aliases"]],
        }
        for name, entry in entries.items()
        for count in range(2, 1 + entry.get("max_sockets", _MOST_ADAPTERS))
    }
    return {**entries, **several}
