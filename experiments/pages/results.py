"""docs/results.md, and the README's numbers, made from committed records.

``python -m experiments.pages.results`` writes both; a test compares them with the records.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from experiments.output.files import write_text
from experiments.output.provenance import RESULTS
from experiments.pages.commentary import SECTIONS, Section
from experiments.pages.evidence import SUMMARIES, folder_of, json_of
from experiments.pages.headlines import headlines, table
from experiments.paper.document import document as reproduction
from experiments.training import comparison
from zenflow.errors import ConfigError

ROOT = RESULTS.parent.parent
README, DOCUMENT = ROOT / "README.md", ROOT / "docs" / "results.md"
_INTRODUCTION = """\
# Results

What was found, with the record of each number. Made by `python -m experiments.pages.results` from
the records in `experiments/results`; a test compares them.

*Measured* is the real engine with nothing emulated, or counted. *Emulated* is the real engine on
a CPU, over a link whose copies really take their time. *Simulated* is predicted. The
[experiments](experiments.md) page says what counts as shown.

More: [on a GPU](gpu.md), [validation](validation.md) of predictions, and the
[reproduction](reproduction.md) of the paper's figures.
"""
_FIRST_RUN = "first-run"
_HEADLINES = "headlines"


def document(results: Path = RESULTS) -> str:
    """Return the text of docs/results.md for the records in a folder."""
    lines = [
        _INTRODUCTION,
        "## Six numbers",
        "",
        *(
            line.replace("](experiments/", "](../experiments/")
            for line in table(headlines(results))
        ),
        "",
        "## The paper's claims",
        "",
        f"{_verdicts(results)} [Reproduction](reproduction.md) has each with its source, and ours "
        "beside it. Most are *simulated* for the paper's machines. What is measured on a decoder "
        "of 0.8M parameters is milder than what was published of large ones.",
        "",
    ]
    for section in SECTIONS:
        lines += _section(section, results)
    return "\n".join([*lines, *_what_ifs(results)]).rstrip() + "\n"


def readme(text: str, results: Path = RESULTS) -> str:
    """Return the README with its headlines and its first run as the records have them."""
    said = (
        f"All of them, what failed included: [results](docs/results.md). {_verdicts(results)} "
        "See [reproduction](docs/reproduction.md)."
    )
    text = with_part(text, _HEADLINES, "\n".join([*table(headlines(results)), "", said]))
    return with_part(text, _FIRST_RUN, f"```text\n{first_run(results)}\n```")


def first_run(results: Path = RESULTS) -> str:
    """Return what `make run` printed in the end, in the run whose record is committed."""
    runs = comparison.read_comparison(folder_of("compare", comparison.COMPARISON, results))
    console = Console(file=io.StringIO(), width=130)
    console.print(comparison.table(runs))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in said.splitlines()) + "\n" + comparison.verdict(runs)


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


def _verdicts(results: Path) -> str:
    """Return how many of the paper's claims hold."""
    found = re.search(r"(\d+) hold, (\d+) do not hold, (\d+) unknown", reproduction(results))
    if found is None:
        raise ConfigError("docs/reproduction.md must count its verdicts, and does not")
    held, failed, unknown = map(int, found.groups())
    return (
        f"Of {held + failed + unknown} published claims that were looked at {held} hold, {failed} "
        f"do not and {unknown} can't be told."
    )


def _section(section: Section, results: Path) -> Iterator[str]:
    folder = folder_of(section.record, section.file, results)
    link = f"../experiments/results/{folder.name}"
    yield f"## {section.title}"
    yield ""
    yield f"*{section.kind.capitalize()}.* `{section.command}`, record [{folder.name}]({link})."
    yield ""
    yield section.text
    if section.picture is not None:
        yield f"![{section.alt}]({link}/{section.picture})"
        yield ""
    yield from _summary(folder, section.file)
    yield ""


def _summary(folder: Path, file: str) -> Iterator[str]:
    """Yield what a record says: Markdown below a heading of ours, or a text as it is."""
    names = [file, *SUMMARIES] if Path(file).suffix == ".txt" else SUMMARIES
    path = next(folder / name for name in names if (folder / name).is_file())
    text = path.read_text(encoding="utf-8").strip()
    if path.suffix == ".txt":
        yield from ("```text", text, "```")
        return
    text = re.sub(r"^# .*\n+", "", text)  # the section's own heading stands for it
    text = re.sub(r"^!\[.*\n+", "", text, flags=re.MULTILINE)  # shown above
    text = re.sub(r"^```\n(.*?)^```", r"```text\n\1```", text, flags=re.MULTILINE | re.DOTALL)
    yield re.sub(r"^#", "##", text, flags=re.MULTILINE)


def _what_ifs(results: Path) -> Iterator[str]:
    """Yield the shipped questions of `zenflow sweep`, with the pictures that answer them."""
    folder = folder_of("whatif", "*/study.json", results)
    yield "## What if the machine were another?"
    yield ""
    yield (
        f"*Simulated.* `zenflow sweep --study all`, record [{folder.name}]"
        f"(../experiments/results/{folder.name}). Each has a table for pandas."
    )
    for path in sorted(folder.glob("*/study.json")):
        about = json_of(path)
        yield ""
        yield f"### {about['question']}"
        yield ""
        yield from (f"- {line}" for line in about["answer"])
        yield ""
        picture = f"../experiments/results/{folder.name}/{path.parent.name}/picture.png"
        yield f"![{path.parent.name}]({picture})"


@click.command()
def main() -> None:
    """Write docs/results.md and the README's numbers from the committed records."""
    write_text(DOCUMENT, document())
    write_text(README, readme(README.read_text(encoding="utf-8")))
    click.echo(f"wrote {DOCUMENT} and the numbers of {README}")


if __name__ == "__main__":
    main()
