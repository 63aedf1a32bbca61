"""From a request to its machine."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.request.request import Request
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from sim.hardware.components import Device, Host
    from sim.hardware.profile import HardwareProfile

BASES = ("gpu", "machine", "profile")
"""Fields of which one says what the machine is."""


def hardware_of(request: Request) -> tuple[HardwareProfile, list[str]]:
    """Return the machine, and notes on what was assumed of it.

    Raises:
        ConfigError: Not exactly one of --gpu, --machine and --profile was given, or a name is
            unknown.
    """
    from sim.hardware.catalog import (
        find_fabric,
        find_host,
        find_link,
        find_machine,
        find_nvme,
        launched_by,
    )
    from sim.hardware.file import read_profile
    from sim.hardware.quantity import Quantity

    given = [f"--{name}" for name in BASES if getattr(request, name) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"one of --gpu, --machine and --profile says what the machine is, got "
            f"{' and '.join(given) or 'none'}: give --gpu rtx4090, say"
        )
    notes: list[str] = []
    base, count = str(request.machine or request.profile), request.num_gpus
    is_measured = request.profile is not None or base.endswith(".json")
    if request.gpu is not None:
        hardware, notes = _usual_machine(request.gpu, request)
    elif is_measured:
        hardware = read_profile(base)
    else:
        hardware = find_machine(base, count)
    if request.num_hosts is not None or request.network is not None:
        hardware = _joined(hardware, request)
    finders = {"host": find_host, "link": find_link, "fabric": find_fabric}
    named = {part: getattr(request, part) for part in finders}
    changes: dict[str, Any] = {
        part: finders[part](name) for part, name in named.items() if name is not None
    }
    if request.host is not None and not (request.gpu is None and is_measured):
        changes["device"] = launched_by(request.host, hardware.device.name)
    if request.host_ram is not None:
        ram = Quantity(value=request.host_ram, kind="spec", source="--host-ram")
        changes["host"] = replace(changes.get("host", hardware.host), dram_bytes=ram)
        _check_memory(changes["host"])
    if request.nvme is not None:
        changes["nvme"] = None if request.nvme == "none" else find_nvme(request.nvme)
    numbers = {"num_devices": count, "host_threads": request.host_threads}
    changes |= {name: number for name, number in numbers.items() if number is not None}
    return replace(hardware, **changes), notes


def _check_memory(host: Host) -> None:
    """Refuse memory that a host's sockets can't take.

    Raises:
        ConfigError: It is more than the table's most.
    """
    from sim.hardware.catalog import most_memory

    most = most_memory(host)
    if most is not None and host.dram_bytes.value > most:
        raise ConfigError(
            f"{host.name} takes at most {most / 2**30:,.0f} GiB of memory, got --host-ram "
            f"{host.dram_bytes.value / 2**30:,.0f}: lower it, or name another --host, such as "
            "2x-epyc-9654"
        )


def _joined(hardware: HardwareProfile, request: Request) -> HardwareProfile:
    """Return so many hosts of a machine, on the network asked for or its own."""
    from sim.hardware.catalog import clustered, network_of

    own = hardware.network.name if hardware.network is not None else network_of(hardware.name)
    count = hardware.num_hosts if request.num_hosts is None else request.num_hosts
    return clustered(hardware, count, request.network or own)


def _usual_machine(gpu: str, request: Request) -> tuple[HardwareProfile, list[str]]:
    """Return a machine of the table with this device and enough of them, and what it lends.

    Raises:
        ConfigError: The device is unknown, or no machine holds it and parts are missing.
    """
    from sim.hardware.catalog import assemble, find_device

    device, count = find_device(gpu), request.num_gpus or 1
    host, link = request.host, request.link
    if host is not None and link is not None and (count == 1 or request.fabric is not None):
        made = assemble(
            gpu, host, link, count, fabric=request.fabric,
            nvme=None if request.nvme in (None, "none") else request.nvme,
        )  # fmt: skip
        return made, []
    chosen = _lender(device, count)
    lent = [name for name, own in (("host", host), ("link", link)) if own is None]
    lent += [*(["fabric"] if count > 1 and request.fabric is None else [])]
    lent += ["drives"] if request.nvme is None and chosen.nvme is not None else []
    note = f"assumed as in {chosen.name}: {', '.join(lent)}"
    note += _other_host(device, chosen, request)
    if chosen.device.name == device.name:
        return replace(chosen, num_devices=count), [note]
    # Cards of one name with another socket: the link is of their generation, the fabric is not.
    made = assemble(
        gpu, chosen.host, chosen.link, count, nvme=chosen.nvme,
        fabric=None if count == 1 else _fabric_of(chosen),
    )  # fmt: skip
    return made, [f"{note}; no machine of the table has {device.name}"]


def _other_host(device: Device, chosen: HardwareProfile, request: Request) -> str:
    """Return that one such device is assumed in another host; nothing where it is not."""
    if request.host is not None or (request.num_gpus or 1) == 1:
        return ""
    alone = _lender(device, 1)
    if alone.host.name == chosen.host.name:
        return ""
    return (
        f"; one {device.name} would be assumed in {alone.name}, with another host: --host "
        f"{chosen.host.name} keeps this one"
    )


def _lender(device: Device, count: int) -> HardwareProfile:
    """Return the smallest machine of the table with a device, or one of its family, and so many.

    Raises:
        ConfigError: There is none.
    """
    enough = [machine for machine in _table() if machine.num_devices >= count]
    own = [machine for machine in enough if machine.device.name == device.name]
    family = device.name.split("-")[0]
    kin = [machine for machine in enough if machine.device.name.split("-")[0] == family]
    if own or kin:
        return min(own or kin, key=lambda machine: machine.num_devices)
    fabric = " --fabric pcie4" if count > 1 else ""
    raise ConfigError(
        f"no machine of the table holds {count} {device.name}: give its parts, such as "
        f"--host 2x-epyc-9654 --link pcie4-x16{fabric}"
    )


def _fabric_of(machine: HardwareProfile) -> str:
    """Return the fabric between cards that have nothing but a machine's link: PCIe's."""
    return machine.link.name.split("-")[0]


@functools.cache
def _table() -> tuple[HardwareProfile, ...]:
    """Return all machines of the table."""
    from sim.hardware.catalog import find_machine, names

    return tuple(find_machine(name) for name in names("machine"))
