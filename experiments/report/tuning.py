"""Story of a tuned run by its decisions file, also while the run goes on.

``autotune.decisions.file`` reads such a file to repeat a run, so it refuses one without an end.
The page shows a run as far as it has come: the records are the same, a torn last line is left out.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from autotune.decisions.file import DecisionFile
from autotune.decisions.records import Decision, End, Header, WindowRecord, record_of
from zenflow.errors import ConfigError


def read_story(path: Path) -> DecisionFile:
    """Return the content of a decisions file so far.

    Raises:
        ConfigError: It can't be read, is empty, or a line but the last is not what was written.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read ({error}): check the file") from error
    records = []
    for number, line in enumerate(text.splitlines(keepends=True)):
        try:
            records.append(record_of(number, line))
        except ConfigError as error:
            if not line.endswith("\n"):
                break  # a killed run's last line
            raise ConfigError(
                f"{path}, line {number + 1}: {error}; restore the file from a copy, or run again"
            ) from error
    if not records or not isinstance(records[0], Header):
        raise ConfigError(f"{path} does not begin with a header: it is no decisions file")
    return DecisionFile(
        header=records[0],
        windows=tuple(record for record in records if isinstance(record, WindowRecord)),
        decisions=tuple(record for record in records if isinstance(record, Decision)),
        end=next((record for record in records if isinstance(record, End)), None),
    )


def knobs_over_steps(story: DecisionFile) -> list[tuple[int, dict[str, Any]]]:
    """Return the knobs at the start, and after the step of each decision."""
    points = [(0, story.header.knobs), *((each.step, each.new) for each in story.decisions)]
    return [(step, knobs.to_dict()) for step, knobs in points]


def measured_after(story: DecisionFile, place: int) -> float | None:
    """Return the mean measured step of the windows in which a decision's knobs were in force."""
    decision = story.decisions[place]
    later = story.decisions[place + 1 : place + 2]
    until = later[0].step if later else float("inf")
    found = [
        window.step_seconds
        for window in story.windows
        if decision.step < window.step <= until and window.knobs == decision.new
    ]
    return fmean(found) if found else None


def changes(decision: Decision) -> list[tuple[str, Any, Any]]:
    """Return name, old and new value of each knob that a decision moved."""
    before, after = decision.old.to_dict(), decision.new.to_dict()
    return [(name, old, after[name]) for name, old in before.items() if old != after[name]]
