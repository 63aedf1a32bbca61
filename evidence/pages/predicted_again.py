"""Writes the predictions of committed validations again, as today's simulator makes them.

A record keeps what was measured. When the simulator changes, so do the predictions. A record of
the former update rule keeps its own.
"""

from __future__ import annotations

import click

from experiments.lab.record import put
from experiments.validation.study import STUDY, newest


@click.command()
def main() -> None:
    """Write predictions of the committed validations as they are today."""
    for found in (newest(is_cpu=True), newest(is_cpu=False)):
        if found is not None and found.is_of(STUDY):
            put(found.folder, STUDY, found.header, found.rows)
            click.echo(f"wrote predictions of {found.folder}")


if __name__ == "__main__":
    main()
