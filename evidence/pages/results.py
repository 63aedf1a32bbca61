"""docs/results.md, a page for each study, and the README's numbers, made from committed records.

``python -m evidence.pages.results`` writes all of them; a test compares them with the records.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from rich.console import Console

from evidence.pages.commentary import SECTIONS, Section
from evidence.pages.headlines import ROOT, headlines, table
from evidence.pages.links import replaced
from experiments.lab import catalogue
from experiments.lab.finding import Verdict
from experiments.lab.page import FORMER, PICTURE
from experiments.lab.record import README as PAGE
from experiments.lab.record import committed, needed
from experiments.output.files import write_text
from experiments.output.provenance import RESULTS, newest_record
from experiments.training.run import compared_runs
from zenflow.errors import ConfigError

README, DOCS = ROOT / "README.md", ROOT / "docs"
INDEX, WHAT_IF = "results.md", "results/whatif.md"
_INTRODUCTION = """\
# Results

What was found, study by study: the main number, the picture, and a link to all of it. Made by
`python -m evidence.pages.results` from the records in `evidence/results`; a test compares
them.

*Measured* is the real engine with nothing emulated, or counted. *Emulated* is the real engine on
a CPU, over a link whose copies really take their time. *Simulated* is predicted. The
[experiments](experiments.md) page says what counts as shown.

More: [on a GPU](gpu.md), [validation](validation.md) of predictions, and the
[reproduction](reproduction.md) of the paper's figures.
"""
_FIRST_RUN = "first-run"
_HEADLINES = "headlines"


def documents() -> dict[str, str]:
    """Return the text of every made page, by its address below docs/."""
    pages = {INDEX: _index(), WHAT_IF: _lines(_what_ifs())}
    for section in SECTIONS:
        if not section.elsewhere:
            pages[section.address] = _lines(_study(section))
    return pages


def _lines(found: Iterable[str]) -> str:
    return "\n".join(found).rstrip() + "\n"


def _index() -> str:
    """Return the text of docs/results.md."""
    lines = [
        _INTRODUCTION,
        "## In numbers",
        "",
        *table(headlines(), "../"),
        "",
        "## The paper's claims",
        "",
        f"{_verdicts()} [Reproduction](reproduction.md) has each with its source, and ours "
        "beside it. Most are *simulated* for the paper's machines. What is measured on a decoder "
        "of 0.8M parameters is milder than what was published of large ones.",
        "",
    ]
    for section in SECTIONS:
        lines += _entry(section)
    questions = [catalogue.load(key).title for key in catalogue.names(catalogue.WHAT_IF)]
    lines += [
        "## What if the machine were another?",
        "",
        "*Simulated.* Sweeps over machines and models answer some questions. "
        f"[All of it]({WHAT_IF}).",
        "",
        *(f"- {question}" for question in questions),
    ]
    return _lines(lines)


def readme(text: str) -> str:
    """Return the README with its headlines and its first run as the records have them."""
    said = (
        f"All of them, what failed included: [results](docs/results.md). {_verdicts()} "
        "See [reproduction](docs/reproduction.md)."
    )
    text = with_part(text, _HEADLINES, "\n".join([*table(headlines()), "", said]))
    return with_part(text, _FIRST_RUN, f"```text\n{first_run()}\n```")


def first_run() -> str:
    """Return what `make run` printed in the end, in the run whose record is committed."""
    runs = compared_runs.read_comparison(newest_record("compare", compared_runs.COMPARISON))
    console = Console(file=io.StringIO(), width=130)
    console.print(compared_runs.table(runs))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    return (
        "\n".join(line.rstrip() for line in said.splitlines()) + "\n" + compared_runs.verdict(runs)
    )


def with_part(text: str, name: str, body: str) -> str:
    """Return a text with this body between the two marks of a part.

    Raises:
        ConfigError: The marks aren't there, once each and in order.
    """
    begin, end = f"<!-- made: {name} -->", f"<!-- end: {name} -->"
    found = re.fullmatch(f"(.*{begin}\n).*(\n{end}\n.*)", text, flags=re.DOTALL)
    if found is None or text.count(begin) != 1 or text.count(end) != 1:
        raise ConfigError(f"the text must have a line {begin!r} and later a line {end!r}")
    return f"{found[1]}{body}{found[2]}"


def _verdicts() -> str:
    """Return how many of the paper's claims hold."""
    records = (committed(key) for key in catalogue.names(catalogue.PAPER))
    counts = Counter(f.verdict for record in records if record for f in record.findings)
    return (
        f"Of {counts.total()} published claims that were looked at {counts[Verdict.HOLDS]} hold, "
        f"{counts[Verdict.FAILS]} do not and {counts[Verdict.UNKNOWN]} can't be told."
    )


def _entry(section: Section) -> Iterator[str]:
    """Yield what the index says of a study."""
    link = f"../evidence/results/{section.folder.name}"
    yield from (f"## {section.title}", "")
    if section.is_former:
        yield from (FORMER, "")
    yield from (
        f"*{section.kind.capitalize()}.* {section.opening} [All of it]({section.address}).",
        "",
    )
    if (section.folder / PICTURE).is_file():
        yield from (f"![{section.title}]({link}/{PICTURE})", "")


def _study(section: Section) -> Iterator[str]:
    """Yield a study's page: what is said of it, and its record."""
    folder = section.folder
    link = f"../../evidence/results/{folder.name}"
    yield from (f"# {section.title}", "")
    yield f"*{section.kind.capitalize()}.* `{section.command}`, record [{folder.name}]({link})."
    yield ""
    if section.is_former:
        yield from (FORMER, "")
    yield replaced(section.text, lambda target: f"../{target}")
    shown = (folder / section.file).read_text(encoding="utf-8").strip()
    if section.file == PAGE:
        shown = re.sub(r"^# .*\n+", "", shown)  # the page's own heading stands for it
        yield replaced(shown, lambda target: f"{link}/{target}")
    else:
        yield from ("```text", shown, "```")


def _what_ifs() -> Iterator[str]:
    """Yield the questions of the group whatif, with answers and the pictures that show them."""
    yield "# What if the machine were another?"
    yield ""
    yield ("*Simulated.* `zenflow study whatif`. The rows of each record are a table for pandas.")
    for key in catalogue.names(catalogue.WHAT_IF):
        study, record = catalogue.load(key), needed(key)
        name = record.folder.relative_to(RESULTS).as_posix()
        link = f"../../evidence/results/{name}"
        yield from ("", f"## {study.title}", "", f"Record [{name}]({link}).", "")
        if record.is_of(study):
            (answer,) = study.tables(record.data(study))
            yield from (f"- {line}" for (line,) in answer.texts)
        else:
            yield FORMER
        yield from ("", f"![{study.name}]({link}/picture.png)")


def write(docs: Path = DOCS) -> None:
    """Write every made page."""
    for address, text in documents().items():
        (docs / address).parent.mkdir(exist_ok=True)
        write_text(docs / address, text)


@click.command()
def main() -> None:
    """Write docs/results.md, its studies and the README's numbers from the committed records."""
    write()
    write_text(README, readme(README.read_text(encoding="utf-8")))
    click.echo(f"wrote {DOCS / INDEX}, the pages of its studies, and the numbers of {README}")


if __name__ == "__main__":
    main()
