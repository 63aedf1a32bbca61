"""All axes: what each varies, its unit, and where its values go."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from experiments.request import words
from experiments.request.request import STRATEGY, Request
from experiments.request.words import GIB, Value
from experiments.training.settings.field import Setting, settings_of
from sim.names import fold, nearest
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError

Place = Literal["request", "strategy", "knob", "figure", "machine"]

_UNITS: Mapping[str, float] = {"": 1.0, "GB/s": 1e9, "GiB": GIB, "TFLOP/s": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisKind:
    """Kind of an axis: the field or quantity that it varies."""

    name: str
    place: Place
    """Where a value goes: a request's field, of its strategy or of the rest, a setting of the
    update rule, a figure of the machine, or a part of several figures."""
    target: str
    """Name of the field or setting, or dotted name of the figure."""
    parse: Callable[[str], Value]
    """Parser from a word to a value; raises ``ConfigError``."""
    scale: float = 1.0
    """SI units in one of its own."""
    unit: str = ""
    help: str
    known: tuple[str, ...] = ()
    """Words that it may be given, where only a few are."""

    @property
    def meaning(self) -> str:
        """Description of the axis in a sentence, with its unit."""
        said = re.split(r"\. |; None is", self.help)[0].removesuffix(".")
        return f"{said} ({self.unit})" if self.unit else said


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a sweep and its values, in its own unit and in the order given."""

    name: str
    values: tuple[Value, ...]

    @property
    def kind(self) -> AxisKind:
        """Kind of the axis's values."""
        return kind_of(self.name)

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers."""
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)

    @property
    def label(self) -> str:
        """Name and unit of the axis, for a picture."""
        unit = self.kind.unit
        return f"{self.name} ({unit})" if unit else self.name


_ALIASES: Mapping[str, str] = {"batch": "batch_size", "k": "topk_ratio", "S": "update_interval"}
_WITHOUT_EFFECT = (
    "forward_delay",
    "full_warm_up_rounds",
    "importance_decay",
    "hysteresis",
    "select_strategy",
    "steps_per_epoch",
)
"""Knobs that no steady step's time or memory depends on."""
_BEHIND_CORES = "host_threads"
"""Field whose axis is set behind that of cores, which resets the field."""


_PARSERS: Mapping[type, Callable[[str], Value]] = {
    bool: words.switch,
    int: words.count,
    float: words.number,
}


def _field(item: Setting) -> AxisKind:
    known = item.choices or item.known or (("yes", "no") if item.kind is bool else ())
    place: Place = "strategy" if item.section == STRATEGY else "request"
    return AxisKind(
        name=item.name,
        place="machine" if item.name == _BEHIND_CORES else place,
        target=item.name,
        parse=item.parse or _PARSERS.get(item.kind) or words.choice(known),
        scale=item.unit,
        unit="GiB" if item.unit == GIB else "",
        help=item.help,
        known=known,
    )


def _knob(item: Setting) -> AxisKind:
    """Return the axis of a setting of the update rule, which checks values itself."""

    def parse(word: str) -> Value:
        if item.kind is bool:
            return words.switch(word)
        try:
            value: Value = item.kind(word)
        except ValueError:
            what = {int: "whole numbers", float: "numbers"}[item.kind]
            raise ConfigError(f"values must be {what}, got {word!r}") from None
        ZenFlowConfig.preset("zenflow", **{item.name: value})
        return value

    known = ("yes", "no") if item.kind is bool else item.choices
    return AxisKind(
        name=item.name, place="knob", target=item.name, parse=parse, help=item.help, known=known
    )


def _number(name: str, help: str, unit: str = "", figure: str | None = None) -> AxisKind:
    """Return the axis of a figure, by its dotted name, or of what sets several."""
    return AxisKind(
        name=name, place="figure" if figure else "machine", target=figure or name,
        parse=words.number, scale=_UNITS[unit], unit=unit, help=help,
    )  # fmt: skip


_FIGURES = (
    replace(_number("cores", "Cores of the whole host"), parse=words.count),
    _number("link_rate", "Rate of the link, each way", "GB/s"),
    _number("d2h", "Rate of copies to the host", "GB/s", "link.d2h"),
    _number("h2d", "Rate of copies to the device", "GB/s", "link.h2d"),
    _number("duplex", "Rate both ways together over their sum, to 1", figure="link.duplex"),
    _number("dram", "Rate of one socket's memory", "GB/s", "host.dram"),
    _number("core_rate", "Rate that one core moves", "GB/s", "host.core_bandwidth"),
    _number("device_memory", "Memory of one device", "GiB", "device.memory"),
    _number("device_rate", "Rate of device memory", "GB/s", "device.bandwidth"),
    _number("tflops", "Dense peak in the workload's dtype", "TFLOP/s"),
)


def _kinds() -> dict[str, AxisKind]:
    fields = [_field(item) for item in settings_of(Request).values() if item.is_axis]
    knobs = [
        _knob(item) for name, item in settings_of(ZenFlowConfig).items()
        if name not in _WITHOUT_EFFECT
    ]  # fmt: skip
    found = {kind.name: kind for kind in (*fields, *knobs, *_FIGURES)}
    return {**found, **{name: replace(found[of], name=name) for name, of in _ALIASES.items()}}


KINDS: Mapping[str, AxisKind] = _kinds()
"""Every axis by name; beside these any figure of a profile by its dotted name, in SI units."""


def kind_of(name: str) -> AxisKind:
    """Return the kind of an axis.

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
        return _number(name, "Figure of the profile, in SI units", figure=name)
    known = {fold(known): known for known in (*KINDS, *figures)}
    known = {**known, "accumulation": "grad_accum", "ram": "host_ram", "bandwidth": "dram"}
    found = known.get(fold(name))
    hint = f"did you mean {found!r}?" if found else nearest(name, known)
    raise ConfigError(f"there is no axis {name!r}: {hint}")


def _figure_names() -> tuple[str, ...]:
    from sim.hardware.catalog import find_machine

    return tuple(find_machine("dgx-a100-80", num_hosts=2).quantities())
