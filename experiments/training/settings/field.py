"""A setting said once: a dataclass field with its help, its rule and how it is written.

A command line, a settings file, a sweep and a record all ask ``settings_of`` for what a field is.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Rule:
    """Condition on a value."""

    words: str
    """The rule behind the setting's name, as in 'must be at least 1'."""
    holds: Callable[[Any], bool]
    """Whether a value, which has the setting's type, satisfies it."""
    reason: str = ""
    """The remedy, or the reason where it tells the remedy."""


def at_least(least: int, reason: str = "") -> Rule:
    """Return the rule of a count."""
    return Rule(f"must be at least {least}", lambda value: value >= least, reason)


def one_of(choices: Sequence[str]) -> Rule:
    """Return the rule of a word out of a few."""
    return Rule(f"must be one of {', '.join(choices)}", lambda value: value in choices)


POSITIVE = Rule("must be a positive number", lambda value: math.isfinite(value) and value > 0)
NOT_NEGATIVE = Rule("must be 0 or more", lambda value: math.isfinite(value) and value >= 0)
OR_NEVER = Rule("must be 0 (never) or more", NOT_NEGATIVE.holds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Setting: a field of a dataclass with its flag, file key, checks and help."""

    name: str
    """Name of the field."""
    kind: type
    """Type of a value, without its parameters; None may stand beside it."""
    is_optional: bool
    """Whether the value may be None."""
    default: Any
    """Value where nobody says one."""
    choices: tuple[str, ...] = ()
    """Words allowed, where only a few are."""
    known: tuple[str, ...] = ()
    """Words allowed, where they are too many for a flag's usage line."""
    help: str = ""
    """Help of the flag: the first paragraph of the field's docstring."""
    is_written: bool = False
    """Whether the field is a flag and a key of a file."""
    section: str = ""
    """Part of the settings that the field belongs to, a heading of the flags' help."""
    rule: Rule | None = None
    """Rule of the value; None allows every one of its type."""
    key: str = ""
    """Name of the flag, with underscores, and of the file's key."""
    aliases: tuple[str, ...] = ()
    """Further names of the flag."""
    parse: Callable[[str], Any] | None = None
    """Parser of a word, where type and choices don't say one; raises ``ConfigError``."""
    metavar: str | None = None
    """Form of a word in the flag's usage line, where the type doesn't say it."""
    bare: str | None = None
    """Word that the flag stands for without a value; it has a negation then."""
    is_axis: bool = True
    """Whether a sweep may vary the field."""
    unit: float = 1.0
    """SI units in one unit of the flag and of the file."""
    none: str | None = None
    """Word that stands for None in a flag and in a file."""
    bounds: tuple[str, ...] = ()
    """Knobs that the setting bounds most directly."""

    def violation(self, value: Any) -> str | None:
        """Return the violation by a value's type or, with the remedy, by the value."""
        found, wrong = self.typed(value)
        if wrong is not None or found is None or self.rule is None or self.rule.holds(found):
            return wrong
        reason = f": {self.rule.reason}" if self.rule.reason else ""
        verb = "are" if self.kind is tuple else "is"
        return f"{self.name} {self.rule.words}, but {verb} {value!r}{reason}"

    def typed(self, value: Any) -> tuple[Any, str | None]:
        """Return a value as the field has it, and what is wrong with one that can't be.

        A list becomes a tuple, and 1e3 a whole number where one is asked for.
        """
        fits, convert, words = _KINDS[self.kind]
        if value is None and self.is_optional:
            return None, None
        if fits(value):
            return convert(value), None
        return value, f"{self.name} must be {words}, but is {value!r}"

    def read(self, value: Any) -> tuple[Any, str | None]:
        """Return a file's value in SI units, and the rules that it breaks."""
        if value is None or (self.none is not None and value == self.none):
            return self.typed(None)
        if self.unit != 1.0 and self.kind is tuple and _is_number(value):
            value = [value, value]
        found, wrong = self.typed(value)
        if wrong is not None or self.unit == 1.0:
            return found, None if wrong is None else self.key + wrong.removeprefix(self.name)
        if isinstance(found, tuple):
            return tuple(part * self.unit for part in found), None
        return found * self.unit, None

    def written(self, value: Any) -> Any:
        """Return a value as a file has it, in the file's unit."""
        if self.unit == 1.0:
            return value
        return [v / self.unit for v in value] if self.kind is tuple else value / self.unit


def setting(default: Any, *, rule: Rule | None = None, **how: Any) -> Any:
    """Return a dataclass field that is a flag and a key of a file; its docstring is the help.

    Args:
        default: Value where nobody says one.
        rule: Rule of the value, where it isn't ``choices``.
        how: More fields of ``Setting``.
    """
    if "choices" in how:
        rule = one_of(how["choices"])
    how |= {"rule": rule, "is_written": True}
    return dataclasses.field(default=default, metadata=how)


@functools.cache
def settings_of(owner: type) -> Mapping[str, Setting]:
    """Return the settings of a dataclass by the names of its fields.

    Choices of a field that is not of ``setting`` are those of its ``Literal``.
    """
    hints, helps = get_type_hints(owner), _docstrings_of(owner)
    return {
        field.name: _setting(field, hints[field.name], helps.get(field.name, ""))
        for field in dataclasses.fields(owner)
    }


def written_settings(owner: type) -> tuple[Setting, ...]:
    """Return the fields of a dataclass that are flags and keys of a file."""
    return tuple(found for found in settings_of(owner).values() if found.is_written)


def violations(values: Any) -> list[str]:
    """Return the violations by the fields of a dataclass's object, each field by itself."""
    found = settings_of(values.__class__).values()
    wrong = (known.violation(getattr(values, known.name)) for known in found)
    return [words for words in wrong if words is not None]


def _docstrings_of(owner: type) -> dict[str, str]:
    """Return the first paragraph below each field of a class and of its ancestors, in one line."""
    found = {}
    for base in reversed(owner.__mro__[:-1]):
        tree = ast.parse(inspect.getsource(sys.modules[base.__module__]))
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        body = next(node.body for node in classes if node.name == base.__name__)
        for place, below in itertools.pairwise(body):
            match place, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split("\n\n")[0].split())
    return found


def _setting(field: dataclasses.Field[Any], hint: Any, help: str) -> Setting:
    is_optional = type(None) in get_args(hint)
    own = next(part for part in get_args(hint) if part is not type(None)) if is_optional else hint
    how: dict[str, Any] = {"key": field.name, "help": help, **field.metadata}
    origin = get_origin(own) or own
    if origin is Literal:
        how["choices"], origin = get_args(own), str
    return Setting(
        name=field.name, kind=origin, is_optional=is_optional, default=field.default, **how
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and (isinstance(value, Integral) or float(value).is_integer())


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))


_KINDS: Mapping[Any, tuple[Callable[[Any], bool], Callable[[Any], Any], str]] = {
    bool: (lambda value: isinstance(value, bool), bool, "true or false"),
    int: (_is_whole, int, "a whole number"),
    float: (_is_number, lambda value: value, "a number"),
    str: (lambda value: isinstance(value, str), str, "text in quotes"),
    tuple: (_is_pair, tuple, "two numbers"),
    Mapping: (lambda value: isinstance(value, Mapping), lambda value: value, "a table"),
}
"""Types of fields: the check of a value, the conversion, and the type's name for errors."""
