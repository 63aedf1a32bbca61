"""Search space: which knobs the tuner tries, and the only place that asks an Optuna trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from zenflow.config import ZenFlowConfig, raise_violations
from zenflow.errors import ConfigError
from zenflow.knobs import Knobs

if TYPE_CHECKING:
    from optuna.trial import BaseTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The values of each knob that are tried, in ascending order.

    Raises:
        ConfigError: A tuple is empty, out of order, or has a value that breaks a knob's rule.

    See `SearchSpace.grid`.
    """

    topk_ratios: tuple[float, ...] = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
    update_intervals: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    select_intervals: tuple[int, ...] = (50, 100, 200, 400)

    def __post_init__(self) -> None:
        """Check every value, with all others at their defaults."""
        raise_violations("the search space", self._violations())

    def _violations(self) -> Iterator[str]:
        for item in fields(self):
            values = getattr(self, item.name)
            if not isinstance(values, tuple) or not values:
                yield f"{item.name} must be a tuple of at least one value, got {values!r}"
                continue
            broken = list(_rule_violations(item.name, values))
            yield from broken
            if len(set(values)) != len(values):
                yield f"{item.name} must not repeat a value, got {values!r}: leave one out"
            elif not broken and list(values) != sorted(values):
                yield f"{item.name} must ascend, got {values!r}: sort it"

    @property
    def values(self) -> Mapping[str, tuple[Any, ...]]:
        """Values of each knob, by its name."""
        return {_knob_of(item.name): getattr(self, item.name) for item in fields(self)}

    def grid(self) -> Iterator[Knobs]:
        """Yield every setting once.

        >>> space = SearchSpace(topk_ratios=(0.1,), update_intervals=(1, 4))
        >>> len(list(space.grid()))
        8
        """
        for values in product(*self.values.values()):
            yield Knobs(**dict(zip(self.values, values, strict=True)))

    def __contains__(self, knobs: Knobs) -> bool:
        """Return whether a setting is one of the grid's."""
        return all(getattr(knobs, name) in values for name, values in self.values.items())

    def neighbours(self, knobs: Knobs) -> list[Knobs]:
        """Return the settings of the space that are one value away in one knob.

        From a knob whose value is not in the space it is one away to the nearest values that are.
        """
        moved = (
            replace(knobs, **{name: value})
            for name, values in self.values.items()
            for value in _beside(getattr(knobs, name), values)
        )
        return [other for other in moved if other in self]

    def suggest(self, trial: BaseTrial) -> Knobs:
        """Return a setting that a trial chooses among the values themselves.

        What is stored is then what a person reads: ``topk_ratio=0.1``. Optuna takes the values
        for categories, so that a sampler does not know their order.
        """
        return Knobs.from_dict(
            {name: trial.suggest_categorical(name, values) for name, values in self.values.items()}
        )

    def suggest_indices(self, trial: BaseTrial) -> Knobs:
        """Return a setting that a trial chooses by the values' places in their order.

        For samplers that know numbers only, or that are to know the order. Parameters are then
        named ``topk_ratio_index`` and so on.
        """
        chosen = {
            name: values[trial.suggest_int(f"{name}{INDEX_SUFFIX}", 0, len(values) - 1)]
            for name, values in self.values.items()
        }
        return Knobs.from_dict(chosen)

    def params_of(self, knobs: Knobs) -> dict[str, Any]:
        """Return the parameters with which ``suggest`` gives this setting, for enqueue_trial.

        Raises:
            ConfigError: The setting is not in the space.
        """
        if knobs not in self:
            raise ConfigError(
                f"only settings of the search space can be tried, but {knobs} is not in "
                f"{dict(self.values)}: add its values to the space"
            )
        return knobs.to_dict()

    def indices_of(self, knobs: Knobs) -> dict[str, int]:
        """Return the parameters with which ``suggest_indices`` gives this setting.

        Raises:
            ConfigError: The setting is not in the space.
        """
        params, values = self.params_of(knobs), self.values
        return {f"{name}{INDEX_SUFFIX}": values[name].index(params[name]) for name in values}


INDEX_SUFFIX = "_index"
"""Ending of a knob's name where its parameter is a place in the order of its values."""


def _knob_of(field_name: str) -> str:
    return field_name.removesuffix("s")


def _rule_violations(name: str, values: Sequence[Any]) -> Iterator[str]:
    """Yield the rules of ``ZenFlowConfig`` that single values break."""
    start = Knobs.of(ZenFlowConfig())
    for value in values:
        try:
            replace(start, **{_knob_of(name): value}).applied_to(ZenFlowConfig())
        except (ConfigError, TypeError) as error:
            yield f"{name} has {value!r}, which can't be run: {error}"


def _beside(value: Any, values: Sequence[Any]) -> list[Any]:
    """Return the next lower and the next higher of some values."""
    below = [own for own in values if own < value]
    above = [own for own in values if own > value]
    return [*below[-1:], *above[:1]]
