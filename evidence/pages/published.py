"""Numbers of docs/validation.md and its pages: others' runs beside their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any

from evidence.published import runs
from evidence.studies.published.memory import MEMORY_COLUMNS, about
from evidence.studies.published.study import (
    AIM,
    COLUMNS,
    REGIMES,
    coverage_of,
    errors_by_regime,
    milliseconds,
)
from experiments.lab.columns import Column, Table
from experiments.lab.record import needed
from sim.hardware.components import ADAM_SHARE

Row = Mapping[str, Any]
_HELD = ("rows", "figures", "without_the_group")


@cache
def published() -> dict[str, Any]:
    """Return the content of the newest record, for templates."""
    record = needed("published")
    (data,) = record.rows
    known = runs.published()
    rows = data["rows"]
    coverage = coverage_of(rows)
    held, regimes = coverage["held"], coverage["regimes"]
    return {
        "folder": record.folder.name,
        "aim": AIM,
        "rows": rows,
        "met": sum(_is_met(row) for row in rows),
        "deepspeed_share": data["deepspeed_share"],
        "deepspeed_bytes": data["deepspeed_bytes_per_parameter"],
        "adam_share": ADAM_SHARE.value,
        "regimes": Table(columns=REGIMES, rows=errors_by_regime(rows)),
        "errors": errors_by_regime(rows),
        "topics": [_topic(name, rows) for name in known.topics],
        "not_predicted": known.not_predicted,
        "sigma": coverage["sigma"],
        "terms": Table(
            columns=_TERM_COLUMNS,
            rows=[(name, {**term, **regimes[name]}) for name, term in coverage["terms"].items()],
        ),
        "held": {name: sum(counts[name] for counts in held.values()) for name in _HELD},
        "held_by_group": Table(columns=_HELD_COLUMNS, rows=list(held.items())),
        "memory": Table(columns=MEMORY_COLUMNS, rows=data["memory"]),
        "memory_told": about(data["memory"]),
        "memory_sources": _assumptions(data["memory"]),
        "topic": lambda name: _topic(name, rows),
    }


def _is_met(row: Row) -> bool:
    return bool(abs(row["error"]) <= AIM)


def _held(name: str, head: str) -> Column:
    def show(item: tuple[str, Mapping[str, int]]) -> str:
        return f"{item[1][name]} of {item[1]['rows']}"

    return Column(head=head, show=show)


_COUNTED = (_held("figures", "figures alone"), _held("without_the_group", "without the group"))
_TERM_COLUMNS = (
    Column(head="kind of run", show=lambda item: item[0]),
    Column(head="spread below 1", show=lambda item: f"{item[1]['fast']:.2f}"),
    Column(head="spread above 1", show=lambda item: f"{item[1]['slow']:.2f}"),
    *_COUNTED,
)
_HELD_COLUMNS = (
    Column(head="group", show=lambda item: runs.published().groups[item[0]].title),
    *_COUNTED,
)


def _topic(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return one page of rows: its groups, and the sources that they are numbered by."""
    title, names = runs.published().topics[name]
    own = [row for row in rows if row["group"] in names]
    sources = list(dict.fromkeys(row["source"] for row in own))
    chosen = {group: [row for row in own if row["group"] == group] for group in names}
    return {
        "name": name,
        "title": title,
        "rows": len(own),
        "median": median(abs(row["error"]) for row in own),
        "met": sum(map(_is_met, own)),
        "sources": sources,
        "groups": [_group(group, found, sources) for group, found in chosen.items() if found],
    }


def _group(name: str, rows: Sequence[Row], sources: Sequence[str]) -> dict[str, Any]:
    group = runs.published().groups[name]
    return {
        "title": group.title,
        "unknown": group.doubts,
        "table": Table(columns=_columns(sources), rows=rows),
        "assumed": list(dict.fromkeys(row["assumption"] for row in rows)),
        "open": group.open,
        "missed": _missed([row for row in rows if not _is_met(row)]),
    }


def _columns(sources: Sequence[str]) -> Sequence[Column]:
    set_up, measured, predicted, _, *others = COLUMNS
    number = Column(head="source", show=lambda row: str(sources.index(row["source"]) + 1))
    error = Column(
        head="error",
        show=lambda row: f"{row['error']:+.1%}" + ("" if _is_met(row) else " **missed**"),
    )
    return (set_up, number, measured, predicted, error, *others)


def _missed(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return how missed predictions move with what is unknown, and the set-ups of each."""
    found: dict[str, list[str]] = {}
    for row in rows:
        parts = [f"{name} {share:+.2f}" for name, share in list(row["elasticities"].items())[:4]]
        ends = [f"{text}: {milliseconds(s)}" for text, s in row["alternatives"].items()]
        moves = f"a per cent of a figure moves it by {', '.join(parts)} per cent"
        predicted = f"{milliseconds(row['predicted_seconds'])} predicted: "
        found.setdefault(predicted + "; ".join([moves, *ends]), []).append(row["label"])
    return found


def _assumptions(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the assumptions of each source's cases."""
    taken: dict[str, list[str]] = {}
    for row in rows:
        kept = taken.setdefault(row["source"], [])
        if row["assumption"] not in kept:
            kept.append(row["assumption"])
    return taken
