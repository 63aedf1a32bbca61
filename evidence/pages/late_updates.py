"""The picture and the tables of docs/late_updates.md, from committed records.

``python -m evidence.pages.late_updates`` writes them; a test compares them with the records.
"""

from __future__ import annotations

import click

from evidence.pages.headlines import ROOT
from evidence.pages.results import with_part
from evidence.studies.late_updates import stability, study
from evidence.studies.late_updates.picture import BEST_LEAD, FORMER, FRESH, LATE
from experiments.lab.columns import Table, key, markdown
from experiments.lab.page import PICTURE
from experiments.lab.record import needed
from experiments.lab.study import Data
from experiments.output.files import write_text

DOCUMENT = ROOT / "docs" / "late_updates.md"
_SHOWN = (LATE, BEST_LEAD, FORMER, FRESH)


def document(text: str) -> str:
    """Return the page with picture and tables as the records have them."""
    record = needed(stability.STUDY.key)
    link = f"../{record.folder.relative_to(ROOT).as_posix()}/{PICTURE}"
    shown = f"![Stability limits by rule, and the curvature that trainings meet]({link})"
    text = with_part(text, "stability", shown)
    text = with_part(text, "limits", "\n".join(markdown(_limits(record.data(stability.STUDY)))))
    losses = needed(study.STUDY.key)
    return with_part(text, "losses", "\n".join(markdown(_losses(losses.data(study.STUDY)))))


def _limits(data: Data) -> Table:
    limits = data["limits"]
    rows = [
        {"S": interval, **{name: limits[name].get(interval) for name in _SHOWN}}
        for interval in limits[FRESH]
    ]
    return Table(columns=[key("S"), *(key(name, ".2g") for name in _SHOWN)], rows=rows)


def _losses(data: Data) -> Table:
    """Return all runs in one table, as the study's record has them in several."""
    rows = [
        {"where": f"{group['regime']}, {group['lr']:g}", **rule}
        for group in data["groups"]
        for rule in group["rules"]
    ]
    columns = [key("where", head="training, learning rate"), key("name", head="rule"), key("S"),
               key("excess", "+.1%", "above AdamW's loss"), key("seeds")]  # fmt: skip
    return Table(columns=columns, rows=rows)


@click.command()
def main() -> None:
    """Write picture and tables of docs/late_updates.md from the committed records."""
    write_text(DOCUMENT, document(DOCUMENT.read_text(encoding="utf-8")))
    click.echo(f"wrote the numbers of {DOCUMENT}")


if __name__ == "__main__":
    main()
