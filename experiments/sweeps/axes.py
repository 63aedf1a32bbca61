"""Axes: what a sweep may vary, and how their values are written.

An axis is a part of the machine by name, one figure of it, a number of the workload, or a setting
of the update rule. Values are a list ``a,b,c`` of names or numbers; of numbers also ranges:
``lo:hi:step``, or ``lo:hi:xN``, which multiplies by N.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.training.settings.field import settings_of
from experiments.training.settings.training import DTYPES, MODEL_SIZES
from sim.models.kernels import KERNELS
from sim.models.recomputation import BY_OPERATION, Recomputation
from sim.models.workload import ATTENTIONS, LOSSES
from sim.names import fold, nearest
from sim.timing.division import PARALLELS
from zenflow.config import ZenFlowConfig, unknown_name
from zenflow.errors import ConfigError

Value = str | int | float | bool | None
Place = Literal["flag", "strategy", "knob", "figure", "machine"]

_GIGA, _TERA, GIB = 1e9, 1e12, float(1 << 30)
_MOST_VALUES = 100_000
"""Most values of one axis."""
_ROUNDING = 1e-9
"""Share of a step by which a range's end may be missed and still be its last value."""


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


# ---- words to values --------------------------------------------------------------------------


def float_in(word: str) -> float:
    """Return the number that a word says; NaN if it says none."""
    try:
        return float(word)
    except ValueError:
        return math.nan


def _number(word: str) -> float:
    value = float_in(word)
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"values must be positive numbers, got {word!r}")
    return value


def _count(word: str) -> int:
    value = _number(word)
    if value != int(value):
        raise ConfigError(f"values must be whole numbers of at least 1, got {word!r}")
    return int(value)


def _switch(word: str, what: str = "yes or no") -> bool:
    switches = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
    if word.casefold() not in switches:
        raise ConfigError(f"values must be {what}, got {word!r}")
    return switches[word.casefold()]


def recomputation(word: str) -> Recomputation:
    """Return what is recomputed: yes or no, a share of the layers (1/2, 20/32, 0.5), or op.

    All layers are True, and none is False.

    Raises:
        ConfigError: It is none of these.
    """
    if word == BY_OPERATION:
        return word
    number = re.fullmatch(r"(\d+\.?\d*)(?:/([1-9]\d*))?", word)
    if number is None:
        return _switch(word, "yes, no, op, or a share of the layers, as in 1/2 or 20/32")
    share = float(number[1]) / int(number[2] or 1)
    if share > 1:
        raise ConfigError(
            f"values must be shares of the layers, to 1, got {word!r}: every second one is 1/2"
        )
    return share if 0 < share < 1 else bool(share)


def _choice(known: Iterable[str]) -> Callable[[str], str]:
    names = tuple(known)

    def parse(word: str) -> str:
        if word not in names:
            raise ConfigError(unknown_name(word, names))
        return word

    return parse


def _part(kind: str) -> Callable[[str], str]:
    """Return the parser of a part's name, which gives it as the table spells it."""

    def parse(word: str) -> str:
        from sim.hardware import catalog

        found: str = getattr(catalog, f"find_{kind}")(word).name
        return found

    return parse


def _drives(word: str) -> str:
    return word if word == "none" else str(_part("nvme")(word))


def _machine(word: str) -> str:
    from sim.hardware.file import read_profile

    if word.endswith(".json"):
        read_profile(word)
        return word
    return str(_part("machine")(word))


def _model(word: str) -> str:
    from sim.models.table import find_model

    if word not in MODEL_SIZES:
        find_model(word)
    return word


def _strategy(word: str) -> str:
    from sim.simulate import STRATEGIES

    return _choice(STRATEGIES)(word)


def _targets(word: str) -> str:
    from sim.schedules.systems.lora import TARGETS

    return _choice(TARGETS)(word)


def _knob(name: str) -> Callable[[str], Value]:
    """Return the parser of a setting of the update rule, which the rule itself checks."""
    kind = settings_of(ZenFlowConfig)[name].kind

    def parse(word: str) -> Value:
        if kind is bool:
            return _switch(word)
        try:
            value: Value = kind(word)
        except ValueError:
            what = {int: "whole numbers", float: "numbers"}[kind]
            raise ConfigError(f"values must be {what}, got {word!r}") from None
        ZenFlowConfig.preset("zenflow", **{name: value})
        return value

    return parse


# ---- all axes ---------------------------------------------------------------------------------

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
    return _axis("figure", name, _number, help_, target, scale=scale, unit=unit)


def _knobs() -> Iterable[AxisKind]:
    for name, target in _SHORT.items():
        yield _axis("knob", name, _knob(target), target, target)
    for name in settings_of(ZenFlowConfig):
        if name not in _WITHOUT_EFFECT:
            yield _axis("knob", name, _knob(name), "as the flag of zenflow simulate")


KINDS: Mapping[str, AxisKind] = {
    kind.name: kind
    for kind in (
        _flag("model", _model, "named model, config.json or directory"),
        _flag("gpu", _part("device"), "device, with the rest of its usual machine"),
        _flag("machine", _machine, "whole machine, or a profile's JSON file"),
        _flag("host", _part("host"), "host"),
        _flag("link", _part("link"), "link to the host"),
        _flag("fabric", _part("fabric"), "between devices"),
        _flag("network", _part("network"), "between hosts"),
        _flag("nvme", _drives, "drives, or none"),
        _flag("num_gpus", _count, "devices of a host"),
        _flag("num_hosts", _count, "hosts"),
        _flag("host_ram", _number, "host memory", scale=GIB, unit="GiB"),
        _flag("batch", _count, "sequences of a micro-batch", target="batch_size"),
        _flag("sequence", _count, "tokens of a sequence"),
        _flag("grad_accum", _count, "micro-batches of a step"),
        _flag("dtype", _choice(DTYPES), "of parameters"),
        _flag("kernels", _choice(KERNELS), "of elementwise work: eager, liger, compiled"),
        _flag("checkpointing", recomputation, "layers computed again: yes, no, a share (1/2), op"),
        _flag("attention", _choice(ATTENTIONS), "kernels"),
        _flag("loss", _choice(LOSSES), "tokens, parts, float32, sum of logits, classes"),
        _flag("offload_activations", _switch, "activations on the host: yes, no"),
        _axis("strategy", "strategy", _strategy, "strategy"),
        _axis("strategy", "parallel", _choice(PARALLELS), "how devices share a model"),
        _axis("strategy", "reshard_after_forward", _switch, "of sharded weights: yes, no"),
        *_knobs(),
        _axis("knob", "float32_master", _switch, "float32 weights beside 16-bit ones: yes, no"),
        _axis("knob", "lora_rank", _count, "rank of adapters, of lora and qlora"),
        _axis("knob", "lora_targets", _targets, "matrices with adapters: all, attention"),
        _axis("machine", "cores", _count, "cores of the whole host"),
        _axis("machine", "host_threads", _count, "threads of the host's update for each device"),
        _axis("machine", "link_rate", _number, "of the link, each way", scale=_GIGA, unit="GB/s"),
        _figure("d2h", "link.d2h", _GIGA, "GB/s", "of copies to the host"),
        _figure("h2d", "link.h2d", _GIGA, "GB/s", "of copies to the device"),
        _figure("duplex", "link.duplex", 1.0, "", "both ways together over their sum, to 1"),
        _figure("dram", "host.dram", _GIGA, "GB/s", "of one socket's memory"),
        _figure("core_rate", "host.core_bandwidth", _GIGA, "GB/s", "that one core moves"),
        _figure("device_memory", "device.memory", GIB, "GiB", "of one device"),
        _figure("device_rate", "device.bandwidth", _GIGA, "GB/s", "of device memory"),
        _axis("machine", "tflops", _number, "dense peak of one device in the workload's dtype",
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


# ---- axes from the command line ---------------------------------------------------------------


def parse_axis(text: str) -> Axis:
    """Return the axis of ``name=values``.

    >>> parse_axis("S=1:16:x2").values
    (1, 2, 4, 8, 16)
    >>> parse_axis("dram=50,100:200:50").values
    (50.0, 100.0, 150.0, 200.0)

    Raises:
        ConfigError: There is no such axis or value, or a range makes no sense.
    """
    name, equals, values = text.partition("=")
    name = name.strip()
    if not equals or not values.strip():
        raise ConfigError(
            f"--vary takes an axis and its values, got {text!r}: write --vary S=1,2,4 or "
            "--vary dram=50:400:x2"
        )
    kind = kind_of(name)
    found: list[Value] = []
    for word in (word.strip() for word in values.split(",")):
        try:
            found += _range(word, kind) if _is_range(word) else [kind.parse(word)]
        except ConfigError as error:
            raise ConfigError(f"--vary {text}: {error}") from None
        if len(found) > _MOST_VALUES:
            raise ConfigError(f"--vary {text}: more than {_MOST_VALUES} values")
    return Axis(name=name, values=tuple(dict.fromkeys(found)))


def parse_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """Return all axes, each once.

    Raises:
        ConfigError: One is wrong, or two vary the same thing.
    """
    axes = tuple(parse_axis(text) for text in texts)
    seen: dict[tuple[str, str], str] = {}
    for axis in axes:
        place = (axis.kind.place, axis.kind.target)
        if place in seen:
            raise ConfigError(f"{seen[place]} and {axis.name} vary the same: give one --vary")
        seen[place] = axis.name
    if {"gpu", "machine"} <= {axis.name for axis in axes}:
        raise ConfigError("gpu and machine both say what the machine is: vary one of them")
    return axes


def _is_range(word: str) -> bool:
    """Whether a word is a range; a path of Windows has a colon too, and is none."""
    parts = word.split(":")
    return len(parts) > 1 and parts[0][:1] in "0123456789.-+"


def _range(word: str, kind: AxisKind) -> list[Value]:
    """Return the values of ``lo:hi:step`` or ``lo:hi:xN``, ends included where they are met."""
    parts = word.split(":")
    if len(parts) != 3:
        raise ConfigError(f"ranges are lo:hi:step or lo:hi:xN, got {word!r}")
    is_factor = parts[2].startswith("x")
    low, high, by = (_finite(part, word) for part in (*parts[:2], parts[2].removeprefix("x")))
    if low > high or (by <= 1 or low <= 0 if is_factor else by <= 0):
        raise ConfigError(
            f"range {word!r} never ends or never begins: lo must be at most hi, and the step "
            "positive, or a factor above 1 on a positive lo"
        )
    steps = math.log(high / low) / math.log(by) if is_factor else (high - low) / by
    if steps > _MOST_VALUES:
        raise ConfigError(f"range {word!r} has more than {_MOST_VALUES} values")
    numbers = [
        low * by**step if is_factor else low + by * step
        for step in range(int(steps * (1 + _ROUNDING) + _ROUNDING) + 1)
    ]
    # Exact where they can be: 0.1 + 2 * 0.1 is meant to be 0.3.
    numbers = [float(f"{min(number, high):.12g}") for number in numbers]
    if is_factor and _takes_whole(kind, low):
        numbers = [float(round(number)) for number in numbers]
    return [kind.parse(f"{number:.12g}") for number in numbers]


def _finite(part: str, word: str) -> float:
    value = float_in(part)
    if not math.isfinite(value):
        raise ConfigError(f"range {word!r} needs numbers, got {part!r}")
    return value


def _takes_whole(kind: AxisKind, low: float) -> bool:
    """Whether an axis takes whole numbers only, so that a factor's values are rounded."""
    if low != int(low):
        return False
    try:
        return isinstance(kind.parse(f"{low:.12g}"), int)
    except ConfigError:
        return False
