"""decisions.jsonl: a controller's measurements and decisions in a run, line by line.

A run's weights depend on its settings and its decisions alone, so this file repeats the run.
Reading is therefore strict: a file that lacks a line, or has one that was changed, is no smaller
record but that of another run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from autotune.decisions.records import (
    FORMAT,
    Decision,
    End,
    Header,
    Record,
    WindowRecord,
    line_of,
    record_of,
)
from zenflow.errors import ConfigError, naming_file
from zenflow.knobs import Knobs

__all__ = [
    "FORMAT", "Decision", "DecisionFile", "DecisionLog", "End", "Header", "WindowRecord",
    "read_decisions", "read_header",
]  # fmt: skip

DECISIONS = "decisions.jsonl"
"""Name of the file in a run's directory."""

_RESTORE = "the file was changed after it was written; restore it from a copy, or run again"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFile:
    """Content of a decisions file: header, decisions, measured windows. See `DecisionLog`."""

    header: Header
    decisions: tuple[Decision, ...]
    windows: tuple[WindowRecord, ...]
    end: End | None
    """Last line of a finished run; None of a run in progress."""

    @property
    def changes(self) -> list[tuple[int, Knobs]]:
        """Pairs (step, knobs in force from the next step on), as the engine's log has them."""
        return [(decision.step, decision.new) for decision in self.decisions]


def read_decisions(path: Path) -> DecisionFile:
    """Return the content of a finished run's file.

    Raises:
        ConfigError: The file can't be read, its run did not finish, or a line (the message says
            which) is not what was written.
    """
    lines = _lines(path)
    found = _read(path, lines).file(path)
    if found.end is None:
        raise ConfigError(
            f"{path} ends at line {len(lines)} without its end record: the run was cut off; "
            + _resume_hint(path)
        )
    return found


def read_header(path: Path) -> Header:
    """Return the first line of a file, whether or not its run has finished.

    Raises:
        ConfigError: The file can't be read, or its first line is not a header.
    """
    return _read(path, _lines(path)[:1]).file(path).header


class DecisionLog:
    """Writes a run's decisions file; every line is with the operating system when it returns.

    Examples:
        >>> import tempfile
        >>> from zenflow.config import ZenFlowConfig
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name) / DECISIONS
        >>> log = DecisionLog(path)
        >>> log.start(Header(settings={}, knobs=Knobs.of(ZenFlowConfig()), largest_interval=None,
        ...                  hardware={}, versions={}, commit=None))
        >>> log.end(step=100, search_seconds=0.0, run_seconds=12.0)
        >>> log.close()
        >>> read_decisions(path).end.step
        100
        >>> folder.cleanup()
    """

    def __init__(self, path: Path) -> None:
        """Name the file."""
        self.path = path
        self._sequence = _DecisionSequence()
        self._file: TextIO | None = None

    @property
    def num_lines(self) -> int:
        """Lines written: what a checkpoint keeps for ``resume``."""
        return len(self._sequence.records)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every decision written."""
        return tuple(self._sequence.decisions)

    def start(self, header: Header) -> None:
        """Begin the file, in place of one that is there.

        Raises:
            OSError: It can't be written.
        """
        self._rewrite([header])

    def resume(self, num_lines: int, header: Header) -> None:
        """Go on after the first lines of the file; those that follow are dropped.

        Args:
            num_lines: Lines there were when the checkpoint was written.
            header: Takes the old one's place: a resumed run may take more steps. Its knobs must
                be the old ones.

        Raises:
            ConfigError: The file has fewer lines, or one of them is not what was written.
        """
        lines = _lines(self.path)
        if len(lines) < num_lines:
            raise ConfigError(
                f"{self.path} has {len(lines)} lines, but had {num_lines} when the checkpoint was "
                f"written: {_RESTORE}"
            )
        sequence = _read(self.path, lines[:num_lines])
        if sequence.header is None or sequence.header.knobs != header.knobs:
            raise ConfigError(
                f"{self.path}, line 1: the run began with other knobs than {header.knobs}: leave "
                "the flags out that change them"
            )
        self._rewrite([header, *sequence.records[1:]])

    def append(self, record: Record) -> None:
        """Write a record after the others.

        Raises:
            ConfigError: It does not follow from the lines before: a decision's old knobs are not
                those in force, or steps don't ascend. Nothing is written then.
        """
        if self._file is None:
            raise ConfigError(f"{self.path} is not open: call start() or resume() first")
        line = line_of(self.num_lines, record)
        self._sequence.take(record)
        with naming_file(self.path):
            self._file.write(line)
            self._file.flush()

    def end(self, *, step: int, search_seconds: float, run_seconds: float) -> None:
        """Write the last line.

        Args:
            step: Steps that the run has taken, all it was to take.
            search_seconds: CPU seconds that the search has taken.
            run_seconds: Seconds of the steps.

        Raises:
            ConfigError: A line is of a later step.
        """
        self.append(
            End(
                step=step,
                num_decisions=len(self._sequence.decisions),
                search_seconds=search_seconds,
                run_seconds=run_seconds,
            )
        )

    def sync(self) -> None:
        """Have every line on the disk when the call returns."""
        if self._file is not None:
            with naming_file(self.path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; it can be resumed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewrite(self, records: Iterable[Record]) -> None:
        """Replace the file by these records, whole or not at all, and go on behind them."""
        self.close()
        self._sequence = _DecisionSequence()
        text = ""
        for n, record in enumerate(records):
            self._sequence.take(record)
            text += line_of(n, record)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with naming_file(self.path, temporary):
                with open(temporary, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)


class _DecisionSequence:
    """The records taken so far, each checked against those before."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.header: Header | None = None
        self.decisions: list[Decision] = []
        self.windows: list[WindowRecord] = []
        self.end: End | None = None

    def take(self, record: Record) -> None:
        """Add a record, or raise a ``ConfigError`` that says why it can't stand here."""
        if self.end is not None:
            raise ConfigError("it stands behind the end record")
        if isinstance(record, Header) != (self.header is None):
            raise ConfigError("the header must be the first line, and the only header")
        if isinstance(record, Header):
            self.header = record
        elif isinstance(record, Decision):
            self._check_decision(record)
            self.decisions.append(record)
        elif isinstance(record, WindowRecord):
            _check_ascends(record.step, self.windows)
            self.windows.append(record)
        else:
            self._check_end(record)
            self.end = record
        self.records.append(record)

    def file(self, path: Path) -> DecisionFile:
        if self.header is None:
            raise ConfigError(
                f"{path} is empty: a decisions file begins with a header; {_RESTORE}"
            )
        return DecisionFile(
            header=self.header,
            decisions=tuple(self.decisions),
            windows=tuple(self.windows),
            end=self.end,
        )

    def _check_decision(self, decision: Decision) -> None:
        assert self.header is not None
        _check_ascends(decision.step, self.decisions)
        in_force = self.decisions[-1].new if self.decisions else self.header.knobs
        if decision.old != in_force:
            raise ConfigError(f"old is {decision.old}, but in force were {in_force}")
        if decision.new == decision.old:
            raise ConfigError(f"new and old are both {decision.new}: it decides nothing")

    def _check_end(self, end: End) -> None:
        lines: list[Decision | WindowRecord] = [*self.decisions, *self.windows]
        last = max((line.step for line in lines), default=0)
        if end.step < last:
            raise ConfigError(f"the run ended at step {end.step}, but has a line of step {last}")
        if end.num_decisions != len(self.decisions):
            raise ConfigError(
                f"num_decisions is {end.num_decisions}, but there are {len(self.decisions)}"
            )


def _check_ascends(step: int, before: Sequence[Decision | WindowRecord]) -> None:
    # A window's line may stand behind a decision of a later step: measurements come late.
    if step < 1 or (before and step <= before[-1].step):
        least = before[-1].step + 1 if before else 1
        raise ConfigError(f"step must be at least {least}, but is {step}: steps ascend")


def _read(path: Path, lines: Sequence[str]) -> _DecisionSequence:
    """Read lines and check each against those before; an error names the line."""
    sequence = _DecisionSequence()
    for n, line in enumerate(lines):
        try:
            sequence.take(record_of(n, line))
        except ConfigError as error:
            cut = f"the line is cut off: the run was killed; {_resume_hint(path)}"
            remedy = _RESTORE if line.endswith("\n") else cut
            raise ConfigError(f"{path}, line {n + 1}: {error}; {remedy}") from error
    return sequence


def _resume_hint(path: Path) -> str:
    return f"resume the run in {path.parent}, which then ends it, or run it again"


def _lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8") as file:
            return file.readlines()
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}): check the path") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}): {_RESTORE}") from error
