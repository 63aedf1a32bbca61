"""All axes: what each varies, its unit, and where its values go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from experiments.sweeps.axes import words
from experiments.sweeps.axes.words import Value
from experiments.training.settings.field import settings_of
from experiments.training.settings.training import DTYPES
from sim.models.kernels import KERNELS
from sim.models.workload import ATTENTIONS, LOSSES
from sim.names import fold, nearest
from sim.timing.division import PARALLELS
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError

Place = Literal["flag", "strategy", "knob", "figure", "machine"]

_GIGA, _TERA, GIB = 1e9, 1e12, float(1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisKind:
    """What one axis means."""

    name: str
    place: Place
    """Where a value goes: a flag of `zenflow simulate`, a knob, or a figure of the machine."""
    target: str
    """Name of the flag or knob, or dotted name of the figure."""
    parse: Callable[[str], Value]
    """Parser from a word to a value; raises ``ConfigError``."""
    scale: float = 1.0
    """SI units in one of its own."""
    unit: str = ""
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a sweep and its values, in its own unit and in the order given."""

    name: str
    values: tuple[Value, ...]

    @property
    def kind(self) -> AxisKind:
        """What it means."""
        return kind_of(self.name)

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers."""
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)

    @property
    def label(self) -> str:
        """Its name and unit, for a picture."""
        unit = self.kind.unit
        return f"{self.name} ({unit})" if unit else self.name


SYSTEM_OPTIONS = ("float32_master", "lora_rank", "lora_targets")
"""Options of other systems, which are no settings of the update rule."""
_SHORT: Mapping[str, str] = {"k": "topk_ratio", "S": "update_interval"}
_WITHOUT_EFFECT = (
    "full_warm_up_rounds",
    "importance_decay",
    "hysteresis",
    "select_strategy",
    "steps_per_epoch",
)
"""Knobs that no steady step's time or memory depends on."""


def _axis(
    place: Place,
    name: str,
    parse: Callable[[str], Value],
    help_: str,
    target: str | None = None,
    **unit: Any,
) -> AxisKind:
    return AxisKind(name=name, place=place, target=target or name, parse=parse, help=help_, **unit)


def _flag(name: str, parse: Callable[[str], Value], help_: str, **more: Any) -> AxisKind:
    return _axis("flag", name, parse, help_, **more)


def _figure(name: str, target: str, scale: float, unit: str, help_: str) -> AxisKind:
    return _axis("figure", name, words.number, help_, target, scale=scale, unit=unit)


def _knobs() -> Iterable[AxisKind]:
    for name, target in _SHORT.items():
        yield _axis("knob", name, words.knob(target), target, target)
    for name in settings_of(ZenFlowConfig):
        if name not in _WITHOUT_EFFECT:
            yield _axis("knob", name, words.knob(name), "as the flag of zenflow simulate")


KINDS: Mapping[str, AxisKind] = {
    kind.name: kind
    for kind in (
        _flag("model", words.model, "named model, config.json or directory"),
        _flag("gpu", words.part("device"), "device, with the rest of its usual machine"),
        _flag("machine", words.machine, "whole machine, or a profile's JSON file"),
        _flag("host", words.part("host"), "host"),
        _flag("link", words.part("link"), "link to the host"),
        _flag("fabric", words.part("fabric"), "between devices"),
        _flag("network", words.part("network"), "between hosts"),
        _flag("nvme", words.drives, "drives, or none"),
        _flag("num_gpus", words.count, "devices of a host"),
        _flag("num_hosts", words.count, "hosts"),
        _flag("host_ram", words.number, "host memory", scale=GIB, unit="GiB"),
        _flag("batch", words.count, "sequences of a micro-batch", target="batch_size"),
        _flag("sequence", words.count, "tokens of a sequence"),
        _flag("grad_accum", words.count, "micro-batches of a step"),
        _flag("dtype", words.choice(DTYPES), "of parameters"),
        _flag("kernels", words.choice(KERNELS), "of elementwise work: eager, liger, compiled"),
        _flag("checkpointing", words.recomputation, "recomputed: yes, no, a share (1/2), op"),
        _flag("attention", words.choice(ATTENTIONS), "kernels"),
        _flag("loss", words.choice(LOSSES), "tokens, parts, float32, sum of logits, classes"),
        _flag("offload_activations", words.switch, "activations on the host: yes, no"),
        _axis("strategy", "strategy", words.strategy, "strategy"),
        _axis("strategy", "parallel", words.choice(PARALLELS), "how devices share a model"),
        _axis("strategy", "reshard_after_forward", words.switch, "of sharded weights: yes, no"),
        *_knobs(),
        _axis("knob", "float32_master", words.switch, "float32 weights too: yes, no"),
        _axis("knob", "lora_rank", words.count, "rank of adapters, of lora and qlora"),
        _axis("knob", "lora_targets", words.targets, "matrices with adapters: all, attention"),
        _axis("machine", "cores", words.count, "cores of the whole host"),
        _axis("machine", "host_threads", words.count, "of the host's update, for each device"),
        _axis("machine", "link_rate", words.number, "of the link, each way",
              scale=_GIGA, unit="GB/s"),
        _figure("d2h", "link.d2h", _GIGA, "GB/s", "of copies to the host"),
        _figure("h2d", "link.h2d", _GIGA, "GB/s", "of copies to the device"),
        _figure("duplex", "link.duplex", 1.0, "", "both ways together over their sum, to 1"),
        _figure("dram", "host.dram", _GIGA, "GB/s", "of one socket's memory"),
        _figure("core_rate", "host.core_bandwidth", _GIGA, "GB/s", "that one core moves"),
        _figure("device_memory", "device.memory", GIB, "GiB", "of one device"),
        _figure("device_rate", "device.bandwidth", _GIGA, "GB/s", "of device memory"),
        _axis("machine", "tflops", words.number, "dense peak in the workload's dtype",
              scale=_TERA, unit="TFLOP/s"),
    )
}  # fmt: skip
"""Every axis by name; beside these any figure of a profile by its dotted name, in SI units."""


def kind_of(name: str) -> AxisKind:
    """Return what an axis means.

    Raises:
        ConfigError: There is no such axis; the nearest names are given.
    """
    if name in KINDS:
        return KINDS[name]
    if name in _WITHOUT_EFFECT:
        raise ConfigError(
            f"no steady step's time or memory depends on {name}, so there is nothing to vary: it "
            "decides accuracy, which `zenflow train` shows"
        )
    figures = _figure_names()
    if name in figures:
        return _figure(name, name, 1.0, "", "figure of the profile, in SI units")
    known = {fold(known): known for known in (*KINDS, *figures)}
    known = {**known, "accumulation": "grad_accum", "ram": "host_ram", "bandwidth": "dram"}
    found = known.get(fold(name))
    hint = f"did you mean {found!r}?" if found else nearest(name, known)
    raise ConfigError(f"there is no axis {name!r}: {hint}")


def _figure_names() -> tuple[str, ...]:
    from sim.hardware.catalog import find_machine

    return tuple(find_machine("dgx-a100-80", num_hosts=2).quantities())
