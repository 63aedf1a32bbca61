"""From the words of a command or a sweep to a machine and a workload. Loads no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.training.settings import DTYPES, MODEL_SIZES
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from sim.hardware.profile import HardwareProfile
    from sim.models.workload import Workload

_NAMED_BASES = ("gpu", "machine", "profile")


def hardware_of(flags: dict[str, Any]) -> tuple[HardwareProfile, list[str]]:
    """Return the machine, and notes on what was assumed of it.

    Raises:
        ConfigError: Not exactly one of --gpu, --machine and --profile was given, or a name is
            unknown.
    """
    from sim.hardware.catalog import find_fabric, find_host, find_link, find_machine, find_nvme
    from sim.hardware.file import read_profile
    from sim.hardware.profile import Quantity

    given = [f"--{name}" for name in _NAMED_BASES if flags[name] is not None]
    if len(given) != 1:
        raise ConfigError(
            f"one of --gpu, --machine and --profile says what the machine is, got "
            f"{' and '.join(given) or 'none'}: give --gpu rtx4090, say"
        )
    notes: list[str] = []
    count = flags["num_gpus"]
    if flags["gpu"] is not None:
        hardware, notes = _usual_machine(flags)
    elif flags["machine"] is not None and Path(flags["machine"]).suffix == ".json":
        hardware = read_profile(flags["machine"])
    elif flags["machine"] is not None:
        hardware = find_machine(flags["machine"], count)
    else:
        hardware = read_profile(flags["profile"])
    changes: dict[str, Any] = {}
    if flags["host"] is not None:
        changes["host"] = find_host(flags["host"])
    if flags["host_ram"] is not None:
        ram = Quantity(value=flags["host_ram"], kind="spec", source="--host-ram")
        changes["host"] = replace(changes.get("host", hardware.host), dram_bytes=ram)
    if flags["link"] is not None:
        changes["link"] = find_link(flags["link"])
    if flags["fabric"] is not None:
        changes["fabric"] = find_fabric(flags["fabric"])
    if flags["nvme"] is not None:
        changes["nvme"] = None if flags["nvme"] == "none" else find_nvme(flags["nvme"])
    if count is not None:
        changes["num_devices"] = count
    return replace(hardware, **changes) if changes else hardware, notes


def _usual_machine(flags: dict[str, Any]) -> tuple[HardwareProfile, list[str]]:
    """Return a machine of the table with this device and enough of them, and what it lends.

    Raises:
        ConfigError: The device is unknown, or no machine holds it and parts are missing.
    """
    from sim.hardware.catalog import assemble, find_device, find_machine, names

    device, count = find_device(flags["gpu"]), flags["num_gpus"] or 1
    parts = [name for name in ("host", "link") if flags[name] is None]
    if not parts and (count == 1 or flags["fabric"] is not None):
        made = assemble(
            device, flags["host"], flags["link"], count, fabric=flags["fabric"],
            nvme=None if flags["nvme"] in (None, "none") else flags["nvme"],
        )  # fmt: skip
        return made, []
    usual = [find_machine(name) for name in names("machine")]
    usual = [machine for machine in usual if machine.device.name == device.name]
    enough = [machine for machine in usual if machine.num_devices >= count]
    if not enough:
        raise ConfigError(
            f"no machine of the table holds {count} {device.name}: give --host, --link"
            f"{' and --fabric' if count > 1 else ''}"
        )
    chosen = min(enough, key=lambda machine: machine.num_devices)
    lent = [*parts, *(["fabric"] if count > 1 and flags["fabric"] is None else [])]
    lent += ["drives"] if flags["nvme"] is None and chosen.nvme is not None else []
    note = f"assumed as in {chosen.name}: {', '.join(lent)}"
    return replace(chosen, num_devices=count), [note]


def workload_of(flags: dict[str, Any], hardware: HardwareProfile) -> Workload:
    """Return the workload.

    Raises:
        ConfigError: The model is unknown or lacks a field, or a number breaks its rule.
    """
    from sim.models.workload import Workload

    name, config = _model(flags["model"])
    peaks = hardware.device.flops
    usable = next(
        (name for name in ("bfloat16", "float16", "float32") if name in peaks), DTYPES[0]
    )
    return Workload.of_config(
        name,
        config,
        batch_size=flags["batch_size"],
        sequence=flags["sequence"],
        accumulation=flags["grad_accum"],
        dtype=flags["dtype"] or usable,
        checkpointing=bool(flags["checkpointing"]),
    )


def _model(name: str) -> tuple[str, dict[str, Any]]:
    from sim.models.table import find_model

    size = MODEL_SIZES.get(name)
    return find_model(name) if size is None else (name, size.config())
