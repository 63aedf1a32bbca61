"""Types of flags beside click's own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.output.target import PICTURES, check_file, check_folder
from experiments.request import words
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    FlagType = click.ParamType[Any]
else:
    FlagType = click.ParamType  # click below 8.4 has no parameter to give


class OutputFile(click.Path):
    """A file that a command writes in the end, tried before anything is done."""

    def __init__(self, *suffixes: str) -> None:
        """Take any name, or those with one of these ends."""
        super().__init__(path_type=Path)
        self._suffixes = suffixes

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the path."""
        path: Any = super().convert(value, param, ctx)
        try:
            check_file(path, self._suffixes)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return path


class OutputFolder(click.Path):
    """A folder that a command fills, tried before anything is done; a default is not tried."""

    def __init__(self) -> None:
        """Take any folder, there or not."""
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the path."""
        path: Any = super().convert(value, param, ctx)
        source = None if ctx is None else ctx.get_parameter_source(param.name)
        if source is not click.core.ParameterSource.DEFAULT:
            try:
                check_folder(path)
            except ConfigError as error:
                self.fail(str(error), param, ctx)
        return path


PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
PICTURE = OutputFile(*PICTURES)
NEW_FILE = OutputFile()
NEW_FOLDER = OutputFolder()
"""Paths that commands write."""
KNOWN_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
KNOWN_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)
"""Paths of commands; those that are known have to exist."""

_GIGA = 1e9


class Word(FlagType):
    """Argument of a word's parser."""

    def __init__(self, parse: Callable[[str], Any], name: str) -> None:
        """Take the parser, which raises ``ConfigError``, and what help calls a word."""
        self._parse = parse
        self.name = name

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the word's value."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class LinkRates(FlagType):
    """``D2H,H2D`` in GB/s; one number stands for both."""

    name = "D2H,H2D"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, float]:
        """Return bytes/s each way."""
        if isinstance(value, tuple):
            return value
        try:
            rates = [float(part) for part in str(value).split(",")]
        except ValueError:
            rates = []
        if len(rates) not in (1, 2) or not all(math.isfinite(r) and r > 0 for r in rates):
            self.fail(
                f"the link's rates are two positive numbers of GB/s, as in 0.05,0.05, but got "
                f"{value!r}", param, ctx,
            )  # fmt: skip
        return rates[0] * _GIGA, rates[-1] * _GIGA


class NumberOr(FlagType):
    """A number, or a word that stands for None."""

    def __init__(self, kind: type, word: str) -> None:
        """Take ``kind``, int or float, and the ``word``."""
        self._kind = kind
        self._word = word
        self.name = f"{kind.__name__.upper()}|{word}"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the number, or None for the word."""
        if value == self._word:
            return None
        try:
            return self._kind(value)
        except (TypeError, ValueError):
            self.fail(f"must be a number or {self._word!r}, but is {value!r}", param, ctx)


class Gigabytes(FlagType):
    """GB, as bytes."""

    name = "GB"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return bytes."""
        try:
            return float(value) * _GIGA
        except ValueError:
            self.fail(f"must be a number of GB, as in 24 or 0.5, but is {value!r}", param, ctx)


class Memory(FlagType):
    """A positive number of GiB, or 0 where that means something."""

    name = "GIB"

    def __init__(self, *, zero: bool = False) -> None:
        """Take whether 0 is allowed."""
        self._least = 0.0 if zero else math.ulp(0.0)

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return bytes."""
        try:
            size = float(value)
        except (TypeError, ValueError):
            size = math.nan
        if not (math.isfinite(size) and size >= self._least):
            what = "a positive number of GiB" if self._least else "0 or more GiB"
            found = re.match(r"\s*\d+(?:\.\d+)?", str(value))
            write = found[0].strip() if found and float(found[0]) >= self._least else "64"
            self.fail(f"must be {what}, without a unit, got {value!r}: write {write}", param, ctx)
        return size * (1 << 30)


COUNT = Word(words.amount, "N")
"""Number of things, as in 300M, 1.5B or 1,500,000,000."""


class Positive(FlagType):
    """A positive number, neither infinite nor NaN."""

    name = "FLOAT"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return the number."""
        try:
            return words.number(str(value))
        except ConfigError:
            self.fail(f"must be a positive number, as in 2.5, got {value!r}", param, ctx)
