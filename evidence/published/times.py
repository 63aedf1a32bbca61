"""Published times and rates as their sources print them, in seconds of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experiments.paper.setups import AnySetup, HostPass, Setup
from zenflow.errors import ConfigError


def _tokens(setup: Setup) -> int:
    """Return the number of tokens of a step on one device."""
    return setup.batch_size * setup.accumulation * setup.sequence


def _sequences(setup: Setup) -> int:
    """Return the number of sequences of a step on all devices."""
    return setup.batch_size * setup.accumulation * _devices(setup)


def _devices(setup: Setup) -> int:
    return setup.devices * setup.hosts


_TIMES: Mapping[str, Callable[[float], float]] = {
    "seconds": lambda value: value,
    "milliseconds": lambda value: value / 1e3,
    "hours": lambda value: value * 3600,
}
_RATES: Mapping[str, Callable[[float, Setup], float]] = {
    "seconds_per_micro_batch": lambda value, setup: value * setup.accumulation,
    "steps_per_second": lambda value, setup: 1.0 / value,
    "sequences_per_second": lambda value, setup: _sequences(setup) / value,
    "tokens_per_second": lambda value, setup: _tokens(setup) * _devices(setup) / value,
    "tokens_per_second_per_device": lambda value, setup: _tokens(setup) / value,
}
_SPANS = ("of_steps", "of_sequences")
_OPERATIONS, _UPDATES = "teraflops_per_device", "billion_parameters_per_second"
_PRINTED = (*_TIMES, *_RATES, _OPERATIONS, _UPDATES)

TIME_KEYS = (*_PRINTED, *_SPANS, "step_flops")
"""Keys of a row about the time of a step.

A row has one time or rate. ``of_steps`` or ``of_sequences`` says how many a time is of, where it
is not of one step. ``step_flops`` is the FLOP of a step on one device, as the source of
``teraflops_per_device`` counts them.
"""


def seconds_of(row: Mapping[str, Any], setup: AnySetup, where: str) -> float:
    """Return the seconds of a step, or of a host's pass.

    Args:
        row: All that is said of a run.
        setup: What ran.
        where: The row's name, for errors.

    Raises:
        ConfigError: The row has no time, two of them, or one that its set-up cannot have.
    """
    printed = [name for name in _PRINTED if name in row]
    if len(printed) != 1:
        raise ConfigError(
            f"{where}: a row has one time or rate, this one has {printed or 'none'}: give one of "
            f"{', '.join(_PRINTED)}"
        )
    (name,) = printed
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{where}: {name} must be a positive number, got {value!r}")
    if name in _TIMES:
        return _of_one_step(_TIMES[name](value), row, setup, where)
    if any(span in row for span in _SPANS):
        raise ConfigError(f"{where}: {' and '.join(_SPANS)} belong to a time, {name} is a rate")
    if isinstance(setup, Setup) and name in _RATES:
        return _RATES[name](value, setup)
    if isinstance(setup, Setup) and name == _OPERATIONS and "step_flops" in row:
        return float(row["step_flops"] / (value * 1e12))
    if isinstance(setup, HostPass) and name == _UPDATES:
        return setup.num_params / 1e9 / value
    needed = ", which needs step_flops" if name == _OPERATIONS else ""
    raise ConfigError(f"{where}: a {type(setup).__name__} cannot have {name}{needed}")


def _of_one_step(seconds: float, row: Mapping[str, Any], setup: AnySetup, where: str) -> float:
    """Return the time of one step, of the time of several."""
    spans = [name for name in _SPANS if name in row]
    if not spans:
        return seconds
    if len(spans) > 1 or not isinstance(setup, Setup):
        raise ConfigError(f"{where}: a time is {' or '.join(_SPANS)} of a set-up, not of both")
    number = row[spans[0]]
    if spans == ["of_sequences"]:
        number /= _sequences(setup)
    return float(seconds / number)
