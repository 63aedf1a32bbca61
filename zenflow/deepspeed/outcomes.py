"""Outcomes: for each key of a DeepSpeed JSON, whether and how it is followed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from zenflow.deepspeed.file import loaded
from zenflow.deepspeed.keys import COMMENT, SECTIONS, is_comment
from zenflow.deepspeed.settings import DeepSpeedSettings, read_content

if TYPE_CHECKING:
    from os import PathLike

    from zenflow.deepspeed.reading import Reading

OutcomeKind = Literal["kept", "changed", "no meaning", "refused"]

_AUTO = {
    "zero_optimization.zenflow.update_interval": "1 at first; a controller (ZenAuto) lengthens it",
    "zero_optimization.zenflow.select_strategy": "once an epoch, as DeepSpeed documents it",
    "zero_optimization.zenflow.select_interval": "once an epoch, as DeepSpeed documents it",
    "scheduler.params.warmup_min_lr": "0",
}
"""Value that "auto" becomes, by key; for all other keys the user gives the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOutcome:
    """Outcome of one key of a DeepSpeed JSON."""

    key: str
    """Name with its sections, as in "optimizer.params.lr"."""

    value: Any
    """Value in the file; None if the file lacks the key."""

    is_in_file: bool
    """Whether the file has the key; only some of the keys that it lacks are listed."""

    kind: OutcomeKind
    """Kind of the outcome: taken as it is, in another way, not at all, or refused."""

    words: str
    """Explanation: the setting here, the reason why there is none, or the remedy."""


def read_with_outcomes(
    source: str | PathLike[str] | Mapping[str, Any], *, steps_per_epoch: int | None = None
) -> tuple[DeepSpeedSettings | None, list[KeyOutcome]]:
    """Return the settings of ``read_deepspeed``, and the outcome of each key.

    Keys are in the file's order. Behind them come keys that the file lacks and that matter.
    Settings are None if a key is refused.

    Raises:
        ConfigError: The file can't be read.
    """
    content = loaded(source)
    settings, reading = read_content(content, steps_per_epoch=steps_per_epoch)
    outcomes = [_outcome(content, reading, *leaf) for leaf in _leaves(content, "")]
    told = {outcome.key for outcome in outcomes}
    for key, words in reading.refused:
        if key not in told:
            outcomes.append(_absent(key, "refused", words.removeprefix(f"{key} ")))
    for key in reading.auto:
        if key not in told:
            outcomes.append(_absent(key, "changed", _AUTO.get(key, "yours to give")))
    return (None if reading.refused else settings), outcomes


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each key's section, name and value, known sections' keys included."""
    for key, value in section.items():
        below = f"{prefix}{key}."
        if below in SECTIONS and isinstance(value, Mapping):
            yield from _leaves(value, below)
        else:
            yield prefix, key, value


def _outcome(
    content: Mapping[str, Any], reading: Reading, prefix: str, key: str, value: Any
) -> KeyOutcome:
    kind, words = _kind_and_words(content, reading, prefix, key, value)
    return KeyOutcome(key=f"{prefix}{key}", value=value, is_in_file=True, kind=kind, words=words)


def _absent(key: str, kind: OutcomeKind, words: str) -> KeyOutcome:
    return KeyOutcome(key=key, value=None, is_in_file=False, kind=kind, words=words)


def _kind_and_words(
    content: Mapping[str, Any], reading: Reading, prefix: str, key: str, value: Any
) -> tuple[OutcomeKind, str]:
    name, known = f"{prefix}{key}", SECTIONS[prefix]
    refused = [words for refused, words in reading.refused if refused == name]
    if refused:
        starts = (f"{name} ", f"{prefix}{key!r} ")
        shown = [words.removeprefix(starts[0]).removeprefix(starts[1]) for words in refused]
        return "refused", "; ".join(shown)
    unused = _why_unused(content, prefix, key, value)
    if unused is not None:
        return "no meaning", unused
    if value == "auto":
        return "changed", _AUTO.get(name, f"yours to give: {known.kept.get(key, key)}")
    return ("kept", known.kept[key]) if key in known.kept else ("changed", known.changed[key])


def _why_unused(content: Mapping[str, Any], prefix: str, key: str, value: Any) -> str | None:
    """Return the reason why a key has no meaning here; None for a key with a meaning."""
    if is_comment(key):
        return COMMENT
    known = SECTIONS[prefix]
    is_precision = prefix in ("bf16.", "fp16.")
    is_off = is_precision and not content[prefix.removesuffix(".")].get("enabled", False)
    if is_off or key in known.refused:  # a refused one would be if it were on
        return "switched off"
    if f"{prefix}{key}." in SECTIONS or value is None:
        return "empty"
    if key not in {*known.kept, *known.changed, *known.unused}:
        return "not looked at, as its section is not followed"
    return known.unused.get(key)
