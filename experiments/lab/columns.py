"""The one renderer of tables: Markdown for files, rich for terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: its head, and what it shows of a row."""

    head: str
    """Head of the column in tables."""
    show: Callable[[Any], str]
    """Text of a row's cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under columns."""

    columns: Sequence[Column]
    """Columns from left to right."""
    rows: Sequence[Any]
    """Rows from top to bottom: mappings, or whatever the columns show."""
    title: str = ""
    """Headline above the table; empty for none."""
    note: str = ""
    """Paragraph between headline and table; empty for none."""

    @property
    def heads(self) -> list[str]:
        """Headlines of the columns."""
        return [column.head for column in self.columns]

    @property
    def texts(self) -> list[list[str]]:
        """Texts of all cells, row by row."""
        return [[column.show(row) for column in self.columns] for row in self.rows]


def key(name: str, form: str = "", head: str | None = None) -> Column:
    """Return the column of a row's value; a missing one is shown as nothing.

    Args:
        name: Key of the value.
        form: Format of the value.
        head: Headline; None takes the key.
    """

    def show(row: Mapping[str, Any]) -> str:
        value = row.get(name)
        return "" if value is None else format(value, form)

    return Column(head=name if head is None else head, show=show)


def markdown(table: Table) -> list[str]:
    """Return a table's lines in Markdown."""
    above = [line for part in (table.title and f"## {table.title}", table.note) if part
             for line in (part, "")]  # fmt: skip
    body = (_line(texts) for texts in table.texts)
    return [*above, _line(table.heads), "|" + "---|" * len(table.columns), *body]


def rich(table: Table) -> RichTable:
    """Return a table for a rich console."""
    shown = RichTable(*table.heads, title=table.title or None)
    for texts in table.texts:
        shown.add_row(*texts)
    return shown


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(one.replace('|', '/') for one in texts)} |"
