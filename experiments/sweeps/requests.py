"""From the words of a command or a sweep to a machine and a workload."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.training.settings.sizes import MODEL_SIZES
from experiments.training.settings.training import DTYPES
from sim.models.workload import MOST_MICRO_BATCHES
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from sim.hardware.components import Device
    from sim.hardware.profile import HardwareProfile
    from sim.models.recomputation import Recomputation
    from sim.models.workload import Workload
    from sim.traced.step import TracedStep

_NAMED_BASES = ("gpu", "machine", "profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A machine and a workload as a person names them; each field is a flag of a command."""

    model: str = ""
    """Name of a model or of a size, a config.json, or a directory with one."""
    gpu: str | None = None
    """Device whose usual machine is meant."""
    machine: str | None = None
    """Whole machine by name, or a profile's JSON file."""
    profile: str | Path | None = None
    """File that ``zenflow calibrate`` wrote."""
    num_gpus: int | None = None
    """Number of devices of a host that train together; None is as many as the machine has."""
    num_hosts: int | None = None
    """Number of hosts that train together; None is as many as the machine has."""
    host: str | None = None
    """Host in place of the machine's own."""
    host_ram: float | None = None
    """Bytes of host memory in place of the host's own."""
    host_threads: int | None = None
    """Number of threads that each device's process has; None is its share of the cores."""
    link: str | None = None
    """Link to the host in place of the machine's own."""
    fabric: str | None = None
    """Fabric between devices in place of the machine's own."""
    network: str | None = None
    """Network between hosts in place of the machine's own."""
    nvme: str | None = None
    """Drives in place of the machine's own, or 'none'."""
    batch_size: int = 4
    """Number of sequences in a micro-batch on each device."""
    sequence: int = 1024
    """Number of tokens in a sequence."""
    grad_accum: int = 1
    """Number of micro-batches in a step."""
    dtype: str | None = None
    """Precision of the parameters; None is bfloat16 where the device has it."""
    checkpointing: Recomputation = False
    """Share of the layers that backward recomputes, True being all of them; or by operation."""
    attention: str = "fused"
    """Kernels of attention: fused ones keep no scores, eager ones do."""
    loss: str = "tokens"
    """What follows the last layer: cross entropy of tokens, a sum of logits, or classes."""
    offload_activations: bool = False
    """Whether activations wait on the host for backward."""
    kernels: str | None = None
    """Kernels of elementwise work: eager, which None is too, liger or compiled."""
    from_trace: str | Path | None = None
    """File of torch.profiler with steps of the user's own training, whose times are taken."""
    traced_batch: tuple[int, int] | None = None
    """Sequences of a traced micro-batch and tokens of each; None is as the trace's shapes say."""

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> Request:
        """Return what a command's flags ask for; None leaves a field at its default."""
        given = {item.name: flags.get(item.name) for item in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


def hardware_of(request: Request) -> tuple[HardwareProfile, list[str]]:
    """Return the machine, and notes on what was assumed of it.

    Raises:
        ConfigError: Not exactly one of --gpu, --machine and --profile was given, or a name is
            unknown.
    """
    from sim.hardware.catalog import find_fabric, find_host, find_link, find_machine, find_nvme
    from sim.hardware.file import read_profile
    from sim.hardware.quantity import Quantity

    given = [f"--{name}" for name in _NAMED_BASES if getattr(request, name) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"one of --gpu, --machine and --profile says what the machine is, got "
            f"{' and '.join(given) or 'none'}: give --gpu rtx4090, say"
        )
    notes: list[str] = []
    count = request.num_gpus
    if request.gpu is not None:
        hardware, notes = _usual_machine(request.gpu, request)
    elif request.machine is not None and Path(request.machine).suffix == ".json":
        hardware = read_profile(request.machine)
    elif request.machine is not None:
        hardware = find_machine(request.machine, count)
    else:
        hardware = read_profile(str(request.profile))
    if request.num_hosts is not None or request.network is not None:
        hardware = _joined(hardware, request)
    changes: dict[str, Any] = {}
    if request.host is not None:
        changes["host"] = find_host(request.host)
    if request.host_ram is not None:
        ram = Quantity(value=request.host_ram, kind="spec", source="--host-ram")
        changes["host"] = replace(changes.get("host", hardware.host), dram_bytes=ram)
    if request.link is not None:
        changes["link"] = find_link(request.link)
    if request.fabric is not None:
        changes["fabric"] = find_fabric(request.fabric)
    if request.nvme is not None:
        changes["nvme"] = None if request.nvme == "none" else find_nvme(request.nvme)
    numbers = {"num_devices": count, "host_threads": request.host_threads}
    changes |= {name: number for name, number in numbers.items() if number is not None}
    return replace(hardware, **changes), notes


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
            device, host, link, count, fabric=request.fabric,
            nvme=None if request.nvme in (None, "none") else request.nvme,
        )  # fmt: skip
        return made, []
    chosen = _lender(device, count)
    lent = [name for name, own in (("host", host), ("link", link)) if own is None]
    lent += [*(["fabric"] if count > 1 and request.fabric is None else [])]
    lent += ["drives"] if request.nvme is None and chosen.nvme is not None else []
    note = f"assumed as in {chosen.name}: {', '.join(lent)}"
    if chosen.device.name == device.name:
        return replace(chosen, num_devices=count), [note]
    # Cards of one name with another socket: the link is of their generation, the fabric is not.
    made = assemble(
        device, chosen.host, chosen.link, count, nvme=chosen.nvme,
        fabric=None if count == 1 else _fabric_of(chosen),
    )  # fmt: skip
    return made, [f"{note}; no machine of the table has {device.name}"]


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


def traced_of(request: Request) -> TracedStep | None:
    """Return the traced step that times are taken from; None where shapes alone say them.

    Raises:
        ConfigError: The trace can't be read, does not say of which batch it is, or other kernels
            are asked for.
    """
    if request.from_trace is None:
        if request.traced_batch is not None:
            raise ConfigError("--traced-batch says of which batch a trace is: give --from-trace")
        return None
    if request.kernels not in (None, "eager"):
        raise ConfigError(
            f"{request.from_trace} has the kernels that ran, so --kernels {request.kernels} would "
            "change nothing: leave it out, or trace with those kernels"
        )
    from sim.traced.step import read_step

    step = read_step(str(request.from_trace))
    if request.traced_batch is not None:
        return step.of_batch(*request.traced_batch)
    if step.batch_size is None or step.sequence is None:
        raise ConfigError(
            f"{request.from_trace} has no shapes of token ids: profile with record_shapes=True, "
            "or give --traced-batch 4x1024, say, for micro-batches of 4 sequences of 1024 tokens"
        )
    return step


def as_traced(request: Request, given: Collection[str]) -> Request:
    """Return a request for the traced step's own work, but for what was given otherwise.

    Raises:
        ConfigError: As `traced_of`.
    """
    step = traced_of(request)
    if step is None:
        return request
    own: dict[str, Any] = {
        "batch_size": step.batch_size, "sequence": step.sequence,
        "grad_accum": step.micro_batches, "checkpointing": step.recomputes,
        "dtype": step.dtype,
    }  # fmt: skip
    return replace(request, **{k: v for k, v in own.items() if k not in given})


def notes_on(workload: Workload, hardware: HardwareProfile) -> list[str]:
    """Return what a prediction takes from a trace, and what it does not take from the model."""
    return [*_notes_on_weights(workload), *_notes_on_trace(workload, hardware)]


def _notes_on_weights(workload: Workload) -> list[str]:
    if workload.stored_as is None:
        return []
    return [
        f"the file of {workload.name} has {workload.stored_as} weights (quantization_config); "
        f"predicted with all of them in {workload.dtype}"
    ]


def _notes_on_trace(workload: Workload, hardware: HardwareProfile) -> list[str]:
    step = workload.traced
    if step is None:
        return []
    from sim.timing.traced import is_of, peak_share

    of = f"{step.path} ({step.steps} steps of {step.step_seconds * 1e3:.1f} ms)"
    if is_of(step, hardware.device):
        first = f"compute as traced in {of}"
    else:
        first = (
            f"compute from {of}, scaled from {step.device} to {hardware.device.name} by the "
            "table's rates, so its range is wider"
        )
    return [first, *_notes_on_step(step, workload, peak_share(step, workload, hardware.device))]


def _notes_on_step(step: TracedStep, workload: Workload, share: float | None) -> Iterator[str]:
    """Yield what is odd about a traced step."""
    if step.num_params is None:
        makes = "" if share is None else f"; if so, it reaches {share:.0%} of the device's peak"
        yield (
            f"the trace has no shapes: that it is of {workload.name} and of {step.batch_size} x "
            f"{step.sequence} tokens was not checked{makes}"
        )
    if len(set(step.batches)) > 1:
        least, most = (f"{b} x {t}" for b, t in step.extremes)
        yield (
            f"traced micro-batches have {least} to {most} tokens; predicted are "
            f"{workload.batch_size} x {workload.sequence}, memory too"
        )
    if not step.is_adamw:
        yield (
            f"the traced optimizer is {' and '.join(step.optimizers)}: AdamW's step is modelled "
            "in its place"
        )
    if step.evaluations:
        yield (
            f"left out of the trace, for a forward more than in the others: {step.evaluations} of "
            f"{step.evaluations + step.steps} steps"
        )


def notes_on_positions(request: Request) -> list[str]:
    """Return in a sentence where sequences are longer than the model was made for.

    Raises:
        ConfigError: Its learned positions are fewer.
    """
    from sim.models.positions import check_sequence

    return check_sequence(*_model(request.model), request.sequence)


def workload_of(request: Request, hardware: HardwareProfile) -> Workload:
    """Return the workload.

    Raises:
        ConfigError: The model is unknown or lacks a field, a number breaks its rule, sequences
            are longer than its learned positions, or the trace is of something else.
    """
    from sim.models.workload import Workload

    name, config = _model(request.model)
    notes_on_positions(request)
    _check_size(request)
    peaks = hardware.device.flops
    usable = next(
        (name for name in ("bfloat16", "float16", "float32") if name in peaks), DTYPES[0]
    )
    workload = Workload.of_config(
        name,
        config,
        batch_size=request.batch_size,
        sequence=request.sequence,
        accumulation=request.grad_accum,
        dtype=request.dtype or usable,
        checkpointing=request.checkpointing,
        attention=request.attention,
        loss=request.loss,
        offloads_activations=request.offload_activations,
        kernels=request.kernels or "eager",
        traced=traced_of(request),
    )
    if workload.traced is not None:
        from sim.timing.traced import check_rate

        is_plain = workload.loss != "classes" and all(p.active == 1 for p in workload.parameters)
        tensors = len(workload.parameters) if is_plain else None
        workload.traced.check(name, workload.num_params, tensors)
        check_rate(workload.traced, workload, hardware.device)
    return workload


_MOST = {"batch_size": 65_536, "sequence": 16_777_216, "grad_accum": MOST_MICRO_BATCHES}
_MOST_LAYERS = 1_000
"""Values beyond which nobody trains, and a prediction would take minutes."""


def _check_size(request: Request) -> None:
    """Refuse a step that is larger than any.

    Raises:
        ConfigError: A value is beyond `_MOST`.
    """
    for name, most in _MOST.items():
        value = getattr(request, name)
        if value > most:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} must be at most {most:,}, got {value:,}: lower it")


def _model(name: str) -> tuple[str, dict[str, Any]]:
    from sim.models.table import find_model

    size = MODEL_SIZES.get(name)
    if size is not None:
        return name, size.config()
    found, config = find_model(name)
    for field in ("num_hidden_layers", "n_layer"):
        layers = config.get(field)
        if isinstance(layers, int) and layers > _MOST_LAYERS:
            raise ConfigError(
                f"{found}: {field} must be at most {_MOST_LAYERS:,}, got {layers:,}: check its "
                "config.json"
            )
    return found, config
